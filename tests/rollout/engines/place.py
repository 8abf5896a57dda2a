"""A real engine in a process of its own, with the trainer's copy of the policy beside it, and questions to it.

vLLM keeps global state and its engines do not share a process well, so an engine has its process for a whole module.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import rows
from pipeline.config import Config
from pipeline.errors import FinalError
from tests.forks import forking

START_S = 240.0
CALL_S = 120.0
MAX_TOKENS = 48
PROMPT_TOKENS = 100
BLOCK = 32
"""Tokens of a KV block on a CPU; a prompt holds several, so there is something to find in the prefix cache."""


class Versions:
    """A policy store without Ray: every version that was published, each handed out to those who ask for it."""

    def __init__(self) -> None:
        self.shards: dict[int, list[Any]] = {}
        self.acknowledged: list[tuple[str, int, int]] = []

    async def admit(self, split: str, chunk: int, version: int) -> Any:
        from pipeline.store.versions import Ticket

        number = version - 1 if split == "train" else version
        return Ticket(number, self.shards[number])

    async def acknowledge(
        self, engine: str, version: int, crc: int, load_s: float, idle_s: float, busy_s: float
    ) -> None:
        self.acknowledged.append((engine, version, crc))

    def beat(self, engine: str) -> None:
        pass


class Place:
    """What one engine process holds: the rollout stage, and the trainer's policy at every version.

    `change` changes the settings that the stage is made with.
    """

    def __init__(self, tie: bool, folder: str, change: Callable[[Config], None] = lambda config: None) -> None:
        import torch

        from pipeline.models.policy import load_policy
        from pipeline.rollout.stage import Rollout, sections

        torch.set_num_threads(1)
        tokenizer = self.tokenizer()
        self.eos, self.vocab = tokenizer.eos_token_id, len(tokenizer)
        model = self.model(tokenizer, tie)
        model.generation_config.eos_token_id = self.ends()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

        config = Config()
        config.model.path = folder
        config.data.max_prompt_length, config.data.max_response_length = PROMPT_TOKENS, MAX_TOKENS
        config.rollout.n, config.rollout.dtype, config.rollout.max_num_seqs = 4, "float32", 64
        config.rollout.enforce_eager = config.rollout.enable_prefix_caching = True
        # Less than a chunk's prompts, so that prompts wait for a later step.
        config.rollout.max_num_batched_tokens = 256
        change(config)
        self.config = config
        self.versions = Versions()
        self.loop = asyncio.new_event_loop()
        self.policy = load_policy(config.model).eval()
        self.weights: dict[int, dict[str, Any]] = {}
        self.publish()
        self.rollout = Rollout(*sections(config), self.versions)

    def tokenizer(self) -> Any:
        from jobs.tiny import build_tokenizer, countdown_texts

        return build_tokenizer(countdown_texts(256, seed=0), vocab_size=320)

    def model(self, tokenizer: Any, tie: bool) -> Any:
        from benchmarks.family_forms import build
        from jobs.tiny import build_model

        if not tie:
            return build("gpt-j", tokenizer)  # its head has a bias, too
        return build_model(tokenizer, hidden=64, layers=2, heads=2, kv_heads=1, tie=True, seed=3)

    def ends(self) -> list[int]:
        """Tokens that end an answer."""
        return [self.eos]

    def publish(self) -> int:
        """The policy's weights as the next version: two ranks' shards, a handful of buckets, no Ray."""
        import torch

        from pipeline.weights.publish import pack, parts

        version = len(self.versions.shards)
        self.versions.shards[version] = [
            pack(parts(self.policy, rank, torch.float32, self.policy.hf_name), rank, 60_000, lambda data: data)
            for rank in (0, 1)
        ]
        self.weights[version] = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}
        return version

    def step(self) -> int:
        """Stands for an optimiser step that moves every weight by much; returns the new version."""
        import torch

        generator = torch.Generator().manual_seed(len(self.versions.shards))
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        return self.publish()

    def prompts(self, count: int) -> list[list[int]]:
        """Always the same ones; random ids, which no tokenizer would give for any text."""
        random = np.random.default_rng(5)
        return [random.integers(3, self.vocab, PROMPT_TOKENS).tolist() for _ in range(count)]

    def chunk(
        self, version: int, split: str = "train", count: int = 4, chunk: int = 0, pads: int = 0, extra_info: str = "{}"
    ) -> pa.Table:
        prompts = self.prompts(count) + self.prompts(1) * pads
        return pa.table(
            {
                "split": [split] * count + ["pad"] * pads,
                "chunk": [chunk if split == "train" else -1] * (count + pads),
                "iteration": [version + 1 if split == "train" else version] * (count + pads),
                "uid": [f"0-{i}" for i in range(count + pads)],
                "epoch": [0] * (count + pads),
                "offset": list(range(count + pads)),
                "prompt_index": list(range(count + pads)),
                "data_source": ["countdown"] * (count + pads),
                "prompt": ["[]"] * (count + pads),
                "prompt_ids": prompts,
                "ground_truth": ["{}"] * (count + pads),
                "extra_info": [extra_info] * (count + pads),
                "agent_name": [None] * (count + pads),
            },
            schema=rows.PROMPT,
        )

    def generate(self, *chunks: pa.Table) -> list[pa.Table]:
        """The chunks' rows, generated together."""

        async def all_of_them() -> list[pa.Table]:
            return list(await asyncio.gather(*(self.rollout(chunk) for chunk in chunks)))

        return self.loop.run_until_complete(asyncio.wait_for(all_of_them(), CALL_S))

    def gap(self, table: pa.Table, version: int | None = None, temperature: float | None = None) -> float:
        """Largest |engine - trainer| log-prob of the table's tokens, under the weights of its own version if None."""
        worst = 0.0
        for ids, reference in zip(
            table["rollout_log_probs"].to_pylist(), self._rescored(table, version, temperature), strict=True
        ):
            worst = max(worst, float(np.abs(np.asarray(ids, np.float32) - reference[0]).max()))
        return worst

    def regret(self, table: pa.Table) -> float:
        """How much likelier than the chosen token the likeliest one was, at most."""
        return max(float((best - chosen).max()) for chosen, best in self._rescored(table, None, 1.0))

    def _rescored(self, table: pa.Table, version: int | None, temperature: float | None) -> Iterator[tuple[Any, Any]]:
        """Per row, the trainer's log-probs of its tokens and of the likeliest tokens there."""
        import torch

        if version is None:
            (version,) = set(table["policy_version"].to_pylist())
        current = self.weights[max(self.weights)]
        self.policy.load_state_dict(self.weights[version])
        try:
            for prompt, response in zip(
                table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist(), strict=True
            ):
                ids = torch.tensor([prompt + response])
                select = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
                degrees = self.config.rollout.temperature if temperature is None else temperature
                with torch.no_grad():
                    chosen, *_ = self.policy(ids, select, torch.tensor(response), temperature=degrees)
                    logits = self.policy.lm(ids).logits[0, select].float()
                yield chosen.numpy(), torch.log_softmax(logits / degrees, -1).max(-1).values.numpy()
        finally:
            self.policy.load_state_dict(current)


# What runs in the engine's process. `place` is made once there.

place: Place


def open_place(name: str, tie: bool, folder: str) -> int:
    global place
    if name == "vllm":
        from vllm import ModelRegistry
        from vllm.model_executor.models.gpt_j import GPTJForCausalLM

        # A class that vLLM knows by its name alone is looked at in one more process, which takes ten seconds to begin.
        ModelRegistry.register_model(GPTJForCausalLM.__name__, GPTJForCausalLM)

    def change(config: Config) -> None:
        config.rollout.name = name

    place = Place(tie, folder, change)
    return os.getpid()


def updates(temperature: float) -> dict[str, Any]:
    """Four versions, the same prompts each time: the gap to the trainer, and to the trainer one version earlier."""
    place.config.rollout.temperature = temperature
    found: dict[str, Any] = {"gaps": [], "stale": [], "versions": [], "acknowledged": 0}
    for _ in range(3):
        version = place.step()
        (table,) = place.generate(place.chunk(version))
        found["versions"].append((version, set(table["policy_version"].to_pylist())))
        found["gaps"].append(place.gap(table))
        found["stale"].append(place.gap(table, version - 1))
    place.config.rollout.temperature = 1.0
    return found


def greedy() -> dict[str, Any]:
    version = place.step()
    table, again = place.generate(place.chunk(version, "val", pads=2), place.chunk(version, "val"))
    return {
        "rows": len(table),
        "gap": place.gap(table, temperature=1.0),
        "regret": place.regret(table),
        "same": table["response_ids"].equals(again["response_ids"]),
    }


def overlapping() -> dict[str, Any]:
    """Chunks of one version and the next one submitted together, then both again in one version."""
    first, second = place.step(), place.step()
    tables = place.generate(
        *(place.chunk(first, chunk=i) for i in range(2)), *(place.chunk(second, chunk=i) for i in range(2, 4))
    )
    return {
        "versions": [set(table["policy_version"].to_pylist()) for table in tables],
        "wanted": [{first}, {first}, {second}, {second}],
        "gaps": [place.gap(table) for table in tables],
    }


def repeated() -> dict[str, Any]:
    version = place.step()
    chunk = place.chunk(version)
    (table,) = place.generate(chunk)
    # In another company, and after the prefix cache has been filled.
    again, _, _ = place.generate(chunk, place.chunk(version, "val"), place.chunk(version, "val", count=7))
    place.rollout._seed += 1
    (other,) = place.generate(chunk)
    place.rollout._seed -= 1
    return {
        name: found["response_ids"].to_pylist()
        for name, found in (("first", table), ("again", again), ("other", other))
    }


def baselines() -> dict[str, Any]:
    """A chunk with and without greedy responses beside its samples, and its greedy responses on their own."""
    version = place.step()
    chunk = place.chunk(version)
    (plain,) = place.generate(chunk)
    (alone,) = place.generate(place.chunk(version, "val"))
    place.rollout._greedy = True
    (table,) = place.generate(chunk)
    place.rollout._greedy = False
    samples, greedy = (table.filter(pc.equal(table["split"], split)) for split in ("train", "baseline"))
    return {
        **{"rows": len(table), "samples": samples, "plain": plain, "greedy": greedy, "alone": alone},
        **{"gap": place.gap(samples), "greedy_gap": place.gap(greedy, temperature=1.0), "regret": place.regret(greedy)},
    }


def responses() -> tuple[pa.Table, int, int]:
    version = place.step()
    return place.generate(place.chunk(version, count=24))[0], place.eos, version


def cached_prompts() -> dict[str, Any]:
    """Run one chunk twice in a version and say how many prompt tokens the engine found in its prefix cache."""
    version = place.step()
    place.generate(place.chunk(version))
    counts: list[int] = []

    def watch(output: Any, version: int) -> Any:
        counts.append(output.num_cached_tokens or 0)
        return read(output, version)

    from pipeline.rollout.engines.vllm import engine as vllm

    read, vllm.read = vllm.read, watch
    try:
        place.generate(place.chunk(version))
    finally:
        vllm.read = read
    return {"cached": counts}


async def late(steps: int, version: int) -> pa.Table:
    """A chunk that is asked for when the engine has made so many steps more."""
    wanted = place.rollout.engine.steps + steps
    while place.rollout.engine.steps < wanted:
        await asyncio.sleep(0.0005)
    return await place.rollout(place.chunk(version, chunk=1))


def in_flight(update_kv: str) -> dict[str, Any]:
    """A chunk of one version, and when it has made some of its tokens, another one of the next version."""
    rollout = place.config.rollout
    rollout.weight_update, rollout.update_kv, rollout.ignore_eos = "in_flight", update_kv, True
    first = place.step()
    place.generate(place.chunk(first))  # the engine has it, and the prompts in its cache
    second = place.step()

    async def both() -> list[pa.Table]:
        return list(await asyncio.gather(place.rollout(place.chunk(first)), late(12, second)))

    tables = place.loop.run_until_complete(asyncio.wait_for(both(), CALL_S))
    rollout.weight_update, rollout.update_kv, rollout.ignore_eos = "between_chunks", "recompute", False
    gaps: dict[str, float] = {}
    for name, table in zip(("old", "new"), tables, strict=True):
        versions = rows.token_versions(table)
        log_probs = table["rollout_log_probs"].combine_chunks().flatten().to_numpy()
        for version in (first, second):
            own = np.concatenate([chosen for chosen, _ in place._rescored(table, version, None)])
            gap = np.abs(own - log_probs)[versions == version]
            gaps[f"{name} {version - first}"] = float(gap.max()) if len(gap) else 0.0
    old, new = tables
    return {
        "gaps": gaps,
        "first": first,
        "second": second,
        "old": old["version_runs"].to_pylist(),
        "new": new["version_runs"].to_pylist(),
        "oldest": old["policy_version"].to_pylist(),
    }


def stopped() -> dict[str, Any]:
    """The same samples without and with a text that ends them, with a shortest length, and with a row's own longest."""
    version, rollout = place.step(), place.config.rollout
    (plain,) = place.generate(place.chunk(version, count=24))
    text = max(plain["response"].to_pylist(), key=len)
    # Bytes that are no text come out in other ways while a response grows.
    plainly = [text[start:][:3] for start in range(len(text) // 2, len(text) - 3)]
    rollout.stop = [next(part for part in plainly if part.isascii() and part.isprintable())]
    (stop,) = place.generate(place.chunk(version, count=24))
    ended, rollout.stop = rollout.stop[0], []
    rollout.min_tokens = MAX_TOKENS
    (least,) = place.generate(place.chunk(version, count=24))
    rollout.min_tokens = 0
    (most,) = place.generate(place.chunk(version, count=24, extra_info='{"sampling_params": {"max_tokens": 5}}'))
    # A token that no file of the model calls an end, as the end of another model's turns.
    counted = Counter(token for ids in plain["response_ids"].to_pylist() for token in set(ids[3:]))
    end, ends = counted.most_common(1)[0][0], place.rollout._ends
    place.rollout._ends = (*ends, end)
    (turn,) = place.generate(place.chunk(version, count=24))
    rollout.ignore_eos = True
    (ignored,) = place.generate(place.chunk(version, count=24))
    rollout.ignore_eos, place.rollout._ends = False, ends
    found = {"plain": plain, "stop": stop, "text": ended, "least": least, "most": most, "gap": place.gap(stop)}
    return found | {"turn": turn, "end": end, "ignored": ignored}


RESTRICTIONS: tuple[dict[str, Any], ...] = (
    *({"top_p": 0.95}, {"top_p": 0.8}, {"top_k": 20}, {"top_k": 5}, {"min_p": 0.3}, {"min_tokens": 40}),
    {"top_p": 0.9, "top_k": 30, "min_p": 0.1, "min_tokens": 40},
    {"top_k": 4, "max_support": 2},
)
"""Settings with which tokens are sampled from a part of the vocabulary."""


def supports(temperature: float) -> list[dict[str, Any]]:
    """For each of `RESTRICTIONS` the mean ratio of trainer to engine, and the gap, without and with the supports."""
    import torch

    from pipeline.models.batch import TokenBatch
    from pipeline.models.packing import pack

    rollout, found = place.config.rollout, []
    with torch.no_grad():
        # Neither one token alone nor all of them are likely.
        logits = place.policy.lm(torch.tensor(place.prompts(1))).logits
        place.policy.decoder.norm.weight.mul_(1.5 / logits.std())
    version, rollout.temperature = place.publish(), temperature
    for settings in ({}, *RESTRICTIONS):
        before = {key: getattr(rollout, key) for key in settings}
        for values in (settings, before):
            for key, value in values.items():
                setattr(rollout, key, value)
            most = rollout.max_support
            # An engine reads it at its start.
            place.rollout.engine.call(lambda engine, most=most: setattr(engine, "_most_support", most)).result()
            if values is not before:
                (table,) = place.generate(place.chunk(version))
        batch = TokenBatch.from_table(table)
        engine = table["rollout_log_probs"].combine_chunks().flatten().to_numpy()
        own: dict[str, Any] = {"settings": settings, "table": table}
        for name in ("without", "with"):
            trainer = np.zeros_like(engine)
            for row in range(len(batch)):
                made = pack(batch, [[row]])
                given = made.arguments | ({"support": None} if name == "without" else {})
                with torch.no_grad():
                    trainer[made.token_index] = place.policy(**given, temperature=temperature).log_probs.numpy()
            known = np.ones(len(engine), bool)
            if batch.support_sizes is not None:
                known = batch.support_sizes != rows.UNKNOWN
                own["unknown"] = int((~known).sum())
            if known.any():
                own[name] = float(np.exp(trainer - engine)[known].mean())
                own[f"gap {name}"] = float(np.abs(trainer - engine)[known].max())
        found.append(own)
    rollout.temperature = 1.0
    return found


def acknowledged() -> dict[str, Any]:
    from pipeline.weights.load import checksum

    return {
        "seen": place.versions.acknowledged,
        "published": {version: checksum(shards) for version, shards in place.versions.shards.items()},
        "name": place.rollout.name,
    }


def refused(damaged: bool) -> str:
    """Publish a version with a flipped bit or without a parameter; what the stage says, and that the engine lives."""
    version = place.step()
    shards = place.versions.shards[version]
    if damaged:
        shards[0].buckets[1] = shards[0].buckets[1].copy()
        shards[0].buckets[1][7] ^= 1
    else:
        for shard in shards:
            shard.pieces[:] = [piece for piece in shard.pieces if piece.name != "model.norm.weight"]
    try:
        place.generate(place.chunk(version))
    except (ValueError, FinalError) as error:
        version = place.step()
        (table,) = place.generate(place.chunk(version))
        return f"{error}; afterwards {place.gap(table) < 1e-4}"
    return "nothing was raised"


class Engine:
    """The engine's process as the tests see it: `engine(function, *args)` runs the function there.

    `opens` makes its place there from `args`, and returns its process id.
    """

    def __init__(self, opens: Callable[..., int], *args: Any) -> None:
        self.name = "vllm"
        self._pool = ProcessPoolExecutor(1, forking("vllm.v1.engine.llm_engine"))
        self.pid = self._pool.submit(opens, *args).result(START_S)

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._pool.submit(function, *args).result(CALL_S)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
