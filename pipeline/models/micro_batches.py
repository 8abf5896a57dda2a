"""Which rows share a forward pass.

1. Rows are grouped by length until the padded size, rows * longest row, reaches the token budget. Padding is small
   because rows of a similar length share a batch, and every model that `transformers` knows takes padded batches. Rows
   behind one copy of their prompt count as one row (`sharing.py`).
2. All ranks must run the same number of forward passes, because each one gathers weights from all ranks. A rank can
   therefore be asked for an exact number of micro-batches. One without rows is one token that trains nothing.
"""

import heapq


def _fill(sorted_lengths: list[int], budget: int) -> list[int]:
    """Sizes of the fewest batches that hold these lengths (longest first) within `budget` padded tokens each.

    Filling each batch with the longest rows left is optimal: any batch that holds the longest row has room for equally
    many, and taking longer ones leaves the shorter.
    """
    sizes: list[int] = []
    row = 0
    while row < len(sorted_lengths):
        size = min(budget // sorted_lengths[row], len(sorted_lengths) - row)
        sizes.append(size)
        row += size
    return sizes


def _longest_first(lengths: list[int], max_tokens: int) -> list[int]:
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    if order and lengths[order[0]] > max_tokens:
        longest = lengths[order[0]]
        raise ValueError(
            f"row {order[0]} has {longest} tokens (prompt + response), {longest - max_tokens} more than the "
            f"{max_tokens} that one forward pass may hold; raise actor.ppo_max_token_len_per_gpu to at least {longest}"
        )
    return order


def minimum_parts(lengths: list[int], max_tokens: int) -> int:
    """Fewest micro-batches that hold rows of these lengths within `max_tokens` padded tokens each; 0 without rows.

    Raises:
        ValueError: a single row is longer than `max_tokens`.
    """
    order = _longest_first(lengths, max_tokens)
    return len(_fill([max(lengths[row], 1) for row in order], max_tokens))


def split_micro_batches(lengths: list[int], max_tokens: int, parts: int | None = None) -> list[list[int]]:
    """Rows of each micro-batch: exactly `parts` of them, or as few as possible when `parts` is None.

    Every row is in one batch, every batch has rows * longest <= max_tokens, and the largest padded size is as small as
    `parts` batches allow. No batch is empty as long as there are rows enough; with fewer rows than parts the last
    batches are empty lists. The longest rows come first, so that memory runs out at once or never. The result depends
    on the arguments alone.

    Args:
        lengths: prompt + response tokens of each row.
        max_tokens: `actor.ppo_max_token_len_per_gpu`.
        parts: number of micro-batches, at least `minimum_parts(lengths, max_tokens)`.

    Raises:
        ValueError: a single row is longer than `max_tokens`, or `parts` is below the minimum.
    """
    order = _longest_first(lengths, max_tokens)
    ordered = [max(lengths[row], 1) for row in order]
    minimum = len(_fill(ordered, max_tokens))
    if parts is None:
        parts = minimum
    if parts < minimum:
        raise ValueError(f"{len(lengths)} rows need at least {minimum} micro-batches, but {parts} were asked for")
    if not order:
        return [[] for _ in range(parts)]

    low, high = ordered[0], max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_fill(ordered, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    # (padded size, first, last + 1) of each batch; only those with rows to give away stay in the heap.
    lone: list[tuple[int, int, int]] = []
    heap: list[tuple[int, int, int]] = []

    def place(start: int, stop: int) -> None:
        batch = (-ordered[start] * (stop - start), start, stop)
        if stop - start > 1:
            heapq.heappush(heap, batch)
        else:
            lone.append(batch)

    start = 0
    for size in _fill(ordered, low):
        place(start, start + size)
        start += size
    while len(lone) + len(heap) < min(parts, len(order)):
        _, start, stop = heapq.heappop(heap)
        middle = (start + stop) // 2
        place(start, middle)
        place(middle, stop)
    filled = [order[start:stop] for _, start, stop in sorted(lone + heap, key=lambda batch: batch[1])]
    return filled + [[] for _ in range(parts - len(filled))]
