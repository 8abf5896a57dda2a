"""Lanes of one test file do not stay for the next."""

from collections.abc import Iterator

import pytest

from pipeline.reward import worker


@pytest.fixture(autouse=True, scope="module")
def no_lanes_left() -> Iterator[None]:
    yield
    worker.close()
