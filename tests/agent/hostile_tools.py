"""Tools that fail in many ways, or say more than anyone reads."""

import sys

from pipeline.agent import EpisodeOver, ToolError, tool

LONG = 20_000_000


class Mute(ToolError):
    def __str__(self):
        raise RuntimeError


class Leaving(ToolError):
    def __str__(self):
        sys.exit(1)


class Odd(ToolError):
    def __str__(self):
        return 5  # type: ignore[return-value]


@tool
def say(kind: str) -> str:
    """Say something."""
    if kind == "long":
        return "begin" + "x" * LONG + "end"
    if kind == "long mistake":
        raise ToolError("begin" + "x" * LONG + "end")
    if kind == "long list":
        return ["x" * 1000] * 10_000
    if kind == "half a character":
        raise ToolError("\ud800")
    if kind == "syntax":
        raise SyntaxError("x" * LONG, ("y" * 5_000_000, 3, 1, "z"))
    if kind == "odd syntax":
        raise SyntaxError("x", (5, "3", 1, "z"))
    if kind == "long error":
        raise ValueError("x" * LONG)
    if kind == "long name":
        raise type("N" * LONG, (Exception,), {})("x")
    if kind == "long type":
        return type("N" * LONG, (), {})()
    if kind == "over":
        raise EpisodeOver("x" * LONG)
    raise {"mute": Mute, "leaving": Leaving, "odd": Odd}[kind]("x")


@tool
def numbers(count: int, ratio: float = 1.0) -> str:
    """Compute with numbers.

    Args:
        count: an integer.
        ratio: a number.
    """
    return str(len(range(count % 5)) + float(count) * 0 + ratio * 0)
