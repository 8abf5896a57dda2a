"""The time one call of a rule takes."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

LIMIT = 0.050  # seconds


def seconds(rule: Callable[..., Any], *arguments: Any) -> float:
    """Median of the CPU time of three calls after a first one, in which libraries load and parsers build their tables.

    CPU time, since a rule waits for nothing and other programs of the machine must not count. What is remembered of
    earlier calls is forgotten first.
    """
    rule(*arguments)
    times = []
    for _ in range(3):
        _forget()
        start = time.process_time()
        rule(*arguments)
        times.append(time.process_time() - start)
    return median(times)


def _forget() -> None:
    from math_verify import parser

    from pipeline.reward.rules import math_equal

    for cached in (math_equal._parse, parser.parse_latex_cached, parser.extract_latex):
        cached.cache_clear()
