"""The HTTP client, against a small server of the test."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipeline.rollout.engines.sglang.client import Client


class Handler(BaseHTTPRequestHandler):
    """Answers the first request of a connection, and closes the connection when a second one begins, without a word."""

    protocol_version = "HTTP/1.1"
    used = False

    def do_POST(self) -> None:
        if self.used or self.headers["Authorization"] != "Bearer k":
            self.close_connection = True
            return
        self.used = True
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"path": self.path, "body": body}).encode()
        self.send_response(400 if self.path == "/refused" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[Client]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = Client(f"http://127.0.0.1:{server.server_port}", "k")
    yield made
    made.close()
    server.shutdown()
    server.server_close()


def test_a_connection_that_the_server_closes_after_its_answer_is_not_used_again(client: Client) -> None:
    for number in range(3):
        assert client.post("/x", {"number": number}, 10) == {"path": "/x", "body": {"number": number}}


def test_finished_requests_wait_in_the_queue_with_their_errors(client: Client) -> None:
    client.generate("a", {})
    assert client.finished.get(timeout=10) == ("a", {"path": "/generate", "body": {}})
    with pytest.raises(ValueError, match="SGLang answers /refused with HTTP 400: "):
        client.post("/refused", {}, 10)


def test_a_server_that_has_ended_is_an_error() -> None:
    gone = Client("http://127.0.0.1:9", "k")
    with pytest.raises(OSError, match="Cannot connect"):
        gone.post("/x", {}, 10)
    gone.close()
