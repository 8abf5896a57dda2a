"""The prompt source: any number of prompt files as one repeatable stream of prompts.

1. Rows stand in one endless order (`order.py`), or in one for each data source where the sampler says how prompts
   divide over them. The sampler then decides on each row whose turn has come (`sampler.py`).
2. `draw` is a function from a position to prompts and the position behind them: nothing that was read ahead is lost or
   repeated, wherever a run is interrupted.
3. Prompts run across epoch borders: none is lost to an incomplete batch, save at the very end of the run.
"""

import difflib
import itertools
import math
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.config.data import DataConfig
from pipeline.prompts.encode import MEDIA, Encoder, Prompt, data_source, to_table
from pipeline.prompts.files import data_sources_by_row_group
from pipeline.prompts.order import Chances, Found, Order, units
from pipeline.prompts.prompt_file import PromptFile
from pipeline.prompts.sampler import Sampler


class Position(NamedTuple):
    """A place in the endless stream of prompts."""

    epoch: int = 0
    offset: int = 0
    """Prompts of the epoch that lie before it, those that were left out included."""
    orders: dict[str, tuple[int, int]] = {}
    """Where each data source has an order of its own: the place in it, as epoch and offset."""


START = Position()


class PromptSource:
    """A resumable, repeatable stream of prompts. Plain Python: it needs no Ray, and can be pickled."""

    def __init__(
        self,
        files: list[PromptFile],
        data: DataConfig,
        encoder: Encoder,
        seed: int,
        split: str = "train",
        sampler: Sampler | None = None,
    ) -> None:
        """
        Args:
            files: what `files.resolve` returned; they are not read here, except for the column `data_source` where the
                sampler asks for shares.
            data: order and limits.
            encoder: makes rows of the stream of what is read.
            seed: seed of the order, together with the epoch.
            split: `train` (shuffled by `data.shuffle`, `data.train_max_samples`) or `val` (file order,
                `data.val_max_samples`).
            sampler: decides which prompts are taken; None takes them all in order.

        Raises:
            ValueError: a setting is out of range, or the sampler's shares do not fit the data.
        """
        if split not in ("train", "val"):
            raise ValueError(f"split is {split!r}; it must be 'train' or 'val'")
        key = f"{split}_max_samples"
        limit: int = getattr(data, key)
        if limit == 0 or limit < -1:
            raise ValueError(f"data.{key} is {limit}; give a number of rows of at least 1, or -1 for all")
        if data.shuffle_window_rows < 1:
            raise ValueError(f"data.shuffle_window_rows is {data.shuffle_window_rows}; it must be at least 1")
        self.files = files
        self.data = data
        self.encoder = encoder
        self.seed = seed
        self.split = split
        self.sampler = sampler
        self.passed_over = 0
        """Prompts that the sampler has left out so far."""
        rows = sum(file.rows for file in files)
        self.len_estimate = rows if limit < 0 else min(rows, limit)
        """Prompts per epoch by the files' row counts: exact, unless prompts are left out."""
        self._shuffle = data.shuffle and split == "train"
        self._limit = limit
        self.orders = self._one_order() if self.shares(1) is None else self._order_per_source()
        """By data source; a single one named "" for all together."""

    def shares(self, iteration: int) -> dict[str, float] | None:
        """What each data source gets of an iteration, summing to 1; None where all stand in one order.

        Raises:
            ValueError: the sampler gave something else than numbers of at least 0, or none above 0.
        """
        given = self.sampler.shares(iteration) if self.sampler else None
        if given is None:
            return None
        total = math.fsum(given.values())
        if not (math.isfinite(total) and total > 0 and all(share >= 0 for share in given.values())):
            raise ValueError(
                f"{self._sampler_key()} gives the shares {dict(given)}; each must be a number of at least 0, and one "
                "of them above 0"
            )
        return {name: given[name] / total for name in sorted(given)}

    def draw(
        self, count: int, start: Position = START, epochs: int | None = None, iteration: int = 1
    ) -> tuple[list[dict[str, Any]], Position]:
        """The next `count` prompts, as rows of `encode.COLUMNS`, and where the stream continues behind them.

        Args:
            count: how many; fewer come only before epoch `epochs`.
            start: where the last call ended.
            epochs: where the stream ends; None never.
            iteration: for which iteration, as the sampler may ask.

        Raises:
            ValueError: a row is not usable (see `Encoder`), or a whole epoch yields no prompt.
            OSError: a file has gone, is damaged or has changed since the start.
        """
        rows: list[dict[str, Any]] = []
        walk, total = _Walk(self, start, epochs, iteration), self.len_estimate
        last_taken = start.epoch * total + start.offset
        while len(rows) < count:
            batch = list(itertools.islice(walk, count - len(rows)))
            made = self.encoder(batch)
            rows += made
            here = walk.position.epoch * total + walk.position.offset
            if made:
                last_taken = here
            elif total and here - last_taken >= total:
                raise ValueError(self._nothing_left())
            if not batch:
                break
        return rows, walk.position

    def chunks(self, chunk_prompts: int, start: Position = START, epochs: int | None = None) -> Iterator[pa.Table]:
        """Tables of exactly `chunk_prompts` rows with the columns `encode.COLUMNS`, from `start` on.

        The stream ends before epoch `epochs` (never, where None) at the last full chunk. Raises as `draw`.
        """
        if chunk_prompts < 1:
            raise ValueError(f"a chunk of {chunk_prompts} prompts was asked for; it must have at least 1")
        while True:
            rows, start = self.draw(chunk_prompts, start, epochs)
            if len(rows) < chunk_prompts:
                return
            yield to_table(rows)

    def validation_rows(self, chunk_prompts: int) -> Iterator[pa.Table]:
        """Every row once, in order, in tables of `chunk_prompts` rows; the last may be smaller. Raises as `draw`."""
        position = START
        while True:
            rows, position = self.draw(chunk_prompts, position, epochs=1)
            if not rows:
                return
            yield to_table(rows)

    def _one_order(self) -> dict[str, Order]:
        window = self.data.shuffle_window_rows
        parts = units(self.files, window, self._limit)
        return {"": Order(self.files, parts, window, self.seed, self._shuffle, self._columns())} if parts else {}

    def _order_per_source(self) -> dict[str, Order]:
        by_row_group = [data_sources_by_row_group(file) for file in self.files]
        names = sorted({name for groups in by_row_group for group in groups for name in group if name is not None})
        given = self.shares(1) or {}
        for name in given:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"{self._sampler_key()} gives a share to {name!r}, which is no data_source of the training files "
                    f"({', '.join(names)}){hint}"
                )
        if missing := [name for name in names if name not in given]:
            raise ValueError(
                f"{self._sampler_key()} gives no share to {', '.join(missing)}, which stand in the training files; "
                "give 0 to a data_source that is to be left out"
            )
        # One window is held of each.
        window = max(1, self.data.shuffle_window_rows // len(names))
        parts, orders = units(self.files, window, self._limit), {}
        for name in names:
            # A row without a data source belongs to none; it is met, and set aside, wherever it stands.
            own = [unit for unit in parts if by_row_group[unit.file][unit.part.row_group] & {name, None}]
            if own:
                seed = (self.seed, zlib.crc32(name.encode()))
                orders[name] = Order(self.files, own, window, seed, self._shuffle, self._columns())
        return orders

    def _columns(self) -> list[str]:
        return [self.data.prompt_key, "data_source", "reward_model.ground_truth", "extra_info", *MEDIA]

    def _sampler_key(self) -> str:
        return "data.source_weights" if self.data.sampler == "weighted" else f"data.sampler={self.data.sampler}"

    def _nothing_left(self) -> str:
        where, rows = self.files[0].key, self.len_estimate
        if self.encoder.filtered_overlong >= rows:
            return (
                f"{where}: all {rows} prompts are longer than data.max_prompt_length={self.data.max_prompt_length} and "
                "data.filter_overlong_prompts leaves them out; raise data.max_prompt_length"
            )
        return (
            f"{where}: a whole epoch of {rows} prompts gave none: {self.encoder.filtered_overlong} are too long, "
            f"{self.encoder.quarantine.count} cannot be used, and {self._sampler_key()} passed over "
            f"{self.passed_over} so far"
        )


class _Walk:
    """The prompts from a position on, before they are encoded; `position` is behind the last one that was given."""

    def __init__(self, source: PromptSource, start: Position, epochs: int | None, iteration: int) -> None:
        self.position = start
        self._source, self._epochs = source, epochs
        self._shares = source.shares(iteration)
        self._total = source.len_estimate
        self._walks: dict[str, Iterator[Found]] = {}
        self._chances: dict[str, Chances] = {}
        self._draws = Chances(source.seed, 1)

    def __iter__(self) -> "_Walk":
        return self

    def __next__(self) -> Prompt:
        epoch, offset, orders = self.position
        if not self._source.orders or (self._epochs is not None and epoch >= self._epochs):
            raise StopIteration
        if self._shares is None:
            try:
                found, values = self._take("", (epoch, offset), self._epochs)
            except StopIteration:
                assert self._epochs is not None
                self.position = Position(self._epochs, 0)
                raise
            self.position = Position(found.epoch, found.offset + 1)
            return Prompt(self._uid(found.epoch, found.offset), *found[:4], values)
        name = self._drawn(epoch * self._total + offset)
        found, values = self._take(name, orders.get(name, (0, 0)), None)
        behind = divmod(epoch * self._total + offset + 1, self._total)
        self.position = Position(*behind, {**orders, name: (found.epoch, found.offset + 1)})
        return Prompt(self._uid(epoch, offset), epoch, offset, found.place, found.prompt_index, values)

    def _drawn(self, number: int) -> str:
        """The data source of the prompt that is the run's `number`th."""
        assert self._shares is not None
        chance, name = self._draws(number), ""
        for name, share in self._shares.items():
            chance -= share
            if share and chance < 0:
                return name
        return next(other for other in reversed(self._shares) if self._shares[other])

    def _take(self, name: str, start: tuple[int, int], epochs: int | None) -> tuple[Found, dict[str, Any]]:
        """The next row of an order that the sampler takes.

        Raises:
            StopIteration: epoch `epochs` begins.
            ValueError: no row of a whole epoch is taken.
        """
        order, source = self._source.orders.get(name), self._source
        if order is None:
            raise ValueError(f"{source._sampler_key()}: data.train_max_samples leaves no row of {name!r}")
        if name not in self._walks:
            self._walks[name] = order.walk(*start, epochs)
            self._chances[name] = Chances(source.seed, 2, zlib.crc32(name.encode()))
        for passed, found in enumerate(self._walks[name]):
            if passed > 2 * order.rows:
                raise ValueError(source._nothing_left())
            try:
                values = found.values()
                own = data_source(values, found.place)
            except ValueError as error:
                source.encoder.quarantine.add(found.place, _content(found), error)
                continue
            if name not in ("", own):
                continue
            if source.sampler is not None:
                chance = source.sampler.chance(found.prompt_index, values)
                if chance < 1 and self._chances[name](found.epoch, found.offset) >= chance:
                    source.passed_over += 1
                    continue
            return found, values
        raise StopIteration

    def _uid(self, epoch: int, offset: int) -> str:
        return f"{epoch}-{offset}" if self._source.split == "train" else f"val-{offset}"


def _content(found: Found) -> dict[str, Any] | None:
    try:
        return found.values()
    except ValueError:
        return None
