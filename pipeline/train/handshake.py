"""The train loop's side of the handshake (`models/handshake.py`): when it is due, what follows from it, and its record.

It is due at each start of a run, also of one that resumes. Workers that restart read its record, and pass rows through
the model in the way that it found.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.derived import uses_engines
from pipeline.errors import FinalError
from pipeline.greeting import Greeting, GreetingPlan
from pipeline.models.fsdp import torch_dtype
from pipeline.models.handshake import Compared, Way, sentence, shake_hands
from pipeline.train import ranks
from pipeline.train.actor import Actor

FILE = "handshake.json"
"""In a run's folder: the start that it belongs to, and what was found."""


class Handshake:
    """The handshake of one start; every rank makes one.

    Args:
        config: of the run.
        actor: the policy as it trains.
        run_dir: the run's folder.
        start: name of this start.
        last: whether no iteration is left.
    """

    def __init__(self, config: Config, actor: Actor, run_dir: str, start: str, last: bool):
        self._config, self._actor, self._start = config, actor, start
        self._path = Path(run_dir, FILE)
        known = ranks.broadcast(self._known() if ranks.rank() == 0 else None)
        self.plan: GreetingPlan | None = None
        """The rows to compare; None if the handshake is not due."""
        if known is not None:
            actor.take(Way(**known["way"]))
        elif uses_engines(config) and not last:
            text = actor.module.decoder.config.get_text_config()
            self.plan = GreetingPlan.of(text, config.data.longest_row, config.trainer.seed)

    @property
    def due(self) -> bool:
        """Whether engine and trainer are still to be compared."""
        return self.plan is not None

    def _known(self) -> dict[str, Any] | None:
        """What an earlier attempt of this start found."""
        try:
            found: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return None
        return found if found["start"] == self._start else None

    def settle(self, greeting: Greeting) -> str:
        """Compare the policy with the engine, and let it take the way in which both agree; a collective.

        Returns what was found, in words.

        Raises FinalError if they do not agree, and `trainer.handshake` is `refuse`.
        """
        plan, self.plan = self.plan, None
        assert plan is not None
        config, actor, begun = self._config, self._actor, time.perf_counter()
        own = config.actor.fsdp.compute_dtype(config.model.dtype, actor.device.type == "cuda")
        types = [torch_dtype(config.rollout.dtype, "rollout.dtype"), torch_dtype(own, "actor.fsdp.param_dtype")]
        rounded = [dtype for dtype in types if dtype.itemsize < 4]
        budget, sequence = actor.shape.max_tokens, actor.mesh.positions
        compared = Compared(actor.module, greeting, actor.device, budget, sequence)
        may_change = config.model.share_prompts != "always"
        found = shake_hands(compared, actor.passes, not rounded, (rounded or types)[0], may_change)
        text = sentence(found, plan)
        if not found.agrees and config.trainer.handshake == "refuse":
            raise FinalError(
                f"{text}. Engine and trainer have each their own code for {type(actor.module.lm).__name__}; choose "
                "another model or model.attn_implementation, or train nevertheless with trainer.handshake=warn"
            )
        actor.take(found.way)
        if ranks.rank() == 0:
            seconds = time.perf_counter() - begun
            record = {"start": self._start, "engine": greeting.engine, "seconds": seconds, **asdict(found)}
            self._path.write_text(json.dumps(record | {"agrees": found.agrees}, indent=1))
        return text
