"""How the job knows that a head on this machine answers."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.cluster import HOST, Head, answers, free_ports, main


@pytest.fixture
def job_server() -> Iterator[str]:
    """The address of a server that has no jobs."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/jobs/" else 404)
            self.end_headers()

    with http.server.HTTPServer((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{HOST}:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "http://127.0.0.1:9"])
def test_no_proxy_is_asked(proxy: str, monkeypatch: pytest.MonkeyPatch, job_server: str) -> None:
    for name in ("ALL_PROXY", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert answers(Head(0, job_server, ""), "token")
    (closed,) = free_ports(1, first=20_000)
    assert not answers(Head(0, f"http://{HOST}:{closed}", ""), "token")


@pytest.mark.parametrize("text", ["mine", "[]", '{"folder": "mine"}'])
def test_a_file_of_others_is_no_record_of_a_head(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    state.write_text(text)
    for action in ("start", "stop"):
        assert main([action, "--state", str(state)]) == 1
        assert "does not describe a head; give another --state" in capsys.readouterr().err
    assert state.read_text() == text
