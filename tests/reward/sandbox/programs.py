"""Ways to run a program of a test."""

import time
from typing import Any

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox.outcome import ProgramRun
from pipeline.reward.sandbox.rule import compute_score
from pipeline.reward.sandbox.runner import run

LIMIT_S = 2.0  # `timeout_s` of the configs
SLACK_S = 20.0  # of a machine that does other things as well


def attempt(code: str, config: SandboxConfig) -> ProgramRun:
    """Run `code`; it must be over soon after its limit."""
    start = time.monotonic()
    outcome = run(code, "", config)
    assert time.monotonic() - start < LIMIT_S + SLACK_S
    return outcome


def score(code: str, tests: Any, config: SandboxConfig) -> dict[str, Any]:
    """The result of a response with this program."""
    return compute_score(f"Here it is.\n```python\n{code}\n```\n", tests, config)
