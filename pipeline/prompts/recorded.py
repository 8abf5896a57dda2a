"""The prompts of a recording, in the place of those of files and generators: `Supply` for a run that replays another.

Prompts come in the order in which the recording trained on them, across the borders of its iterations and of passes
over it. `epoch` is the pass and `offset` the number of the group, by which the replay stage finds the responses.
"""

from typing import Any

from pipeline.prompts.recording import Recording
from pipeline.store.cursor import PromptCursor


class RecordedSupply:
    """Makes the prompts of iterations, in turn."""

    def __init__(self, recording: Recording, epochs: int | None) -> None:
        """
        Args:
            recording: the rows that are trained on again.
            epochs: passes over them after which the prompts end; None never.
        """
        self._recording, self._epochs = recording, epochs
        self._epoch = self._offset = 0
        self._last = 0

    @property
    def cursor(self) -> PromptCursor:
        """What `load` needs to go on from here."""
        return PromptCursor(self._epoch, self._offset)

    def load(self, cursor: PromptCursor) -> None:
        """Go on from `cursor`."""
        self._epoch, self._offset = cursor.epoch, cursor.offset

    def iteration(self, number: int, count: int) -> list[dict[str, Any]]:
        """The prompts of iteration `number`, as rows of `encode.COLUMNS`: `count`, or fewer where they end.

        Raises:
            ValueError: a file of the recording cannot be read any more.
        """
        rows: list[dict[str, Any]] = []
        while len(rows) < count and (self._epochs is None or self._epoch < self._epochs):
            end = min(self._offset + count - len(rows), self._recording.groups)
            groups = range(self._offset, end)
            for group, row in zip(groups, self._recording.prompts(groups).to_pylist(), strict=True):
                # Two passes may meet in one iteration, where a group is one visit to a prompt.
                uid = f"{row['uid']}/{self._epoch}" if self._epoch else row["uid"]
                rows.append(row | {"uid": uid, "epoch": self._epoch, "offset": group})
            self._last = self._recording.iteration_of(end - 1)
            over = end == self._recording.groups
            self._epoch, self._offset = (self._epoch + 1, 0) if over else (self._epoch, end)
        return rows

    def counts(self) -> dict[str, int]:
        """Metrics of the last iteration."""
        return {"prompts/recorded_iteration": self._last}
