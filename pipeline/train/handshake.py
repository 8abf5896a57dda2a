"""The train loop's side of the handshake (`models/handshake.py`), which compares the log-probs of engine and trainer.

The handshake is due at each start of a run, also at a resumed one. Its result, the way in which rows pass through the
model, is recorded in the run's folder: train workers that are restarted read it instead of comparing again. If the
result is another way than the one of the settings, critic, reference and scoring replicas whose model has the policy's
class take it too, since they run the same code.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.config import Config
from pipeline.derived import replicas, scorer_key, uses_engines
from pipeline.errors import FinalError
from pipeline.greeting import Change, Greeting, GreetingPlan, Way
from pipeline.models.handshake import Compared, sentence, shake_hands, shown_prompt
from pipeline.models.precision import torch_dtype
from pipeline.store.shaking import Shaking
from pipeline.train import ranks
from pipeline.train.actor import Actor
from pipeline.train.learner import Learner

FILE = "handshake.json"
"""File in a run's folder with the result of the handshake, and the name of the start that it belongs to."""


class Handshake:
    """The handshake of one start of a run. Every rank creates one, which is a collective.

    Args:
        config: the run's configuration.
        actor: the actor.
        learners: actor and, if the run has one, critic.
        run_dir: the run's folder.
        start: name of this start of the run.
        last: whether all iterations are trained already; then no handshake is due.
    """

    def __init__(self, config: Config, actor: Actor, learners: Sequence[Learner], run_dir: str, start: str, last: bool):
        self._config, self._actor, self._learners, self._start = config, actor, learners, start
        self._path = Path(run_dir, FILE)
        known = ranks.broadcast(self._known() if ranks.rank() == 0 else None)
        self.plan: GreetingPlan | None = None
        """Plan of the rows to compare; None if the handshake is not due."""
        self.change: Change | None = None
        """New way in which rows pass through models of the policy's class; None if the handshake changed nothing."""
        if known is not None:
            self._take(Way(**known["first"]), Way(**known["way"]))
        elif uses_engines(config) and not last:
            text = actor.module.decoder.config.get_text_config()
            exact = all(dtype == torch.float32 for dtype in self._types())
            plan = GreetingPlan.of(text, config.data.longest_row, config.trainer.seed, exact)
            if (reader := actor.module.image_reader) is not None:
                shown = shown_prompt(reader.vision, plan.seed, config.data.longest_row - plan.response)
                plan = replace(plan, shown=tuple(shown))
            self.plan = plan

    @property
    def due(self) -> bool:
        """True if engine and trainer must still be compared."""
        return self.plan is not None

    @property
    def shaking(self) -> Shaking:
        """The handshake's state at the start, for the policy store.

        With `rollout.sleep` the trainer compares only after it has the rows of an iteration. Scoring replicas are
        needed for these rows, so they must not wait: the state is `settled` from the start.
        """
        return Shaking(self.plan, change=self.change, settled=not self.due or self._config.rollout.sleep)

    def _types(self) -> list[torch.dtype]:
        """Return the dtypes in which engine and trainer compute, in this order."""
        config = self._config
        own = config.actor.fsdp.compute_dtype(config.model.dtype, self._actor.device.type == "cuda")
        return [torch_dtype(config.rollout.dtype, "rollout.dtype"), torch_dtype(own, "actor.fsdp.param_dtype")]

    def _take(self, first: Way, way: Way) -> None:
        if way == first:
            return
        decoder = type(self._actor.module.decoder)
        for learner in self._learners:
            if type(learner.module.decoder) is decoder:
                learner.take(way)
        self.change = Change(decoder.__name__, way)

    def _known(self) -> dict[str, Any] | None:
        """Return the recorded result of an earlier attempt of this start; None without one."""
        try:
            found: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return None
        return found if found["start"] == self._start else None

    def settle(self, greeting: Greeting) -> str:
        """Compare trainer and engine, and switch the learners to the way in which they agree; a collective.

        Returns the result as a sentence.

        Args:
            greeting: rows that an engine generated, with the engine's log-probs.

        Raises FinalError if trainer and engine do not agree and `trainer.handshake` is `refuse`, or if the settings do
        not allow the way in which they agree.
        """
        plan, self.plan = self.plan, None
        assert plan is not None
        config, actor, begun = self._config, self._actor, time.perf_counter()
        types = self._types()
        rounded = [dtype for dtype in types if dtype != torch.float32]
        budget, sequence = actor.shape.max_tokens, actor.mesh.positions
        compared = Compared(actor.module, greeting, actor.device, budget, sequence, actor.backend)
        found = shake_hands(compared, actor.passes, not rounded, (rounded or types)[0])
        text = sentence(found, plan)
        if found.way != found.first and (problem := self._why_not(found.way)):
            raise FinalError(f"{text}: {problem}")
        if not found.agrees and config.trainer.handshake == "refuse":
            raise FinalError(
                f"{text}. Engine and trainer have each their own code for {type(actor.module.lm).__name__}; choose "
                "another model or model.attn_implementation, or train nevertheless with trainer.handshake=warn"
            )
        self._take(found.first, found.way)
        if ranks.rank() == 0:
            record = {
                "start": self._start,
                "engine": greeting.engine,
                "seconds": time.perf_counter() - begun,
                "found": text,
                "notes": actor.passes.notes,
                "agrees": found.agrees,
                **asdict(found),
            }
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(record, indent=1))
            partial.replace(self._path)
        return text

    def _why_not(self, way: Way) -> str | None:
        """Return the reason why the settings do not allow `way`, and the remedy, as a clause; None if they allow it."""
        config = self._config
        if config.model.share_prompts == "always" and not way.shared:
            return "model.share_prompts=always does not allow that; set it to auto"
        others = sorted({*replicas(config)} - {"reward_model"})
        if config.rollout.sleep and others:
            share = "" if way.packed else f"model.attn_implementation={way.attention} "
            return (
                f"replicas ({', '.join(map(scorer_key, others))}) have scored rows in the other way already, since "
                f"engines sleep (rollout.sleep); set {share}model.share_prompts=never"
            )
        return None
