"""Which rows share a forward pass.

Rows are grouped by length until the padded size, rows * longest row, reaches the token budget, so padding is small. A
pack of rows behind one prompt (`sharing.py`) counts as one row here. Each pass gathers weights from all ranks, so all
ranks must run equally many; a rank can be asked for an exact number of micro-batches.
"""

import heapq
from bisect import bisect_left


def minimum_parts(lengths: list[int], max_tokens: int) -> int:
    """Fewest micro-batches that hold rows of these lengths within `max_tokens` padded tokens each; 0 without rows.

    Raises ValueError if a single row is longer than `max_tokens`.
    """
    return len(_fill(_longest_first(lengths, max_tokens)[1], max_tokens))


def split_micro_batches(lengths: list[int], max_tokens: int, parts: int | None = None) -> list[list[int]]:
    """Rows of each micro-batch: exactly `parts` of them, or as few as possible if `parts` is None.

    Every row is in one batch, every batch has rows * longest <= max_tokens, and the largest padded size is as small as
    `parts` batches allow. Batches are empty only if there are fewer rows than parts; then the last ones are. The
    longest rows come first, so that memory runs out at once or never.

    Args:
        lengths: prompt + response tokens of each row.
        max_tokens: `actor.ppo_max_token_len_per_gpu`.
        parts: number of micro-batches, at least `minimum_parts(lengths, max_tokens)`.

    Raises ValueError if a single row is longer than `max_tokens`, or `parts` is below the minimum.
    """
    order, ordered = _longest_first(lengths, max_tokens)
    minimum = len(_fill(ordered, max_tokens))
    parts = minimum if parts is None else parts
    if parts < minimum:
        raise ValueError(f"{len(lengths)} rows need at least {minimum} micro-batches, but {parts} were asked for")
    if not order:
        return [[] for _ in range(parts)]

    size = bisect_left(range(max_tokens), True, lo=ordered[0], key=lambda size: len(_fill(ordered, size)) <= parts)
    heap: list[tuple[int, int, int]] = []

    def push(start: int, stop: int) -> None:
        # Largest padded size first; a batch of one row, which cannot be divided, last.
        rows = stop - start
        heapq.heappush(heap, (-ordered[start] * rows if rows > 1 else 0, start, stop))

    start = 0
    for rows in _fill(ordered, size):
        push(start, start + rows)
        start += rows
    while len(heap) < min(parts, len(order)):
        _, start, stop = heapq.heappop(heap)
        middle = (start + stop) // 2
        push(start, middle)
        push(middle, stop)
    bounds = sorted((start, stop) for _, start, stop in heap)
    return [order[start:stop] for start, stop in bounds] + [[] for _ in range(parts - len(bounds))]


def _longest_first(lengths: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
    """The rows from the longest to the shortest, and their lengths, at least 1."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    if order and lengths[order[0]] > max_tokens:
        longest = lengths[order[0]]
        raise ValueError(
            f"row {order[0]} has {longest} tokens (prompt + response), {longest - max_tokens} more than the "
            f"{max_tokens} that one forward pass may hold; raise actor.ppo_max_token_len_per_gpu to at least {longest}"
        )
    return order, [max(lengths[row], 1) for row in order]


def _fill(ordered: list[int], budget: int) -> list[int]:
    """Sizes of the fewest batches that hold these lengths (longest first) within `budget` padded tokens each.

    Filling each batch with the longest rows left is optimal: any batch that holds the longest row has room for equally
    many, and taking longer ones leaves the shorter.
    """
    sizes: list[int] = []
    row = 0
    while row < len(ordered):
        size = min(budget // ordered[row], len(ordered) - row)
        sizes.append(size)
        row += size
    return sizes
