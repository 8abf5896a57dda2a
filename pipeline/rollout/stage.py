"""The rollout stage: makes `n` trajectory rows from each prompt row.

The stage requests admission from the policy store, loads the admitted version, and then generates. It is asynchronous,
so one engine works on many chunks concurrently, in one batch.

- With `rollout.weight_update=in_flight` the first chunk that is admitted to a newer version loads it while older chunks
  run; their responses continue with the new weights. The column `version_runs` names the version of each token.
- With `rollout.sleep` an engine holds GPU memory only while it has chunks, and sleeps before it returns the last one.
  The trainer computes once it has all chunks, so no engine is awake then.
- If the advantage estimator reads baselines (ReMax), each training prompt has one more response, a greedy one. Its row
  follows the sampled ones with split `baseline`, is scored like them, and leaves the stream at the baseline stage.
- With `agent.*` each response is an episode of several turns (`episodes.py`). Weights change between whole episodes,
  or in flight between and within turns.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from pipeline import rows
from pipeline.agent.episode import Episode
from pipeline.agent.ray_hosts import BESIDE_ENGINES, Hosts
from pipeline.config import Config
from pipeline.config.agent import AgentConfig
from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.config.trainer import TrainerConfig
from pipeline.conversations import begun_text
from pipeline.derived import uses_baselines
from pipeline.errors import EngineDead, FinalError
from pipeline.generation import EngineRequest, Generation
from pipeline.greeting import GreetingPlan
from pipeline.rollout import engines
from pipeline.rollout.engine import EngineLoop
from pipeline.rollout.episodes import Episodes, generations, with_episodes
from pipeline.rollout.greetings import greeting_requests, read_greeting
from pipeline.rollout.occupancy import Occupancy
from pipeline.rollout.order import InOrder
from pipeline.rollout.policy_source import PolicySource
from pipeline.rollout.requests import prompt_images, requests
from pipeline.sampling import Sampling
from pipeline.store.versions import Ticket
from pipeline.weights.load import checksum

OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError")
"""Names of error classes after which an engine cannot generate any more, although its thread still runs."""

BEAT_S = 15.0
"""Seconds between two reports that the engine generates."""


def restarted() -> bool:
    """Return True if Ray started this process as the replacement of an actor that died."""
    return ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed


def end_process() -> NoReturn:
    """End the process at once: Ray then restarts the actor and repeats its calls, which an error would prevent."""
    os._exit(1)


class Rollout:
    """One engine of the pool, as an actor of the stage.

    Args:
        data, model, rollout, agent, trainer: sections of the settings.
        greedy: true if each training prompt has one more response, a greedy one.
        policy: source of admission and weights.
        hosts: hosts that run the processes of episodes; if there are none, the engine's node runs them.
    """

    def __init__(
        self,
        data: DataConfig,
        model: ModelConfig,
        rollout: RolloutConfig,
        agent: AgentConfig,
        trainer: TrainerConfig,
        greedy: bool,
        policy: PolicySource,
        hosts: Hosts = BESIDE_ENGINES,
    ):
        from pipeline.models.ends import find_ends
        from pipeline.models.processor import load_vision
        from pipeline.models.tokenizer import load_tokenizer

        self._rollout, self._deadlines, self._seed = rollout, trainer.deadlines, trainer.seed
        self._max_response_length, self._greedy = data.max_response_length, greedy
        self._policy = policy
        self._tokenizer = load_tokenizer(model)
        self._ends = find_ends(model, self._tokenizer, data.apply_chat_template_kwargs).ids
        self._version = -1
        self._order = InOrder()
        # One change of the engine's memory at a time: loading, waking, going to sleep.
        self._loading = asyncio.Lock()
        self._acknowledged: asyncio.Task[None] | None = None
        """The task that reports the last loaded version, after all earlier reports; done when the store has accepted
        it."""
        self._admitted, self._done, self._asleep = 0, 0, False
        self._occupancy = Occupancy()
        self._beating: asyncio.Task[None] | None = None
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        length = data.longest_row
        self.engine = EngineLoop(
            lambda: engines.build(model, rollout, length, trainer.seed, trainer), self._deadlines.engine_start
        )
        self._episodes: Episodes | None = None
        if agent.used:
            run = self.engine, trainer.seed, rollout.seed_per_request
            vision = load_vision(model, kept_bytes=0) if model.vision != "none" else None
            self._episodes = Episodes(agent.agents(), data, self._tokenizer, *run, hosts, self._ends, vision)
        if rollout.sleep:
            # An engine that starts while the trainer computes would otherwise be awake meanwhile.
            self.engine.call(lambda engine: engine.sleep(), when_idle=True).result(timeout=self._deadlines.publish)
            self._asleep = True

    async def __call__(self, table: pa.Table) -> pa.Table:
        """Generate `n` rows for each row of a chunk; with greedy responses `n + 1`, the last with split `baseline`.

        Rows with split `pad`, which fill up a validation chunk, are left out. If the run needs no more rows, the result
        is empty.
        """
        ticket = await self._admit(table)
        if ticket is None:
            columns = rows.ROLLOUT if self._episodes is None else pa.schema([*rows.ROLLOUT, *rows.AGENT])
            return rows.without_rows(table, columns)
        self._admitted += 1
        self._occupancy.enter()
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())
        try:
            generated = await self._generate(table, ticket)
        except Exception as error:
            if not isinstance(error, EngineDead) and type(error).__name__ not in OUT_OF_MEMORY:
                raise
            self._restart(error)
        finally:
            self._admitted -= 1
            self._occupancy.leave()
        self._done += 1
        if self._rollout.sleep:
            await self._sleep_when_idle()
        return generated

    async def _beat(self) -> None:
        """Report the engine's progress every `BEAT_S` seconds, as long as it makes steps for admitted chunks."""
        while self._admitted:
            before = self.engine.steps
            await asyncio.sleep(BEAT_S)
            if self.engine.steps > before:
                self._policy.beat(self.name)

    async def _admit(self, table: pa.Table) -> Ticket | None:
        split, chunk, version = (table[name][0].as_py() for name in ("split", "chunk", "iteration"))
        admitted = self._policy.admit(split, chunk, version)
        return await (self._order.admitted(chunk, admitted) if split == "train" else admitted)

    def _restart(self, error: Exception) -> NoReturn:
        """End this process. Ray starts another engine in its place, which generates the chunks again.

        Raises:
            FinalError: this engine was itself started as a replacement, and has not finished any chunk.
        """
        if self._done == 0 and restarted():
            raise FinalError(
                f"engine {self.name} was started again and died before it had finished a chunk: {error}"
            ) from error
        print(f"engine {self.name} died and is started again: {error}", file=sys.stderr, flush=True)
        end_process()

    async def _generate(self, table: pa.Table, ticket: Ticket) -> pa.Table:
        split, chunk = table["split"][0].as_py(), table["chunk"][0].as_py()
        table = table.filter(pc.not_equal(table["split"], "pad"))
        if self._episodes is not None:
            await self._episodes.start(table)
        begun = time.perf_counter()
        # The engine may hold a newer version than the ticket's, because a later chunk may be admitted first. Nothing
        # may be awaited from here until the requests or the lease are submitted: they are of this version.
        version = await self._bring_to(ticket)
        loaded = time.perf_counter()
        what = f"finish chunk {chunk} ({split}, policy version {version}, {len(table)} prompts)"
        if self._episodes is not None:
            episodes = await self._run_episodes(self._episodes, table, what)
        else:
            submitted = self.engine.submit(self._requests(table), one_version=split != "train")
            made = await self._within(self._deadlines.chunk, submitted, what, "trainer.deadlines.chunk")
        done = time.perf_counter()

        def finish() -> pa.Table:
            seconds = done - loaded, loaded - begun
            if self._episodes is not None:
                joined, mask = generations(episodes, version)
                texts = [episode.response for episode in episodes]
                return with_episodes(self._rows(table, joined, texts, mask, *seconds), episodes)
            texts = decoded(self._tokenizer, [generation.token_ids.tolist() for generation in made], self._ends)
            # Rewards judge a response together with the text that the prompt began it with.
            starts = list(map(begun_text, table["prompt"].to_pylist()))
            texts = [starts[number * len(starts) // len(texts)] + text for number, text in enumerate(texts)]
            return self._rows(table, made, texts, None, *seconds)

        # Other chunks are admitted and added meanwhile.
        generated = await asyncio.to_thread(finish)
        await self._wait_acknowledged()
        return generated

    async def _run_episodes(self, episodes: Episodes, table: pa.Table, what: str) -> list[Episode]:
        training = table["split"][0].as_py() == "train"
        lease = self.engine.lease(one_version=not training)
        greedy = training and self._greedy
        settings = [[own] * self._samples(training) + [own.greedy()] * greedy for own in self._sampling(table)]
        try:
            run = episodes.run(table, settings, lease, training)
            return await self._within(self._deadlines.chunk, run, what, "trainer.deadlines.chunk")
        finally:
            self.engine.give_back(lease)

    async def _within(self, seconds: float, waited: "Future | Awaitable[Any]", what: str, keys: str) -> Any:
        awaitable = asyncio.wrap_future(waited) if isinstance(waited, Future) else waited
        try:
            return await asyncio.wait_for(awaitable, seconds)
        except TimeoutError:
            raise TimeoutError(f"engine {self.name} did not {what} within {seconds:.0f} s ({keys})") from None

    def _requests(self, table: pa.Table) -> list[EngineRequest]:
        training = table["split"][0].as_py() == "train"
        return requests(
            rows.token_lists(table, "prompt_ids"),
            table["uid"].to_pylist(),
            self._sampling(table),
            self._samples(training),
            seed=self._seed if self._rollout.seed_per_request else None,
            ends=self._ends,
            ignore_eos=self._rollout.ignore_eos,
            greedy=training and self._greedy,
            images=prompt_images(table),
            for_training=training,
        )

    def _samples(self, training: bool) -> int:
        """Return the number of sampled responses to a prompt."""
        return self._rollout.n if training else self._rollout.val_kwargs.n

    def _sampling(self, table: pa.Table) -> list[Sampling]:
        """Return the sampling settings of each prompt's responses."""
        own = Sampling.of(self._rollout, self._max_response_length, table["split"][0].as_py())
        return [own.of_row(text or "") for text in table["extra_info"].to_pylist()]

    async def _bring_to(self, ticket: Ticket) -> int:
        """Load the ticket's version unless a newer one is loaded; returns the version that the engine then has."""
        async with self._loading:
            if ticket.version <= self._version and not self._asleep:
                return self._version
            # A load that fails leaves the engine between two versions.
            self._version = -1
            begun = time.perf_counter()
            # Chunks of the old version may have to end first.
            patience = self._deadlines.chunk + self._deadlines.publish
            keys = "trainer.deadlines.chunk + trainer.deadlines.publish"
            await self._within(patience, self._load(ticket), f"load policy version {ticket.version}", keys)
            self._acknowledge(ticket, time.perf_counter() - begun)
            self._version, self._asleep = ticket.version, False
            if ticket.greeting is not None:
                await self._greet(ticket.greeting)
            return self._version

    async def _greet(self, plan: GreetingPlan) -> None:
        """Generate the rows of the handshake, on which the trainer compares its log-probs, and send them."""
        asked = greeting_requests(plan, self._tokenizer)
        submitted = self.engine.submit(asked, one_version=True)
        what = "generate the rows of the handshake"
        made = await self._within(self._deadlines.chunk, submitted, what, "trainer.deadlines.chunk")
        await self._policy.greet(read_greeting(self.name, asked, made))

    def _acknowledge(self, ticket: Ticket, seconds: float) -> None:
        """Begin to report to the store that the ticket's version is loaded, which took `seconds`.

        The engine generates meanwhile, but no rows leave it before the store has accepted this version and all earlier
        ones (`_wait_acknowledged`).
        """
        before, spent = self._acknowledged, self._occupancy.take()

        async def report() -> None:
            if before is not None:
                await before
            await self._policy.acknowledge(self.name, ticket.version, checksum(ticket.shards), seconds, *spent)

        self._acknowledged = asyncio.create_task(report())

    async def _wait_acknowledged(self) -> None:
        if self._acknowledged is not None:
            # Other chunks wait for it too.
            await asyncio.shield(self._acknowledged)

    def _load(self, ticket: Ticket) -> Future:
        """Start to load the ticket's weights into the engine; returns the future."""
        rollout, args = self._rollout, (ticket.shards, self._deadlines.publish, ticket.version)
        if self._asleep:
            return self.engine.call(lambda engine: engine.wake(*args), when_idle=True)
        if rollout.weight_update == "in_flight":
            recompute = rollout.update_kv == "recompute"
            return self.engine.update(lambda engine: engine.update(*args, recompute))
        return self.engine.call(lambda engine: engine.load(*args), when_idle=True)

    async def _sleep_when_idle(self) -> None:
        async with self._loading:
            if self._admitted or self._asleep:
                return
            sleep = self.engine.call(lambda engine: engine.sleep(), when_idle=True)
            await self._within(self._deadlines.publish, sleep, "give back its memory", "trainer.deadlines.publish")
            self._asleep = True

    def _rows(
        self,
        table: pa.Table,
        generations: Sequence[Generation],
        texts: list[str],
        mask: np.ndarray | None,
        generate_s: float,
        load_s: float,
    ) -> pa.Table:
        """Build the rows of prompts and their responses, equally many for each prompt, prompt by prompt.

        Args:
            table: the prompts.
            generations: tokens of each response.
            texts: text of each response.
            mask: [N] int8 over the tokens of all responses, 1 for tokens of the policy; None if all are.
            generate_s: seconds that generating the chunk took.
            load_s: seconds before that, for loading weights.
        """
        prompts, per_prompt = len(table), len(generations) // len(table)
        greedy = self._greedy and table["split"][0].as_py() == "train"
        table = table.take(np.repeat(np.arange(prompts), per_prompt))
        sample = np.tile(np.arange(per_prompt, dtype=np.int32), prompts)
        if greedy:
            column = table.column_names.index("split")
            split = pc.if_else(pa.array(sample == per_prompt - 1), "baseline", table["split"])
            table = table.set_column(column, table.schema.field(column), split)
        offsets = np.cumsum([0, *(len(g.token_ids) for g in generations)])
        tokens = np.concatenate([g.token_ids for g in generations])
        log_probs = np.concatenate([g.log_probs for g in generations])
        runs = np.array([run for g in generations for run in g.version_runs], dtype=np.int64).reshape(-1, 2)
        run_offsets = np.cumsum([0, *(len(g.version_runs) for g in generations)])
        mask = np.ones(len(tokens), np.int8) if mask is None else mask
        return rows.append(
            table,
            rows.ROLLOUT,
            {
                "sample": sample,
                "response_ids": rows.ragged(tokens, offsets, rows.INTS),
                "response_mask": rows.ragged(mask, offsets, pa.list_(pa.int8())),
                "rollout_log_probs": rows.ragged(log_probs, offsets, rows.FLOATS),
                "support": [g.support and g.support[0] for g in generations],
                "support_sizes": [g.support and g.support[1] for g in generations],
                "routes": [None if g.routes is None else g.routes.reshape(-1) for g in generations],
                "response": texts,
                "finish_reason": [g.finish_reason for g in generations],
                "policy_version": [min(version for version, _ in g.version_runs) for g in generations],
                "version_runs": rows.version_runs(runs[:, 0], runs[:, 1], run_offsets),
                "engine": pa.repeat(pa.scalar(self.name), len(table)),
                "generate_s": np.full(len(table), generate_s, np.float32),
                "load_s": np.full(len(table), load_s, np.float32),
            },
        )


def sections(config: Config) -> tuple[DataConfig, ModelConfig, RolloutConfig, AgentConfig, TrainerConfig, bool]:
    """Return the arguments of `Rollout` that come before `policy`."""
    return config.data, config.model, config.rollout, config.agent, config.trainer, uses_baselines(config)


def decoded(tokenizer: Any, responses: list[list[int]], ends: Sequence[int] = ()) -> list[str]:
    """Decode responses like `tokenizer.batch_decode`, but without special tokens and without a final token of
    `ends`."""
    from transformers import PreTrainedTokenizerFast

    # The end of a turn need not be a special token.
    responses = [ids[:-1] if ids and ids[-1] in ends else ids for ids in responses]
    plain = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
    if not plain or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.batch_decode(responses, skip_special_tokens=True)
    # `batch_decode` looks at every token in Python; this leaves the interpreter to the engine meanwhile.
    return tokenizer.backend_tokenizer.decode_batch(responses, skip_special_tokens=True)
