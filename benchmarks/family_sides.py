"""The two sides of a trial of a model family, each in a process of its own: the trainer and an engine.

Both are parts of a run: the actor, sharded over one rank, and the loop around vLLM. Weights go as published shards.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from benchmarks.family_forms import build, move
from jobs.tiny import build_tokenizer, countdown_texts
from pipeline.config import Config
from pipeline.generation import EngineRequest
from pipeline.greeting import Greeting, GreetingPlan, Way
from pipeline.models.batch import TrainBatch
from pipeline.models.fsdp import save_hf
from pipeline.models.handshake import Compared
from pipeline.models.precision import torch_dtype
from pipeline.models.tokenizer import load_tokenizer
from pipeline.rows import SCHEMA
from pipeline.sampling import Sampling
from pipeline.stats import reduce
from pipeline.train.handshake import Handshake
from pipeline.train.setup import build_actor
from pipeline.train.update import StreamedUpdate
from pipeline.weights.publish import WeightPublisher

if TYPE_CHECKING:
    from pipeline.rollout.engines.vllm.engine import VLLM

PROMPTS = (3, 20, 40, 63)
"""Tokens of the prompts."""
RESPONSES = (5, 17, 48, 64)
"""Tokens of the responses to each of them."""
CALL_S = 180.0
"""Seconds that a step may take."""
COLUMNS = ("uid", "sample", "prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "advantages", "returns")


def settings(folder: Path) -> Config:
    """Make the settings of a run on CPUs with the model in `folder`."""
    config = Config()
    config.model.path = str(folder)
    config.data.max_prompt_length, config.data.max_response_length = max(PROMPTS), max(RESPONSES)
    config.data.train_batch_size, config.rollout.n = len(PROMPTS), len(RESPONSES)
    config.rollout.num_gpus, config.rollout.max_num_seqs, config.rollout.cpu_kvcache_space_gb = 0, 16, 1
    config.rollout.dtype, config.rollout.enforce_eager, config.rollout.ignore_eos = "float32", True, True
    config.actor.optim.lr = 1e-2
    config.actor.old_log_probs = "engine"
    return config


class Trainer:
    """The model and the actor that trains it."""

    def make(self, name: str, folder: Path) -> tuple[str, list[list[int]]]:
        """Make the model of a form in `folder`; returns its class, and prompts for it."""
        self.tokenizer = build_tokenizer(countdown_texts(256, seed=0), vocab_size=320)
        model = build(name, self.tokenizer)
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        random = np.random.default_rng(5)
        self.prompts = [random.integers(3, len(self.tokenizer), length).tolist() for length in PROMPTS]
        return type(model).__name__, self.prompts

    def load(self, folder: Path) -> GreetingPlan:
        """Load the model as a train worker does; returns the rows of the handshake."""
        config = settings(folder)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.actor = build_actor(config, torch.device("cpu"), 100)
        dtype = torch_dtype(config.rollout.dtype, "rollout.dtype")
        self.publisher = WeightPublisher(0, dtype, 2**20, np.copy, self.actor.module.hf_name)
        self.handshake = Handshake(config, self.actor, [self.actor], str(folder.parent), "trial", last=False)
        assert self.handshake.plan is not None
        return self.handshake.plan

    @property
    def way(self) -> Way:
        """The way in which rows pass through the model."""
        passes, config = self.actor.passes, self.actor.module.decoder.config.get_text_config()
        return Way(config._attn_implementation, passes.packed, passes.shared)

    def publish(self, version: int) -> Any:
        """Pack the shard of a version."""
        return self.publisher.pack(self.actor.module, version)

    def shake_hands(self, greeting: Greeting) -> dict[str, str]:
        """Run the handshake; returns its finding, and the way that it chooses.

        Raises FinalError if the handshake refuses the model.
        """
        return {"handshake": self.handshake.settle(greeting), "way": str(self.way)}

    def gaps(self, rows: Greeting) -> dict[str, float]:
        """Find the largest difference between log-probs of engine and trainer, by the form in which rows pass."""
        compared = Compared(self.actor.module, rows, self.actor.device, self.actor.shape.max_tokens)
        return {found.form: found.largest for found in compared.differences(self.way)}

    def update(self, rows: Greeting) -> list[str]:
        """Train on these rows; returns the names of the parameters that do not change.

        Raises ArithmeticError if the gradient is zero.
        """
        before = {name: tensor.detach().clone() for name, tensor in self.actor.module.named_parameters()}
        update = StreamedUpdate(self.actor, 1)
        update.add(TrainBatch.from_table(table(rows)))
        norm = reduce([update.finish()])["actor/grad_norm"]
        if not norm > 0:
            raise ArithmeticError(f"the norm of the gradient is {norm}")
        return [name for name, tensor in self.actor.module.named_parameters() if torch.equal(before[name], tensor)]

    def move(self, seed: int) -> None:
        """Change all weights by random amounts."""
        move(self.actor.module, seed, 0.05)

    def save(self, folder: Path) -> None:
        """Save the model as a run does."""
        save_hf(self.actor.module, self.tokenizer, folder)


def table(rows: Greeting) -> pa.Table:
    """Make rows for an update; every other one has a negative advantage."""
    return pa.Table.from_pylist(
        [
            {
                "uid": str(number // len(RESPONSES)),
                "sample": number % len(RESPONSES),
                "prompt_ids": prompt,
                "response_ids": ids,
                "response_mask": np.ones(len(ids), np.int8),
                "rollout_log_probs": log_probs,
                "advantages": np.full(len(ids), (-1.0) ** number, np.float32),
                "returns": np.zeros(len(ids), np.float32),
            }
            for number, (prompt, ids, log_probs) in enumerate(
                zip(rows.prompts, rows.responses, rows.log_probs, strict=True)
            )
        ],
        schema=pa.schema([SCHEMA.field(name) for name in COLUMNS]),
    )


class Engine:
    """An engine on the model in a folder."""

    def start(self, folder: Path, saved: bool) -> str:
        """Start the engine, with the weights in `folder` if they are `saved` there; returns vLLM's class of it."""
        from pipeline.rollout import engines
        from pipeline.rollout.engine import EngineLoop

        self.config = settings(folder)
        if saved:
            self.config.rollout.engine_kwargs["load_format"] = "auto"
        known_class(folder)
        length = self.config.data.longest_row
        self.loop = EngineLoop(lambda: engines.build(self.config.model, self.config.rollout, length, 0), CALL_S)
        found = self.loop.call(lambda engine: cast("VLLM", engine).llm.collective_rpc("get_model"))
        return type(found.result(CALL_S)[0]).__name__

    def load(self, shard: Any, version: int) -> None:
        """Load a version as a rollout stage does."""
        self.loop.call(lambda engine: engine.load([shard], CALL_S, version), True).result(CALL_S)

    def greet(self, plan: GreetingPlan) -> Greeting:
        """Generate the rows of the handshake."""
        from pipeline.rollout.greetings import greeting_requests

        return self._generated(greeting_requests(plan, load_tokenizer(self.config.model)))

    def generate(self, prompts: Sequence[list[int]]) -> Greeting:
        """Generate responses of all lengths to each prompt."""
        from pipeline.rollout.requests import requests

        chosen = [Sampling.of(self.config.rollout, length, "train") for length in RESPONSES] * len(prompts)
        repeated = [prompt for prompt in prompts for _ in RESPONSES]
        uids = [str(number) for number in range(len(repeated))]
        return self._generated(requests(repeated, uids, chosen, 1, seed=0, ignore_eos=True))

    def _generated(self, asked: list[EngineRequest]) -> Greeting:
        from pipeline.rollout.greetings import read_greeting

        return read_greeting("engine", asked, self.loop.submit(asked).result(CALL_S))


def known_class(folder: Path) -> None:
    """Give vLLM the model's class: vLLM inspects a class that it knows only by name in one more process."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    for name in AutoConfig.from_pretrained(folder).architectures or ():
        lazy = ModelRegistry.models.get(name)
        if lazy is not None:
            ModelRegistry.register_model(name, lazy.load_model_cls())


class Failed(RuntimeError):
    """An error of a side, with the name of its class and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


_side: Any = None


def _open(kind: Callable[[], Any], log: Path) -> int:
    global _side
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    torch.set_num_threads(1)
    _side = kind()
    return os.getpid()


def _call(method: str, args: tuple[Any, ...]) -> Any:
    try:
        return getattr(_side, method)(*args)
    except Exception as error:  # noqa: BLE001 (any error of a family is a finding)
        traceback.print_exc()
        # Some errors of libraries cannot be sent to another process.
        raise Failed(type(error).__name__, str(error)) from None


class Side:
    """A `Trainer` or an `Engine` in a process of its own, whose output goes into `log`."""

    def __init__(self, kind: Callable[[], Any], log: Path) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, "vllm.v1.engine.llm_engine"])
        self._pool = ProcessPoolExecutor(1, context)
        self._pid = self._pool.submit(_open, kind, log).result(CALL_S)

    def begin(self, method: str, *args: Any) -> "Future[Any]":
        """Start a call of a method in the process."""
        return self._pool.submit(_call, method, args)

    def __call__(self, method: str, *args: Any) -> Any:
        """Call a method and return its result. Raises TimeoutError if it takes longer than `CALL_S`."""
        return self.begin(method, *args).result(CALL_S)

    def close(self) -> None:
        """End the process, also if it is busy."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            os.kill(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            return
