"""Division of packs into micro-batches, one forward pass each, within a token budget.

A pack is one or more contexts after one prompt (`packing.py`). If packs lie end to end in a pass, without padding, the
longest packs are placed first, each into the first micro-batch with room (first fit). If packs are padded, packs of
similar length are grouped until the padded size, packs * longest pack, reaches the budget, so padding is small. Packs
that must be in one pass, such as the packs of one row, form a unit; in a padded pass each pack of a unit counts as long
as the unit's longest.

Each pass gathers weights from all ranks, so all ranks must run the same number of micro-batches, which a caller can
set. The rank's tokens are then divided evenly among the micro-batches, so that ranks wait little for each other.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

APART = (
    ", or choose a policy loss of single tokens and another actor.loss_agg_mode than seq-mean-token-mean, which let "
    "contexts pass apart"
)


def minimum_parts(lengths: list[int], max_tokens: int, units: list[int] | None = None, packed: bool = False) -> int:
    """Return the smallest number of micro-batches of at most `max_tokens` tokens that hold all packs; 0 without packs.

    For packs end to end the number is nearly the smallest. Arguments and errors are as in `split_micro_batches`.
    """
    if packed:
        return len(_first_fit(_sizes(lengths, max_tokens, units), max_tokens))
    return len(_Units(lengths, max_tokens, units).fill(max_tokens))


def split_micro_batches(
    lengths: list[int],
    max_tokens: int,
    parts: int | None = None,
    units: list[int] | None = None,
    packed: bool = False,
) -> list[list[int]]:
    """Divide packs into micro-batches. Returns the pack numbers (from 0) of each micro-batch.

    Every pack is in one micro-batch. Each micro-batch holds at most `max_tokens` tokens (padded: packs * longest pack),
    and the largest one is as small as `parts` micro-batches allow (packed: nearly). If there are fewer units than
    parts, the last micro-batches are empty. The largest come first, so that memory runs out at once or never.

    Args:
        lengths: number of tokens of each pack, prompt and response.
        max_tokens: `actor.ppo_max_token_len_per_gpu` times the number of ranks that share a pass.
        parts: number of micro-batches, at least `minimum_parts`; None for `minimum_parts`.
        units: number of packs in each unit of packs that must be in one micro-batch, such as [1, 3]: pack 0 by itself,
            packs 1 to 3 together. The packs of a unit stay in order. None if each pack is a unit.
        packed: whether packs lie end to end, without padding.

    Raises ValueError if a single unit is longer than `max_tokens`, or `parts` is below the minimum.
    """
    minimum = minimum_parts(lengths, max_tokens, units, packed)
    parts = minimum if parts is None else parts
    if parts < minimum:
        raise ValueError(f"{len(lengths)} rows need at least {minimum} micro-batches, but {parts} were requested")
    if packed:
        sizes, first = _sizes(lengths, max_tokens, units), _first(len(lengths), units)
        batches = _spread(sizes, max_tokens, parts)
        return [[pack for unit in batch for pack in range(first[unit], first[unit + 1])] for batch in batches]
    made = _Units(lengths, max_tokens, units)
    if not len(made):
        return [[] for _ in range(parts)]

    size = bisect_left(range(max_tokens), True, lo=made.largest, key=lambda size: len(made.fill(size)) <= parts)
    heap: list[tuple[int, int, int]] = []

    def push(start: int, stop: int) -> None:
        # Largest padded size first; a batch of one unit, which cannot be divided, last.
        heapq.heappush(heap, (-made.padded(start, stop) if stop - start > 1 else 0, start, stop))

    start = 0
    for stop in made.fill(size):
        push(start, stop)
        start = stop
    while len(heap) < min(parts, len(made)):
        _, start, stop = heapq.heappop(heap)
        middle = (start + stop) // 2
        push(start, middle)
        push(middle, stop)
    bounds = sorted((start, stop) for _, start, stop in heap)
    return [made.packs(start, stop) for start, stop in bounds] + [[] for _ in range(parts - len(bounds))]


def _first(packs: int, units: list[int] | None) -> Sequence[int]:
    """[U + 1] the first pack of each of the U units, and at the end the number of packs."""
    return range(packs + 1) if units is None else list(accumulate(units, initial=0))


def _sizes(lengths: list[int], max_tokens: int, units: list[int] | None) -> list[int]:
    """[U] number of tokens of each unit, at least 1. Raises ValueError if one has more than `max_tokens`."""
    first = _first(len(lengths), units)
    sizes = [max(sum(lengths[a:b]), 1) for a, b in zip(first, first[1:], strict=False)]
    if max(sizes, default=0) > max_tokens:
        unit = next(unit for unit, size in enumerate(sizes) if size > max_tokens)
        contexts = first[unit + 1] - first[unit]
        where = f"row {first[unit]} has"
        if contexts > 1:
            where = f"a row has {contexts} contexts that must pass through the model together, with"
        raise ValueError(
            f"{where} {sizes[unit]} tokens (prompt + response), {sizes[unit] - max_tokens} more than the {max_tokens} "
            "that one forward pass may hold; raise actor.ppo_max_token_len_per_gpu x actor.parallel.sequence to at "
            f"least {sizes[unit]}{APART if contexts > 1 else ''}"
        )
    return sizes


def _first_fit(sizes: list[int], budget: int) -> list[list[int]]:
    """Put units into batches of at most `budget` tokens, from the largest to the smallest, each into the first batch
    with room.

    Returns the units of each batch. The number of batches is at most 11/9 of the smallest possible number, plus 2/3
    (Dosa, 2007).

    Args:
        sizes: [U] number of tokens of each unit.
        budget: most tokens of a batch.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    for unit in sorted(range(len(sizes)), key=lambda unit: -sizes[unit]):
        place = next((place for place, left in enumerate(room) if left >= sizes[unit]), None)
        if place is None:
            place = len(room)
            batches.append([])
            room.append(budget)
        batches[place].append(unit)
        room[place] -= sizes[unit]
    return batches


def _spread(sizes: list[int], budget: int, parts: int) -> list[list[int]]:
    """Put units into exactly `parts` batches of similar size; returns the units of each batch, the largest batch first.

    Each unit, from the largest to the smallest, goes to the batch with the fewest tokens. If a batch exceeds `budget`
    this way, `_first_fit` makes the batches instead, and the largest of these are divided until there are `parts`.
    """
    heap = [(0, number) for number in range(parts)]
    batches: list[list[int]] = [[] for _ in range(parts)]
    for unit in sorted(range(len(sizes)), key=lambda unit: -sizes[unit]):
        tokens, number = heap[0]
        if tokens + sizes[unit] > budget:
            batches = _first_fit(sizes, budget)
            while len(batches) < min(parts, len(sizes)):
                batches.sort(key=lambda batch: (len(batch) > 1) * sum(sizes[unit] for unit in batch))
                batch = batches.pop()
                batches += [batch[::2], batch[1::2]]
            batches += [[] for _ in range(parts - len(batches))]
            break
        heapq.heapreplace(heap, (tokens + sizes[unit], number))
        batches[number].append(unit)
    return sorted(map(sorted, batches), key=lambda batch: -sum(sizes[unit] for unit in batch))


class _Units:
    """Units of padded packs, sorted by the length of their longest pack, the longest first.

    Arguments are as in `split_micro_batches`; U is the number of units.
    """

    def __init__(self, lengths: list[int], max_tokens: int, units: list[int] | None):
        first = _first(len(lengths), units)
        longest = lengths
        self._single = units is None
        if units is not None:
            longest = [max(lengths[a:b]) for a, b in zip(first, first[1:], strict=False)]
        order = sorted(range(len(longest)), key=lambda unit: -longest[unit])
        self._ordered = [max(longest[unit], 1) for unit in order]
        self.order = order
        """Pack numbers, unit after unit."""
        self._before = first
        """[U + 1] the first index of each unit in `order`, and at the end the number of packs."""
        self.largest = max(self._ordered[:1], default=0)
        """Padded size of the largest unit, in tokens."""
        if units is not None:
            self.order = [pack for unit in order for pack in range(first[unit], first[unit + 1])]
            self._before = list(accumulate((units[unit] for unit in order), initial=0))
            self.largest = max(map(self.padded, range(len(order)), range(1, len(order) + 1)), default=0)
        if self.largest > max_tokens:
            raise ValueError(self._too_large(max_tokens))

    def __len__(self) -> int:
        return len(self._ordered)

    def padded(self, start: int, stop: int) -> int:
        """Return the padded size, in tokens, of a batch of the units from `start` to `stop - 1`."""
        return self._ordered[start] * (self._before[stop] - self._before[start])

    def packs(self, start: int, stop: int) -> list[int]:
        """Return the pack numbers of the units from `start` to `stop - 1`."""
        return self.order[self._before[start] : self._before[stop]]

    def fill(self, budget: int) -> list[int]:
        """Divide the sorted units into as few batches of at most `budget` padded tokens as possible.

        Returns the `stop` of each batch: the number of its last unit, plus 1. No unit may be larger than `budget`.

        Each batch takes the longest units that are left, as many as fit. This is optimal if units are single packs: a
        batch that holds the longest pack has room for a fixed number of packs, and it is best to take the longest ones
        and leave the shorter ones.
        """
        ends: list[int] = []
        start = 0
        while start < len(self._ordered):
            most = budget // self._ordered[start]
            if self._single:
                start = min(start + most, len(self._ordered))
            else:
                start = bisect_right(self._before, self._before[start] + most) - 1
            ends.append(start)
        return ends

    def _too_large(self, max_tokens: int) -> str:
        place = next(i for i in range(len(self._ordered)) if self.padded(i, i + 1) > max_tokens)
        longest, packs = self._ordered[place], self._before[place + 1] - self._before[place]
        raised = f"raise actor.ppo_max_token_len_per_gpu to at least {self.padded(place, place + 1)}"
        if packs == 1:
            return (
                f"row {self.packs(place, place + 1)[0]} has {longest} tokens (prompt + response), "
                f"{longest - max_tokens} more than the {max_tokens} that one forward pass may hold; {raised}"
            )
        return (
            f"a row has {packs} contexts of up to {longest} tokens (prompt + response), and all of them must pass "
            f"through the model together, padded to {packs} x {longest} = {packs * longest} tokens, more than the "
            f"{max_tokens} that one forward pass may hold; {raised}{APART}"
        )
