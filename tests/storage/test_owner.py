"""A folder has one owner: real processes, other hosts by the files that they would write, and races."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.storage import owner
from pipeline.storage.owner import FILE, Lock, Owned, Owner, of_folder, of_run, owned

HOLD = "import sys\nfrom pipeline.storage.owner import *\nLock(sys.argv[1], 'it').acquire(print)\n"
HOLD += "print('owned', flush=True)\nsys.stdin.read()\n"
Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT_S", 0.05), ("DEAD_S", 0.8), ("POLL_S", 0.02), ("SETTLE_S", 0.1)):
        monkeypatch.setattr(owner, name, seconds)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a" / FILE


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    """Starts processes that own the file, and ends them."""
    started = []

    def one() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(place)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout and process.stdout.readline() == "owned\n"
        return process

    yield one
    for process in started:
        process.kill()
        process.communicate()


def take(place: Path | str, said: list[str] | None = None) -> Lock:
    lock = Lock(str(place), "the run in runs/a")
    lock.acquire((said if said is not None else []).append)
    return lock


def elsewhere(**changes: Any) -> Owner:
    """A process of another host."""
    return replace(
        Owner.here(), host="far", machine="boot pid:[1]", pid=77, since="2026-01-02 03:04:05 +0000", **changes
    )


def write(place: Path, content: Owner) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.with_name("aside").write_text(json.dumps(asdict(content)))
    place.with_name("aside").replace(place)


def test_an_owner_that_lives_is_named_and_leaves_nothing(place: Path) -> None:
    lock = take(place)
    said: list[str] = []
    with pytest.raises(
        Owned, match=rf"the run in runs/a is in use by process {os.getpid()} on .*, since 20\d\d-.*; wait"
    ):
        take(place, said)
    assert not said, "it did not wait"
    lock.release()
    assert not (place.parents[1]).exists(), "folders that were made for it go with it"
    place.parent.mkdir(parents=True)
    (place.parent / "mine").touch()
    take(place).release()
    assert [path.name for path in place.parent.iterdir()] == ["mine"]


@pytest.mark.parametrize("waited_for", [True, False], ids=["gone", "zombie"])
def test_a_killed_owner_is_followed_at_once(place: Path, start: Start, waited_for: bool) -> None:
    process, said = start(), list[str]()
    process.kill()
    if waited_for:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    take(place, said).release()
    assert len(said) == 1 and f"process {process.pid} on" in said[0] and "is gone, this process takes over" in said[0]


def test_a_stopped_owner_lives(place: Path, start: Start) -> None:
    process = start()
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with pytest.raises(Owned, match=f"process {process.pid} on"):
        take(place)


def test_a_later_process_of_the_same_number_is_no_owner(place: Path) -> None:
    write(place, replace(Owner.here(), started="1"))
    take(place).release()


def test_a_silent_owner_of_another_host_is_waited_for(place: Path) -> None:
    """Whatever the clocks of the two say."""
    write(place, elsewhere())
    os.utime(place, (4e9, 4e9))
    said: list[str] = []
    began = time.monotonic()
    lock = take(place, said)
    assert time.monotonic() - began >= 0.8
    assert "owner, process 77 on far, since 2026-01-02 03:04:05 +0000; waiting up to 1 s for a sign of life" in said[0]
    lock.release()


@pytest.mark.parametrize("machine", ["other", "none"])
def test_an_owner_of_another_host_whose_heart_beats_lives(
    place: Path, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "DEAD_S", 600.0)
    there = elsewhere() if machine == "other" else replace(elsewhere(), machine="")
    write(place, there)
    beating = threading.Timer(0.3, lambda: write(place, replace(there, beat=1)))
    beating.start()
    with pytest.raises(Owned, match="process 77 on far"):
        take(place)
    beating.join()


def test_an_owner_that_ends_meanwhile_is_followed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: nothing is said of a takeover."""
    monkeypatch.setattr(owner, "DEAD_S", 600.0)
    write(place, elsewhere())
    said: list[str] = []
    threading.Timer(0.2, place.unlink).start()
    take(place, said).release()
    assert len(said) == 1 and "waiting up to" in said[0]


DAMAGED = [json.dumps(asdict(Owner.here()) | {"pid": pid}) for pid in ("7", None, 1.5, True, 0, -1, 10**30)]
DAMAGED += [json.dumps(asdict(Owner.here()) | {"host": ["a"]}), json.dumps(asdict(Owner.here()) | {"later": 1})]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "x"}', "\x00\xff", "[" * 10_000, *DAMAGED])
def test_a_file_without_an_owner_counts_as_silent(place: Path, content: str) -> None:
    place.parent.mkdir(parents=True)
    place.write_text(content)
    said: list[str] = []
    take(place, said).release()
    assert "which is unknown" in said[0]


@pytest.mark.parametrize("name", [FILE, f"{FILE}.next"])
def test_a_link_that_leads_nowhere_counts_as_silent(place: Path, name: str) -> None:
    write(place, replace(Owner.here(), pid=2**22 + 1))
    place.with_name(name).unlink(missing_ok=True)
    place.with_name(name).symlink_to("nowhere")
    said: list[str] = []
    take(place, said).release()
    assert "which is unknown" in said[-1 if name == FILE else 1]
    assert not os.path.lexists(place.with_name(name))


def test_an_owner_of_another_version_whose_heart_beats_lives(place: Path) -> None:
    place.parent.mkdir(parents=True)
    place.write_text('{"later": 1}')
    beat = threading.Timer(0.3, place.write_text, ['{"later": 2}'])
    beat.start()
    with pytest.raises(Owned, match="in use by an unknown process; wait"):
        take(place)
    beat.join()


def test_processes_of_other_users_that_cannot_be_seen_are_judged_by_their_heart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    here = replace(Owner.here(), pid=2**22 + 1)
    assert here.alive() is False
    monkeypatch.setattr(owner.os, "kill", kill)
    assert here.alive() is None


@pytest.mark.parametrize("broken_off", [False, True], ids=["", "after a takeover that broke off"])
def test_one_of_many_follows_a_dead_owner(place: Path, broken_off: bool) -> None:
    for _ in range(10):
        write(place, replace(Owner.here(), started="1"))
        if broken_off:
            write(Path(f"{place}.next"), replace(Owner.here(), started="2"))
        winners: list[Lock] = []
        refused: list[Owned] = []
        ready = threading.Barrier(8)

        def compete(winners: list[Lock] = winners, refused: list[Owned] = refused) -> None:
            ready.wait()  # noqa: B023
            try:
                winners.append(take(place))
            except Owned as error:
                refused.append(error)

        threads = [threading.Thread(target=compete) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1 and len(refused) == 7
        winners[0].release()
        assert not place.exists()


def test_one_of_many_processes_begins(place: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(place)]
    quiet: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    processes = [subprocess.Popen(command, **quiet) for _ in range(4)]
    deadline = time.monotonic() + 60
    while sum(process.poll() is None for process in processes) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (living,) = (process for process in processes if process.poll() is None)
    assert json.loads(place.read_text())["pid"] == living.pid
    ended = [process.communicate() for process in processes]
    assert [out for out, _ in ended].count("owned\n") == 1


def test_an_owner_learns_that_another_has_taken_over(place: Path) -> None:
    with owned([Lock(str(place), "the run in runs/a")], print) as lost:
        assert lost() is None
        write(place, elsewhere())
        deadline = time.monotonic() + 10
        while lost() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert f"the run in runs/a is not this process's any more: {place} is owned by process 77 on far" in str(lost())
    assert json.loads(place.read_text())["pid"] == 77, "the other's file stays"


def test_an_owner_that_returns_during_a_takeover_keeps_the_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heart beats between the last look of the one that waits and the takeover."""
    there = elsewhere()
    write(place, there)
    create = owner._Local.create

    def created(self: Any, path: str, text: str) -> bool:
        if path.endswith(".next"):
            monkeypatch.setattr(owner, "DEAD_S", 600.0)
            write(place, replace(there, beat=1))
            threading.Timer(0.3, lambda: write(place, replace(there, beat=2))).start()
        return create(self, path, text)

    monkeypatch.setattr(owner._Local, "create", created)
    with pytest.raises(Owned):
        take(place)
    assert json.loads(place.read_text())["pid"] == 77 and not Path(f"{place}.next").exists()


def test_a_disk_that_is_away_for_a_while_ends_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = take(place)
    before, write = json.loads(place.read_text())["beat"], owner._Local.write

    tries = threading.Semaphore(0)

    def full(*arguments: Any) -> None:
        tries.release()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner._Local, "write", full)
    assert all(tries.acquire(timeout=60) for _ in range(3))
    monkeypatch.setattr(owner._Local, "write", write)
    assert [record.message for record in caplog.records] == [
        f"the heartbeat {place} cannot be written ([Errno 28] No space left on device); it is tried again"
    ]
    deadline = time.monotonic() + 10
    while json.loads(place.read_text())["beat"] <= before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert lock.lost is None
    lock.release()


def test_an_object_store(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/runs/{FILE}"
    lock = take(url)
    with pytest.raises(Owned):
        take(url)
    deadline = time.monotonic() + 60
    while Owner.read(lock._files.read(lock._path)).beat == 0:  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lock.release()
    assert lock._files.read(lock._path) is None
    lock._files.write(lock._path, json.dumps(asdict(elsewhere())))
    said: list[str] = []
    take(url, said).release()
    assert "waiting up to" in said[0]


def test_the_last_of_two_that_write_an_object_owns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, ready, results = f"memory://{tmp_path.name}/{FILE}", threading.Barrier(2), list[bool]()
    write = owner._Remote.write

    def together(self: Any, path: str, text: str) -> None:
        if '"beat": 0' in text:
            ready.wait(10)
        write(self, path, text)

    monkeypatch.setattr(owner._Remote, "write", together)

    def compete() -> None:
        try:
            take(url)
            results.append(True)
        except Owned:
            results.append(False)

    threads = [threading.Thread(target=compete) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"the run in runs/a cannot be used: .*/file/owner\.json: File exists"):
        take(tmp_path / "file" / FILE)


def test_a_full_disk_leaves_no_empty_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, *how: Any, **more: Any) -> None:
        os.close(handle)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner.os, "fdopen", full)
    with pytest.raises(OSError, match=r"the run in runs/a cannot be used: .*owner\.json: No space left on device"):
        take(place)
    assert not place.parents[1].exists()


def test_a_run_owns_its_folder_and_its_storage(tmp_path: Path) -> None:
    def places(local: str, storage: str | None) -> list[str]:
        trainer: Any = SimpleNamespace(storage_path=storage, experiment_name="a")
        return [lock._place for lock in of_run(tmp_path / local / "a", trainer)]

    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert places("runs", None) == [f"{tmp_path}/runs/a/{FILE}"]
    assert places("runs", str(tmp_path / "link")) == places("runs", f"file://{tmp_path}/runs") == places("runs", None)
    assert places("runs", f"{tmp_path}/store/") == [f"{tmp_path}/runs/a/{FILE}", f"{tmp_path}/store/a/{FILE}"]
    trainer: Any = SimpleNamespace(storage_path=str(tmp_path / "store"), experiment_name="a")
    with owned(of_run(tmp_path / "mine" / "a", trainer), print):
        with pytest.raises(Owned, match=f"the run in {tmp_path}/store/a is in use"):
            owned(of_run(tmp_path / "yours" / "a", trainer), print).__enter__()
        assert not (tmp_path / "yours").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_the_lock_of_a_models_folder_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with owned([of_folder(tmp_path / "model")], print):
        assert not (tmp_path / "model").exists()
        with pytest.raises(Owned, match=f"the folder {tmp_path}/model is in use"):
            owned([of_folder(tmp_path / "link")], print).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["link"]
