"""What a rule may spend on one response before the response counts as wrong.

Some answers make algebra run for minutes or fill the memory. A policy that writes such an answer has given a wrong
one, so the row is no error. The reward worker enforces the budget (`worker.py`): it is killed when it has spent the CPU
time, even inside a C library, or when it holds more than `reward.worker_memory_mb`. CPU time and not time on the clock
is counted, so a busy machine makes no answer wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Budget:
    """What one call of a rule may spend, and what it scores beyond that."""

    cpu_s: float
    """CPU seconds."""
    wrong: dict[str, Any]
    """What the rule returns for a wrong answer."""
    prepare: Callable[[], Any] | None
    """Called once in each worker, outside of the budget: imports what the rule needs."""


def within(
    cpu_s: float, wrong: dict[str, Any], prepare: Callable[[], Any] | None = None
) -> Callable[[Function], Function]:
    """Decorator that gives a rule a `Budget`."""

    def decorate(rule: Function) -> Function:
        rule.__dict__["budget"] = Budget(cpu_s, wrong, prepare)
        return rule

    return decorate


def budget_of(rule: Callable[..., Any]) -> Budget | None:
    """The budget of a rule, or of one in a `functools.partial`; None where it has none: `reward.timeout_s` counts."""
    return getattr(getattr(rule, "func", rule), "budget", None)
