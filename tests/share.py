"""Slow tests that two processes share: each test runs in the process that claims it first, so both end together."""

import hashlib
from pathlib import Path

import pytest


class Share:
    """Plugin of each of the processes. A claim is a file in `folder`.

    A process runs its own tests first. The process that has tests of Ray or an engine takes shared tests from the end.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        shared = [item for item in items if is_shared(item)]
        own = [item for item in items if not is_shared(item)]
        if any(needs_engine(item) for item in own):
            shared.reverse()
        items[:] = own + shared

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not is_shared(item) or self.claim(item):
            return None
        # The test before has kept the fixtures that it shares with this one.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def claim(self, item: pytest.Item) -> bool:
        """Whether the test is this process's."""
        try:
            (self.folder / hashlib.sha256(item.nodeid.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def needs_engine(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("ray", "vllm"))


def is_shared(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None and not needs_engine(item)
