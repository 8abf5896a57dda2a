"""Processes of tests that begin with the libraries imported: they fork from one process that imported them once."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking(*more: str) -> ForkServerContext:
    """The context whose processes have what a train worker imports.

    Modules `more` are imported beforehand too if this is the session's first call; later their processes do it.
    """
    multiprocessing.set_forkserver_preload(["tests.train.updates", "tests.train.plain", *more])
    return multiprocessing.get_context("forkserver")
