"""Limit the CPU time of a rule for one response. If the limit is exceeded, the response counts as wrong.

Some answers make algebra run for minutes or fill the memory. Such an answer is scored as wrong, not as an error of the
row. The budget is enforced from outside (`program.py`, `worker.py`): the reward worker is killed when it has used the
CPU time, even inside a C library, or holds more than `reward.worker_memory_mb`. CPU time is counted instead of wall
time, so an answer is not scored as wrong because the machine is busy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Budget:
    """The limit of one call of a rule, and the result if it is exceeded."""

    cpu_s: float
    """Limit of the CPU time, in seconds."""
    wrong: dict[str, Any]
    """Result of the rule if the limit is exceeded."""
    prepare: Callable[[], Any] | None
    """Function to call once in each worker before the first call of the rule, to import the rule's libraries. Its CPU
    time is not counted."""


def within(
    cpu_s: float, wrong: dict[str, Any], prepare: Callable[[], Any] | None = None
) -> Callable[[Function], Function]:
    """Return a decorator that gives a rule a `Budget` with these fields."""

    def decorate(rule: Function) -> Function:
        rule.__dict__["budget"] = Budget(cpu_s, wrong, prepare)
        return rule

    return decorate


def budget_of(rule: Callable[..., Any]) -> Budget | None:
    """Return the budget of a rule, also of a `functools.partial` of a rule.

    None if the rule has no budget; then only `reward.timeout_s` limits the call.
    """
    return getattr(getattr(rule, "func", rule), "budget", None)
