"""The rollout stage of an evaluation: engines that read a model from its folder, and wait for no policy version."""

import pyarrow as pa

from pipeline.config import Config
from pipeline.rollout.stage import Rollout
from pipeline.store import Ticket


class Held:
    """The policy of an engine that holds its weights already."""

    def __init__(self, version: int) -> None:
        self._version = version

    async def admit(self, split: str, chunk: int, version: int, engine: str = "") -> Ticket:
        """Every chunk may start at once."""
        return Ticket(self._version, [])

    async def acknowledge(
        self, engine: str, version: int, crc: int, load_s: float, idle_s: float = 0.0, busy_s: float = 0.0
    ) -> None:
        """Nobody counts: nothing is loaded."""

    async def counted(self, iteration: int, metrics: dict[str, int]) -> None:
        """Nor here: validation prompts are all generated."""

    async def exchanged(self, engine: str, chunks: dict[int, pa.Table]) -> None:
        """And stay where they are."""


class EvaluationRollout(Rollout):
    """One engine of the pool, with the weights of `model.path`.

    Args:
        config: the settings; `rollout.engine_kwargs.load_format` says how the engine reads the weights.
        version: number of the policy version that they are.
    """

    def __init__(self, config: Config, version: int) -> None:
        super().__init__(config, Held(version))
        # The version that the engine has: there is nothing to bring it to.
        self._version = version
