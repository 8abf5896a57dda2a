"""Fixtures of the tests of rewards."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pipeline.reward import pool

Reply = Callable[[dict[str, Any], Mapping[str, str]], tuple[int, Any]]


@pytest.fixture(autouse=True, scope="module")
def no_workers_left() -> Iterator[None]:
    """Reward workers of one test file do not stay for the next."""
    yield
    pool.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Reply], str]]:
    """Starts an HTTP server that answers the JSON and the headers of each request by a status and a body."""
    servers = []

    def start(reply: Reply) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, answer = reply(request, self.headers)
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.send_header("retry-after-ms", "10")
                self.end_headers()
                self.wfile.write(body)

            def handle(self) -> None:
                with suppress(ConnectionError):  # the client may have left
                    super().handle()

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
