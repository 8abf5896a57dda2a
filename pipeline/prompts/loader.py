"""Load the training prompts of one iteration after the other, or the prompts of validation files.

1. An iteration begins with the prompts of `data.generator`. Prompts of the files fill it up.
2. Rows of the files are in one endless order (`shuffle.py`), or in one order per data source if the sampler gives
   shares. For each row, the sampler then decides whether to take it (`sampler.py`).
3. An iteration may span the border of two epochs, so incomplete batches are only dropped at the very end of the run.
4. `cursor` holds the whole state that the next iteration depends on: a run that continues from it makes the same
   prompts.
"""

import itertools
import math
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from pipeline.cells import plain, without_nulls
from pipeline.config.data import DataConfig
from pipeline.errors import nearest
from pipeline.prompts.encode import Prompt, PromptEncoder, data_source, structured, to_table
from pipeline.prompts.feedback import outcomes
from pipeline.prompts.generator import Generator
from pipeline.prompts.parquet import Place, PromptFile
from pipeline.prompts.plugin import Plugin, learns, state_of
from pipeline.prompts.sampler import Sampler
from pipeline.prompts.shuffle import Row, ShuffledDataset, uniform_at, units
from pipeline.store.cursor import PromptCursor

UNREAD = "ability"
"""Column of verl's format that Slipstream does not use."""
MAX_CALLS = 100
"""Maximum number of calls of a generator for the prompts of one iteration."""


class PromptLoader:
    """A stream of prompts that can be resumed, and is the same whenever it is repeated."""

    def __init__(
        self,
        files: list[PromptFile],
        data: DataConfig,
        encoder: PromptEncoder,
        seed: int,
        split: str = "train",
        sampler: Sampler | None = None,
        generator: Generator | None = None,
        epochs: int | None = None,
        run_dir: str = "",
        lag: int = 0,
    ) -> None:
        """Prepare the orders of the rows.

        Args:
            files: the prompt files. The constructor reads only their column `data_source`, and only if the sampler
                gives shares.
            data: the section `data`.
            encoder: converts rows of the files to rows of the stream.
            seed: seed of the order, together with the epoch.
            split: `train`, or `val`, which is never shuffled.
            sampler: decides which rows are taken; None takes all.
            generator: makes prompts; None to use only the files.
            epochs: number of passes over the files after which the prompts end; None: no end.
            run_dir: folder of the recorded trajectories, for samplers and generators that learn.
            lag: number of iterations between an iteration and the first one that may depend on its outcomes.

        Raises:
            ValueError: the sampler's shares do not fit the data.
        """
        self.files, self.data, self.encoder, self.seed, self.split = files, data, encoder, seed, split
        self.sampler, self.generator = sampler, generator
        self.passed_over = 0
        """Number of rows that the sampler has not taken so far."""
        self.generated = 0
        """Number of generated prompts in the last iteration."""
        self._limit: int = getattr(data, f"{split}_max_samples")
        rows = sum(file.rows for file in files)
        self.epoch_rows = rows if self._limit < 0 else min(rows, self._limit)
        """Number of rows per epoch, from the footers of the files. Fewer prompts are used if some are left out."""
        self._epochs, self._run_dir, self._lag = epochs, run_dir, lag
        plugins: dict[str, Plugin | None] = {"sampler": sampler, "generator": generator}
        self._plugins = {name: plugin for name, plugin in plugins.items() if plugin is not None}
        self.orders = self._make_orders()
        """Order of the rows by data source; one order with the key "" if all sources are in one order."""
        self._learnt = 0
        self._seek(PromptCursor())

    @property
    def learns(self) -> bool:
        """True if sampler or generator depend on the scores of earlier iterations."""
        return any(learns(type(plugin)) for plugin in self._plugins.values())

    @property
    def cursor(self) -> PromptCursor:
        """The current position and state, from which `load` continues.

        Raises:
            ValueError: JSON cannot hold the state of the sampler or the generator.
        """
        states = {name: state_of(f"data.{name}", plugin) for name, plugin in self._plugins.items()}
        sampler, generator = states.get("sampler", {}), states.get("generator", {})
        return PromptCursor(self._epoch, self._offset, self._places, sampler, generator, self._learnt)

    def load(self, cursor: PromptCursor) -> None:
        """Continue from the position and state in `cursor`."""
        self._seek(cursor)
        self._learnt = cursor.learnt
        for name, plugin in self._plugins.items():
            plugin.load_state_dict(getattr(cursor, name))

    def iteration(self, number: int, count: int) -> list[dict[str, Any]]:
        """Return the prompts of iteration `number`, as rows with the columns `encode.COLUMNS`.

        There are `count` rows, or fewer if the prompts end.

        Raises:
            ValueError: there are more unusable prompts than `data.max_bad_rows`, or a whole epoch has no usable prompt,
                or the generator's rows are invalid.
            OSError: a file or the trajectories of an earlier iteration cannot be read.
        """
        while self.learns and self._learnt < number - self._lag:
            self._learnt += 1
            known = outcomes(self._run_dir, self._learnt)
            for plugin in self._plugins.values():
                plugin.update(self._learnt, known)
        rows = self.generate(number, count)
        self.generated = len(rows)
        return rows + self._draw(count - len(rows), number, self._epochs)

    def epoch(self, size: int) -> Iterator[pa.Table]:
        """Yield one pass over the files from the beginning, in tables of `size` rows; the last table may be smaller.

        This moves the position: call `load` before `iteration` is used again. Errors are the same as for `iteration`.
        """
        self._seek(PromptCursor())
        while rows := self._draw(size, 1, epochs=1):
            yield to_table(rows, self.encoder.columns)

    def generate(self, number: int, count: int) -> list[dict[str, Any]]:
        """Return generated prompts of iteration `number`: at most `count` rows with the columns `encode.COLUMNS`.

        Empty without a generator.

        Raises:
            ValueError: rows of the generator are invalid, or too few of them can be used.
        """
        rows: list[dict[str, Any]] = []
        if self.generator is None:
            return rows
        made, name = 0, f"data.generator: {type(self.generator).__name__}.generate()"
        for _ in range(MAX_CALLS):
            given: Any = self.generator.generate(number, count - len(rows))
            if not isinstance(given, list) or not all(isinstance(row, dict) for row in given):
                raise ValueError(f"{name} returned {given!r:.80}; give a list of rows, each a dict as in a prompt file")
            if len(given) > count - len(rows):
                raise ValueError(f"{name} returned {len(given)} rows, more than the {count - len(rows)} requested")
            prompts = []
            for i, row in enumerate(given, made):
                place = Place("data.generator", number, i)
                try:
                    values = structured(row, self.data.prompt_key)
                except ValueError as error:
                    self.encoder.quarantine.add(place, row, error)
                    continue
                # Rows that come from pandas may hold nulls that Arrow added for missing fields.
                values[self.data.prompt_key] = without_nulls(plain(values.get(self.data.prompt_key)))
                prompts.append(Prompt(f"g{number}-{i}", self._epoch, -1, place, -1, values))
            rows += self.encoder(prompts)
            made += len(given)
            if self.files or not given or len(rows) == count:
                return rows
        raise ValueError(
            f"{name} was called {MAX_CALLS} times for the prompts of iteration {number} and gave {made} rows, but too "
            "few can be used (data.max_prompt_length, data.filter_overlong_prompts)"
        )

    def counts(self) -> dict[str, int]:
        """Return metrics by name: numbers of filtered, truncated, unusable and skipped prompts so far, and of prompts
        generated for the last iteration."""
        counts = {
            "prompts/filtered_overlong": self.encoder.filtered_overlong,
            "prompts/truncated": self.encoder.truncated,
            "prompts/quarantined": self.encoder.quarantine.count,
        }
        if self.data.sampler != "uniform":
            counts["prompts/passed_over"] = self.passed_over
        if self.generator is not None:
            counts["prompts/generated"] = self.generated
        return counts

    def notes(self) -> Iterator[str]:
        """Yield sentences on columns of the files that are not read, and on parts of prompts that the chat template has
        left out so far."""
        read = {name.partition(".")[0] for name in self._columns} | {UNREAD} | self.encoder.media
        for file in self.files:
            if unread := [name for name in file.columns if name not in read]:
                yield f"{file.key}: {file.name} has columns that are not read: {', '.join(unread)}"
        yield from self.encoder.chat.omissions.notes

    @property
    def _columns(self) -> list[str]:
        return [self.data.prompt_key, "data_source", "reward_model.ground_truth", "extra_info", "agent_name"]

    def _seek(self, cursor: PromptCursor) -> None:
        self._epoch, self._offset, self._places = cursor.epoch, cursor.offset, cursor.orders
        self._walks: dict[str, Iterator[tuple[Row, dict[str, Any]]]] = {}

    def _draw(self, count: int, iteration: int, epochs: int | None) -> list[dict[str, Any]]:
        """Return rows for the next `count` prompts of the files; fewer if epoch `epochs` begins (counted from 0)."""
        rows: list[dict[str, Any]] = []
        prompts = self._prompts(iteration, epochs)
        last_used = self._position
        while len(rows) < count:
            batch = list(itertools.islice(prompts, count - len(rows)))
            made = self.encoder(batch)
            rows += made
            if made:
                last_used = self._position
            elif self.orders and self._position - last_used >= self.epoch_rows:
                raise ValueError(self._nothing_left())
            if not batch:
                break
        return rows

    @property
    def _position(self) -> int:
        """Number of rows before the next one, over all epochs."""
        return self._epoch * self.epoch_rows + self._offset

    def _prompts(self, iteration: int, epochs: int | None) -> Iterator[Prompt]:
        """Yield prompts from the current position on, and move the position past each."""
        shares = self._shares(iteration)
        while self.orders and (epochs is None or self._epoch < epochs):
            if shares is not None:
                epoch, offset = self._epoch, self._offset
                name = self._drawn(shares)
                row, values = next(self._walk(name, None))
                self._places = {**self._places, name: (row.epoch, row.offset + 1)}
                self._epoch, self._offset = divmod(self._position + 1, self.epoch_rows)
            elif taken := next(self._walk("", epochs), None):
                row, values = taken
                epoch, offset = row.epoch, row.offset
                self._epoch, self._offset = epoch, offset + 1
            else:
                assert epochs is not None
                self._epoch, self._offset = epochs, 0
                return
            uid = f"{epoch}-{offset}" if self.split == "train" else f"val-{offset}"
            yield Prompt(uid, epoch, offset, row.place, row.prompt_index, values)

    def _drawn(self, shares: dict[str, float]) -> str:
        """Draw the data source of the next prompt. `shares` are probabilities by data source."""
        chance = uniform_at((self.seed, 1), self._position)
        for name, share in shares.items():
            chance -= share
            if share and chance < 0:
                return name
        # Rounding can leave a remainder.
        return next(name for name in reversed(shares) if shares[name])

    def _walk(self, name: str, epochs: int | None) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Return the iterator over the rest of the order `name`, from the current position on. It is kept for further
        calls."""
        if name not in self._walks:
            epoch, offset = self._places.get(name, (0, 0)) if name else (self._epoch, self._offset)
            self._walks[name] = self._taken(name, epoch, offset, epochs)
        return self._walks[name]

    def _taken(self, name: str, epoch: int, offset: int, epochs: int | None) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Yield (row, its columns) for the rows of the order `name` that the sampler takes, from a position on.

        Raises:
            ValueError: the sampler takes no row in two epochs.
        """
        order = self.orders.get(name)
        if order is None:
            raise ValueError(f"{self._sampler_key()}: data.train_max_samples leaves no row of {name!r}")
        seed = (self.seed, 2, zlib.crc32(name.encode()))
        passed = 0
        for row in order.walk(epoch, offset, epochs):
            if passed > 2 * order.rows:
                raise ValueError(self._nothing_left())
            passed += 1
            values = None
            try:
                values = structured(row.values(), self.data.prompt_key)
                source = data_source(values)
            except ValueError as error:
                self.encoder.quarantine.add(row.place, values, error)
                continue
            if name not in ("", source):
                continue
            if self.sampler is not None:
                chance = self.sampler.chance(row.prompt_index, values)
                if chance < 1 and uniform_at(seed, row.epoch, row.offset) >= chance:
                    self.passed_over += 1
                    continue
            passed = 0
            yield row, values

    def _shares(self, iteration: int) -> dict[str, float] | None:
        """Return the fraction of an iteration's prompts by data source; the sum is 1. None if all sources are in one
        order."""
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

    def _make_orders(self) -> dict[str, ShuffledDataset]:
        sources = None if self._shares(1) is None else self._sources()
        names = [""] if sources is None else self._check_shares(sources)
        # Each order holds one window.
        window = max(1, self.data.shuffle_window_rows // len(names))
        parts = units(self.files, window, self._limit)
        self.encoder.media.update(name for file in self.files for name in file.media)
        columns = [*self._columns, *sorted(self.encoder.media)]
        shuffle = self.data.shuffle and self.split == "train"
        orders = {}
        for name in names:
            seed, own = [self.seed], parts
            if sources is not None:
                seed.append(zlib.crc32(name.encode()))
                # A row without a data source is in all orders, so that it is found and reported as unusable.
                own = [unit for unit in parts if sources[unit.file][unit.part.row_group] & {name, None}]
            if own:
                orders[name] = ShuffledDataset(self.files, own, window, seed, shuffle, columns)
        return orders

    def _sources(self) -> list[list[set[str | None]]]:
        """Return the set of data sources in each row group of each file, indexed by [file][row group]."""
        sources: list[list[set[str | None]]] = [[set() for _ in file.row_groups] for file in self.files]
        for file, by_row_group in zip(self.files, sources, strict=True):
            for part, columns in file.data_sources():
                by_row_group[part.row_group].update(columns["data_source"].unique().to_pylist())
        return sources

    def _check_shares(self, sources: list[list[set[str | None]]]) -> list[str]:
        """Return the names of the data sources. Raises ValueError if the sampler's shares do not name exactly these."""
        found = {name for by_row_group in sources for group in by_row_group for name in group}
        names = sorted(name for name in found if name is not None)
        given = self._shares(1) or {}
        for name in given:
            if name not in names:
                raise ValueError(
                    f"{self._sampler_key()} gives a share to {name!r}, which is not a data_source of the training "
                    f"files ({', '.join(names)}){nearest(name, names)}"
                )
        if missing := [name for name in names if name not in given]:
            raise ValueError(
                f"{self._sampler_key()} gives no share to {', '.join(missing)}, which the training files contain; "
                "give 0 to a data_source that is to be left out"
            )
        return names

    def _sampler_key(self) -> str:
        return "data.source_weights" if self.data.sampler == "weighted" else f"data.sampler={self.data.sampler}"

    def _nothing_left(self) -> str:
        overlong, unusable = self.encoder.filtered_overlong, self.encoder.quarantine.count
        return (
            f"{self.files[0].key}: a whole epoch of {self.epoch_rows} prompts gave none: {overlong} are longer than "
            f"data.max_prompt_length={self.data.max_prompt_length} and data.filter_overlong_prompts leaves them out, "
            f"{unusable} cannot be used, and {self._sampler_key()} passed over {self.passed_over} so far"
        )
