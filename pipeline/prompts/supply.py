"""The training prompts of one iteration after the other: those of the generator first, then those of the files.

`cursor` says all that the next iteration depends on; a run that continues from it makes the same prompts.
"""

from collections.abc import Iterator
from typing import Any

from pipeline.prompts.encode import Prompt
from pipeline.prompts.feedback import outcomes
from pipeline.prompts.generator import Generator
from pipeline.prompts.plugin import state_of
from pipeline.prompts.prompt_file import Place
from pipeline.prompts.sampler import Sampler
from pipeline.prompts.source import START, Position, PromptSource
from pipeline.store.cursor import PromptCursor

MAX_CALLS = 100
"""Times a generator is asked for the prompts of one iteration."""


class Supply:
    """Makes the prompts of iterations, in turn."""

    def __init__(
        self, source: PromptSource, generator: Generator | None, epochs: int | None, run_dir: str = "", lag: int = 0
    ) -> None:
        """
        Args:
            source: prompts of the files; without files, all come from the generator.
            generator: makes prompts; None without.
            epochs: passes over the files after which the prompts end; None never.
            run_dir: where trajectories are recorded.
            lag: iterations between one that has been recorded and the first that may depend on it (`feedback.lag`).
        """
        self.source, self.generator = source, generator
        self.generated = 0
        """Prompts of the generator in the last iteration."""
        self._epochs, self._run_dir, self._lag = epochs, run_dir, lag
        self._position, self._learnt = START, 0
        self._learners: list[Sampler | Generator] = []
        for one, base in ((source.sampler, Sampler), (generator, Generator)):
            if one is not None and type(one).update is not base.update:
                self._learners.append(one)

    @property
    def learns(self) -> bool:
        """Whether prompts depend on what became of those of earlier iterations."""
        return bool(self._learners)

    @property
    def cursor(self) -> PromptCursor:
        """What `load` needs to go on from here.

        Raises:
            ValueError: JSON cannot hold the state of the sampler or the generator.
        """
        sampler, generator = self.source.sampler, self.generator
        return PromptCursor(
            *self._position,
            sampler=state_of("data.sampler", sampler) if sampler is not None else {},
            generator=state_of("data.generator", generator) if generator is not None else {},
            learnt=self._learnt,
        )

    def load(self, cursor: PromptCursor) -> None:
        """Go on from `cursor`."""
        self._position, self._learnt = Position(cursor.epoch, cursor.offset, cursor.orders), cursor.learnt
        if self.source.sampler is not None:
            self.source.sampler.load_state_dict(cursor.sampler)
        if self.generator is not None:
            self.generator.load_state_dict(cursor.generator)

    def iteration(self, number: int, count: int) -> list[dict[str, Any]]:
        """The prompts of iteration `number`, as rows of `encode.COLUMNS`: `count`, or fewer where they end.

        Raises:
            ValueError: a prompt is not usable, or the generator gives what it must not.
            OSError: a file or the trajectories of an earlier iteration cannot be read.
        """
        self._learn(number - self._lag)
        rows = [row for part in self._generate(number, count) for row in part]
        self.generated = len(rows)
        if self.source.files and len(rows) < count:
            drawn, self._position = self.source.draw(count - len(rows), self._position, self._epochs, number)
            rows += drawn
        return rows

    def counts(self) -> dict[str, int]:
        """Metrics: what became of prompts so far, and how many of the last iteration were generated."""
        encoder = self.source.encoder
        counts = {
            "prompts/filtered_overlong": encoder.filtered_overlong,
            "prompts/truncated": encoder.truncated,
            "prompts/quarantined": encoder.quarantine.count,
        }
        if self.source.data.sampler != "uniform":
            counts["prompts/passed_over"] = self.source.passed_over
        if self.generator is not None:
            counts["prompts/generated"] = self.generated
        return counts

    def _learn(self, last: int) -> None:
        while self._learners and self._learnt < last:
            self._learnt += 1
            known = outcomes(self._run_dir, self._learnt)
            for learner in self._learners:
                learner.update(self._learnt, known)

    def _generate(self, number: int, count: int) -> Iterator[list[dict[str, Any]]]:
        if self.generator is None:
            return
        made = 0
        for _ in range(MAX_CALLS):
            given = self.generator.generate(number, count)
            self._check(given, count)
            rows = self.source.encoder(
                [
                    Prompt(f"g{number}-{i}", self._position.epoch, -1, Place("data.generator", number, i), -1, row)
                    for i, row in enumerate(given, made)
                ]
            )
            yield rows
            made, count = made + len(given), count - len(rows)
            if self.source.files or not given or not count:
                return
        raise ValueError(
            f"data.generator: asked {MAX_CALLS} times for the prompts of iteration {number}, it gave {made} rows, too "
            "few of which can be used (data.max_prompt_length, data.filter_overlong_prompts)"
        )

    def _check(self, given: Any, count: int) -> None:
        name = f"data.generator: {type(self.generator).__name__}.generate()"
        if not isinstance(given, list) or not all(isinstance(row, dict) for row in given):
            raise ValueError(f"{name} returned {given!r:.80}; give a list of rows, each a dict as in a prompt file")
        if len(given) > count:
            raise ValueError(f"{name} returned {len(given)} rows where at most {count} were asked for")
