"""Generate Countdown puzzles: a long stream without duplicates, in constant memory.

1. The sets of numbers are visited in a seeded random order (a Feistel permutation of their ranks), with one target
   for each. The next round takes a second target for each, and so on. So no puzzle occurs twice, the generator need not
   remember earlier puzzles, and the stream ends when all puzzles within the ranges are used up.
2. NumPy computes the values of all expressions over a batch of sets at once. Targets are drawn uniformly from them.
3. As in the television game, every step of a solution gives a positive whole number. A policy may do otherwise.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

COUNTS = (2, 3, 4, 5)  # how many numbers a puzzle may have
OPERATORS = "+-*/"
MAX_DRY_SETS = 300_000  # number of successive sets without a puzzle after which a stream ends
BATCH = 512  # number of sets computed at once
BATCH_VALUES = 2**20  # maximum number of values computed at once


@dataclass(frozen=True)
class Ranges:
    """Inclusive ranges of the numbers and the target."""

    min_number: int = 1
    max_number: int = 99
    min_target: int = 10
    max_target: int = 99

    def check(self, counts: tuple[int, ...]) -> None:
        """Raise ValueError, with the option to change, if there can be no puzzle of `counts` numbers in the ranges."""
        pairs = {"number": (self.min_number, self.max_number), "target": (self.min_target, self.max_target)}
        for name, (low, high) in pairs.items():
            if not 1 <= low <= high:
                raise ValueError(f"--min-{name} {low} and --max-{name} {high} must satisfy 1 <= min <= max")
        count = max(counts)
        if self.max_number**count >= 2**63:
            raise ValueError(f"--max-number {self.max_number} is too large: a product of {count} must fit int64")


class Puzzle(NamedTuple):
    """A puzzle. `solution` is an expression such as `(25 - 7) * 3`, `steps` the same as `25 - 7 = 18, 18 * 3 = 54`."""

    numbers: tuple[int, ...]
    target: int
    solution: str
    steps: str


class Expression(NamedTuple):
    """An arithmetic expression: text, value, outermost operator ("" for a number), and steps of its computation."""

    text: str
    value: int
    operator: str
    steps: tuple[str, ...]


class Expressions:
    """All expressions that use each of `count` numbers once, up to the order of operands.

    There are 4, 48, 960 and 26,880 of them for 2 to 5 numbers.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.all = 2**count - 1
        self.splits: dict[int, list[tuple[int, int, int, int]]] = {}
        """Subset of the numbers (bit mask of positions) to its divisions: (left subset, right subset, number of
        expressions of each)."""
        self.sizes: dict[int, int] = {1 << place: 1 for place in range(count)}
        for mask in sorted(range(1, self.all + 1), key=int.bit_count):
            if mask in self.sizes:
                continue
            lowest = mask & -mask
            # The lowest place is always in the left part, so that each unordered pair of parts occurs once.
            lefts = [part for part in range(1, mask) if part & mask == part and part & lowest]
            self.splits[mask] = [(part, mask ^ part, self.sizes[part], self.sizes[mask ^ part]) for part in lefts]
            self.sizes[mask] = sum(len(OPERATORS) * a * b for _, _, a, b in self.splits[mask])
        self.size = self.sizes[self.all]

    def values(self, numbers: np.ndarray) -> np.ndarray:
        """Return the values of all expressions, int64 [sets, size], over the sets `numbers`, int64 [sets, count].

        A value is 0 if one of its steps does not give a positive whole number.
        """
        known = {1 << place: numbers[:, place : place + 1] for place in range(self.count)}
        for mask, splits in self.splits.items():
            blocks = []
            for left, right, a, b in splits:
                x, y = known[left][:, :, None], known[right][:, None, :]
                high, low = np.maximum(x, y), np.minimum(x, y)
                valid = low > 0
                quotient = high // np.maximum(low, 1)
                results = (high + low, high - low, high * low, np.where(quotient * low == high, quotient, 0))
                blocks += [np.where(valid, result, 0).reshape(len(numbers), a * b) for result in results]
            known[mask] = np.concatenate(blocks, axis=1)
        return known[self.all]

    def expression(self, numbers: tuple[int, ...], column: int, mask: int | None = None) -> Expression:
        """Return the expression of a column of `values`, with the larger operand first.

        Args:
            numbers: the numbers of one set.
            column: the column.
            mask: subset of the numbers that `column` counts over; None for all.
        """
        mask = self.all if mask is None else mask
        if mask not in self.splits:
            value = numbers[mask.bit_length() - 1]
            return Expression(str(value), value, "", ())
        splits = iter(self.splits[mask])
        left, right, a, b = next(splits)
        while column >= len(OPERATORS) * a * b:
            column -= len(OPERATORS) * a * b
            left, right, a, b = next(splits)
        which, column = divmod(column, a * b)
        parts = (self.expression(numbers, column // b, left), self.expression(numbers, column % b, right))
        high, low = sorted(parts, key=lambda part: -part.value)
        operator = OPERATORS[which]
        value = (high.value + low.value, high.value - low.value, high.value * low.value, high.value // low.value)[which]
        bracket_high = operator in "*/" and high.operator in ("+", "-")
        bracket_low = low.operator != "" and not (operator in "+-" and low.operator in ("*", "/"))
        first = f"({high.text})" if bracket_high else high.text
        second = f"({low.text})" if bracket_low else low.text
        step = f"{high.value} {operator} {low.value} = {value}"
        return Expression(f"{first} {operator} {second}", value, operator, (*high.steps, *low.steps, step))


def permute(index: int, size: int, keys: list[int]) -> int:
    """Return the image of `index` under a permutation of `range(size)` that `keys` determine.

    This is a Feistel network, applied repeatedly until the result is below `size`.
    """
    half = ((size - 1).bit_length() + 1) // 2
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for key in keys:
            mixed = ((right ^ key) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
            mixed = ((mixed ^ (mixed >> 29)) * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ ((mixed >> 32) & low)
        index = left << half | right
        if index < size:
            return index


def number_set(rank: int, count: int, min_number: int, max_number: int) -> tuple[int, ...]:
    """Return the multiset of `count` numbers that has the rank `rank` in the combinatorial number system, ascending."""
    numbers = []
    top = max_number - min_number + count
    for place in range(count, 0, -1):
        low, high = place - 1, top
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if math.comb(middle, place) <= rank else (low, middle)
        rank -= math.comb(low, place)
        numbers.append(low - (place - 1) + min_number)
        top = low
    return tuple(reversed(numbers))


def puzzles_of(count: int, ranges: Ranges, seed: int) -> Iterator[Puzzle]:
    """Yield the puzzles of `count` numbers within the ranges, each once, until none or hardly any are left."""
    sets = math.comb(ranges.max_number - ranges.min_number + count, count)
    expressions = Expressions(count)
    batch = max(1, min(BATCH, BATCH_VALUES // expressions.size))
    seeded = random.Random(f"countdown {seed} {count}")
    keys = [seeded.getrandbits(64) for _ in range(4)]
    for round_number in range(ranges.max_target):
        dry = 0
        any_left = False
        for first in range(0, sets, batch):
            ranks = [permute(i, sets, keys) for i in range(first, min(first + batch, sets))]
            members = [number_set(rank, count, ranges.min_number, ranges.max_number) for rank in ranks]
            values = expressions.values(np.array(members, dtype=np.int64))
            inside = (values >= ranges.min_target) & (values <= ranges.max_target)
            for row, (rank, numbers) in enumerate(zip(ranks, members, strict=True)):
                targets = np.unique(values[row][inside[row]]).tolist()
                if round_number >= len(targets):
                    dry += 1
                    continue
                dry, any_left = 0, True
                draw = random.Random(f"{seed} {count} {rank}")
                # The first steps of a shuffle: earlier positions are the same in every round.
                for i in range(round_number + 1):
                    j = draw.randrange(i, len(targets))
                    targets[i], targets[j] = targets[j], targets[i]
                target = targets[round_number]
                column = draw.choice(np.flatnonzero(values[row] == target).tolist())
                solution = expressions.expression(numbers, column)
                shown = tuple(draw.sample(numbers, count))
                yield Puzzle(shown, target, solution.text, ", ".join(solution.steps))
            if dry >= MAX_DRY_SETS:
                return
        if not any_left:
            return


def puzzles(counts: tuple[int, ...], shares: tuple[float, ...], ranges: Ranges, seed: int) -> Iterator[Puzzle]:
    """Yield puzzles of several sizes.

    Args:
        counts: the sizes: how many numbers a puzzle may have.
        shares: weights with which each of `counts` is drawn.
        ranges: ranges of numbers and targets.
        seed: seed of the stream.

    Raises:
        ValueError: all puzzles of a size that was drawn are used up.
    """
    streams = {count: puzzles_of(count, ranges, seed) for count in counts}
    made = dict.fromkeys(counts, 0)
    draw = random.Random(f"mix {seed}")
    while True:
        count = draw.choices(counts, shares)[0]
        puzzle = next(streams[count], None)
        if puzzle is None:
            raise ValueError(
                f"only {made[count]:,} distinct puzzles of {count} numbers were found in these ranges; ask for fewer "
                "(--train, --test, --sft), widen --max-number or --max-target, or change --numbers or --mix"
            )
        made[count] += 1
        yield puzzle
