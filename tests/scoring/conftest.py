"""A policy store in this process, for the stages that take weights from one."""

import pytest
import ray

from tests.scoring.published import LocalStore, get


@pytest.fixture
def local_store(monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.setattr(ray, "get", get)
    return LocalStore()
