"""Parts of streams that tests put in for the real ones: engines, the rollout stage, a schedule and an estimator.

Each worker of Ray that gets one imports this module, so it imports little.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from pipeline.advantage.estimators import Estimate, register_adv_est
from pipeline.agent.ray_hosts import Hosts
from pipeline.config.model import ModelConfig
from pipeline.config.trainer import TrainerConfig
from pipeline.generation import EngineOutput, EngineRequest, Generation
from pipeline.models import ends, tokenizer
from pipeline.prompts import stage
from pipeline.prompts.stage import Schedule
from pipeline.rollout import engines
from pipeline.rollout.policy_source import PolicySource
from pipeline.rollout.stage import Rollout
from pipeline.store.versions import Ticket

CHUNK, CHUNKS, SAMPLES = 2, 4, 3


def answer(prompt: list[int], version: int, seed: int | None) -> list[int]:
    """What the engine says: it follows from the prompt, the policy's version and the seed, which is None if greedy."""
    draw = np.random.default_rng([abs(version), seed or 0, *prompt])
    return draw.integers(70, 300, draw.integers(1, 6)).tolist()


def quick_tokenizer(model: ModelConfig) -> Any:
    """What `load_tokenizer` gives for the tests' model, without the seconds of `AutoTokenizer`, which imports torch."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model.path)


class Prompts(stage.Prompts):
    """The prompt stage with `quick_tokenizer`."""

    def __init__(self, *args: Any) -> None:
        with patch.object(stage, "load_tokenizer", quick_tokenizer):
            super().__init__(*args)


class Answers:
    """Stands in for an engine. Weights mean nothing to it."""

    SECONDS = 0.05

    def __init__(self) -> None:
        self._running: list[EngineOutput] = []
        self._version = -1

    def add(self, request_id: str, request: EngineRequest) -> None:
        seed = None if request.sampling.temperature == 0 else request.seed
        ids = np.array(answer(request.prompt_ids, self._version, seed), np.int32)
        made = Generation(ids, np.full(len(ids), -0.5, np.float32), "stop", ((self._version, len(ids)),))
        self._running.append(EngineOutput(request_id, made))

    def step(self) -> list[EngineOutput]:
        time.sleep(self.SECONDS)
        done, self._running = self._running, []
        return done

    def load(self, shards: Any, timeout: float, version: int) -> None:
        self._version = version

    def close(self) -> None:
        pass


class StandIn(Rollout):
    """The rollout stage with `Answers` for its engine, and a log of what was admitted."""

    answers: type[Answers] = Answers

    def __init__(
        self,
        data: Any,
        model: Any,
        rollout: Any,
        agent: Any,
        trainer: TrainerConfig,
        greedy: bool,
        policy: Any,
        hosts: Hosts,
    ) -> None:
        self._log = Path(trainer.default_local_dir) / f"engine-{os.getpid()}.jsonl"
        quick = patch.object(tokenizer, "load_tokenizer", quick_tokenizer)
        no_ends = patch.object(ends, "find_ends", lambda *model: SimpleNamespace(ids=()))
        with patch.object(engines, "build", lambda *args: self.answers()), quick, no_ends:
            super().__init__(data, model, rollout, agent, trainer, greedy, Logged(policy, self._write), hosts)
        self._write(event="start")

    def _write(self, **event: Any) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps(event | {"time": time.time()}) + "\n")


class Logged:
    """The policy store as the stage sees it, with a log of every admission."""

    def __init__(self, policy: PolicySource, write: Callable[..., None]) -> None:
        self._policy, self._write = policy, write
        self.acknowledge, self.greet = policy.acknowledge, policy.greet

    async def admit(self, split: str, chunk: int, version: int) -> Ticket | None:
        asked = {"split": split, "chunk": chunk, "iteration": version}
        self._write(event="asked", **asked)
        ticket = await self._policy.admit(split, chunk, version)
        if ticket is not None:
            self._write(event="admitted", version=ticket.version, **asked)
        return ticket


class OneByOne(Answers):
    """Takes its time for every chunk."""

    SECONDS = 0.4

    def step(self) -> list[Any]:
        time.sleep(self.SECONDS)
        first = CHUNK * SAMPLES
        done, self._running = self._running[:first], self._running[first:]
        return done


class Slow(StandIn):
    answers = OneByOne


class Uneven(Answers):
    """Is quick at times."""

    def step(self) -> list[Any]:
        time.sleep(0.02 * (len(self._running) % 3))
        done, self._running = self._running, []
        return done


class UnevenStage(StandIn):
    answers = Uneven


class Silence(Answers):
    """An engine that never answers."""

    def step(self) -> list[Any]:
        time.sleep(0.05)
        return []


class Silent(StandIn):
    answers = Silence


class Dying(Answers):
    """Ends in the middle of a chunk of policy version 1, as often as `times` says over all processes."""

    folder: Path
    times = 1
    killed = True

    def step(self) -> list[Any]:
        deaths = self.folder / "deaths"
        count = deaths.stat().st_size if deaths.exists() else 0
        if self._running and self._version == 1 and count < self.times:
            with deaths.open("a") as file:
                file.write("x")
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("CUDA error: out of memory")
        return super().step()


def folder_of(data: Any, model: Any, rollout: Any, agent: Any, trainer: TrainerConfig, *args: Any) -> Path:
    return Path(trainer.default_local_dir)


class Killed(StandIn):
    """As by the kernel when memory runs out."""

    answers = Dying

    def __init__(self, *args: Any) -> None:
        Dying.folder = folder_of(*args)
        super().__init__(*args)


class Failing(Killed):
    """As a GPU that runs out of memory: the process lives, its engine does not."""

    def __init__(self, *args: Any) -> None:
        Dying.killed = False
        super().__init__(*args)


class Hopeless(Failing):
    def __init__(self, *args: Any) -> None:
        Dying.times = 1000
        super().__init__(*args)


class NeverAgain(Killed):
    """Dies once, and cannot start afterwards."""

    def __init__(self, *args: Any) -> None:
        if (folder_of(*args) / "deaths").exists():
            raise OSError("the model's folder is gone")
        super().__init__(*args)


class KilledAtStart(Killed):
    """Dies once, and at each start afterwards."""

    def __init__(self, *args: Any) -> None:
        if (folder_of(*args) / "deaths").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(*args)


@dataclass(frozen=True)
class Paged(Schedule):
    """A schedule whose pages hold two iterations, as those of a very long run do."""

    page_iterations: int = 2  # type: ignore[assignment]


@register_adv_est("test_everything", scope="batch", needs=("baselines", "values", "sum_pi_squared"))
def everything(data, config):
    """The whole iteration's mean reward in the advantages, and all that the stages wrote beside it."""
    rows = data.per_token(data.rewards.mean() - data.baselines)
    return Estimate(rows + data.values, data.sum_pi_squared)
