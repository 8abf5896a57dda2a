"""The budget of a rule for one response. Beyond it the response counts as wrong.

Some answers make algebra run for minutes or fill the memory. A policy that writes such an answer has given a wrong one,
so the row has no error. The reward worker enforces the budget (`worker.py`): it is killed when it has spent the CPU
time, even inside a C library, or when it holds more than `reward.worker_memory_mb`. CPU time is counted instead of time
on the clock, so a busy machine makes no answer wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Budget:
    """The budget of one call of a rule, and the score beyond it."""

    cpu_s: float
    """CPU seconds."""
    wrong: dict[str, Any]
    """The rule's result for a wrong answer."""
    prepare: Callable[[], Any] | None
    """Function that is called once in each worker, outside of the budget, to import the rule's libraries."""


def within(
    cpu_s: float, wrong: dict[str, Any], prepare: Callable[[], Any] | None = None
) -> Callable[[Function], Function]:
    """Return a decorator that gives a rule a `Budget`."""

    def decorate(rule: Function) -> Function:
        rule.__dict__["budget"] = Budget(cpu_s, wrong, prepare)
        return rule

    return decorate


def budget_of(rule: Callable[..., Any]) -> Budget | None:
    """Return the budget of a rule, or of one in a `functools.partial`; None without one: `reward.timeout_s` counts."""
    return getattr(getattr(rule, "func", rule), "budget", None)
