"""Runs a hostile program, which has to be over in time."""

import time

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox.runner import Outcome, run

LIMIT_S = 3.0  # `timeout_s` of the configs
SLACK_S = 20.0  # of a machine that does other things as well


def attempt(code: str, config: SandboxConfig, stdin: str = "") -> Outcome:
    """Runs `code`; it must be over soon after its limit."""
    start = time.monotonic()
    outcome = run(code, stdin, config)
    assert time.monotonic() - start < LIMIT_S + SLACK_S
    return outcome
