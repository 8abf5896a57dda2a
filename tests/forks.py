"""Processes of tests, forked from one that has imported the libraries, which takes each other process seconds."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking(*more: str) -> ForkServerContext:
    """The context whose processes have the libraries of a train worker.

    Modules that are given besides are imported beforehand too, where this is the session's first call.
    """
    multiprocessing.set_forkserver_preload(["tests.train.updates", "tests.train.plain", *more])
    return multiprocessing.get_context("forkserver")
