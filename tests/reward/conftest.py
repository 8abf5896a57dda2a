"""Reward workers of one test file do not stay for the next."""

from collections.abc import Iterator

import pytest

from pipeline.reward import pool


@pytest.fixture(autouse=True, scope="module")
def no_workers_left() -> Iterator[None]:
    yield
    pool.close()
