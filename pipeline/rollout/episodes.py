"""Episodes of a chunk: one coroutine for each sample, outside the engine's thread (see `pipeline/agent/`)."""

import asyncio
import json
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import rows
from pipeline.agent import episode
from pipeline.agent.conversation import Ask
from pipeline.agent.endpoint.server import Endpoint
from pipeline.agent.episode import Episode
from pipeline.agent.ray_hosts import BESIDE_ENGINES, Hosts
from pipeline.agent.tokens.context import joined, trained
from pipeline.agent.tokens.pictures import Pictures
from pipeline.config.agent import AgentConfig
from pipeline.config.data import DataConfig
from pipeline.generation import EngineRequest, Generation, PromptImages
from pipeline.models.processor import Vision
from pipeline.rollout.agents import Agent
from pipeline.rollout.engine import EngineLoop, Lease
from pipeline.rollout.seeds import seed_of
from pipeline.sampling import Sampling


class Episodes:
    """The episodes of one engine.

    Args:
        agents: the settings of each agent, by the name by which rows choose it (`AgentConfig.agents`).
        data: the section `data`.
        tokenizer: tokenizer of the model.
        engine: loop of the engine that generates the turns.
        seed: seed of the run; seeds of episodes and turns are derived from it.
        seed_requests: true if each turn has its own seed (`rollout.seed_per_request`).
        hosts: hosts that run the processes of episodes; if there are none, the engine's node runs them.
        ends: ids of the tokens that end a turn (`models/ends.py`).
        vision: processor of images; None in a run without images.
    """

    def __init__(
        self,
        agents: Mapping[str | None, AgentConfig],
        data: DataConfig,
        tokenizer: Any,
        engine: EngineLoop,
        seed: int,
        seed_requests: bool,
        hosts: Hosts = BESIDE_ENGINES,
        ends: Sequence[int] = (),
        vision: Vision | None = None,
    ) -> None:
        self._vision, self._most_bytes = vision, data.max_image_bytes
        self._engine, self._seed, self._seed_requests, self._ends = engine, seed, seed_requests, ends
        self._endpoint = Endpoint()
        shared = data, tokenizer, self._endpoint, hosts
        made = {id(config): Agent(name, config, *shared) for name, config in agents.items()}
        self._agents = {name: made[id(config)] for name, config in agents.items()}
        # Each episode has a process and a descriptor, and a node often allows 1,024 descriptors.
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._places = asyncio.Semaphore(sys.maxsize if allowed == resource.RLIM_INFINITY else allowed // 2)

    async def start(self, table: pa.Table) -> None:
        """Start the agents that the prompts in `table` name; see `Agent.start`."""
        for name in table["agent_name"].unique().to_pylist():
            await self._agents[name].start()

    async def close(self) -> None:
        """End the processes of environments, tools and programs."""
        for agent in self._agents.values():
            await agent.close()
        await self._endpoint.close()

    async def run(
        self, table: pa.Table, settings: list[list[Sampling]], lease: Lease, for_training: bool = False
    ) -> list[Episode]:
        """Run the episodes of a chunk; returns them prompt by prompt.

        Args:
            table: the prompts.
            settings: sampling settings, one list for each prompt with one entry for each episode.
            lease: lease of the engine, which keeps its weights from changing between two turns.
            for_training: true if the engine returns what the trainer needs (`EngineRequest.for_training`).
        """
        columns = zip(*(table[name].to_pylist() for name in ("uid", "agent_name", *ROW)), settings, strict=True)
        shown = [()] * len(table) if self._vision is None else table["images"].to_pylist()
        tasks = []
        for (uid, agent_name, prompt, source, truth, extra, samples), images in zip(columns, shown, strict=True):
            agent = self._agents[agent_name]
            row = {
                "prompt": json.loads(prompt),
                "data_source": source,
                "ground_truth": None if truth is None else json.loads(truth),
                "extra_info": None if extra is None else json.loads(extra),
            }
            for sample, sampling in enumerate(samples):
                name = f"{self._seed}/{uid}/{sample}"
                game = seed_of(f"{self._seed}/{uid}" if agent.config.same_seed_in_group else name)
                ask = self._policy(sampling, name, lease, for_training)
                tasks.append(asyncio.create_task(self._play(agent, row, game, sampling, ask, images or ())))
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(
        self, agent: Agent, row: dict[str, Any], seed: int, sampling: Sampling, ask: Ask, images: Sequence[bytes]
    ) -> Episode:
        """Run one episode, once the numbers of open episodes of agent and engine allow it."""
        pictures = None if self._vision is None else Pictures(self._vision, self._most_bytes, images)
        async with agent.places, self._places:
            settings = await agent.start(), ask, sampling.max_tokens, sampling.stop
            played = await episode.run(row, agent.open(row, seed, sampling), *settings, pictures=pictures)
            if not played.lost:
                return played
            # A single retry with the same seeds: the zygote may have died of this very episode.
            spent = played.numbers["episode_s"]
            return await episode.run(row, agent.open(row, seed, sampling), *settings, spent, pictures)

    def _policy(self, sampling: Sampling, name: str, lease: Lease, for_training: bool) -> Ask:
        async def ask(ids: list[int], most: int, turn: int, images: PromptImages | None = None) -> Generation:
            drawn = self._seed_requests and sampling.temperature > 0
            seed = seed_of(f"{name}/{turn}") if drawn else None
            limited = replace(sampling, max_tokens=most)
            request = EngineRequest(ids, limited, seed, tuple(self._ends), images=images, for_training=for_training)
            future = self._engine.submit([request], lease=lease)
            try:
                (generation,) = await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                self._engine.abort(future, lease)
                raise
            return generation

        return ask


SPAN = ("kind", "tokens", "reward")
ROW = ("prompt", "data_source", "ground_truth", "extra_info")
"""Columns of a prompt that an environment gets as `row`."""


def generations(episodes: list[Episode], version: int) -> tuple[list[Generation], np.ndarray]:
    """Return the generation of each episode, and the mask [N] of all their tokens: 1 for tokens that are trained.

    Args:
        episodes: the episodes.
        version: policy version of episodes without tokens.
    """
    pairs = [joined(each.contexts, each.finish_reason, version) for each in episodes]
    return [generation for generation, _ in pairs], np.concatenate([mask for _, mask in pairs])


def with_episodes(table: pa.Table, episodes: list[Episode]) -> pa.Table:
    """Return `table`, with one row for each episode, with the columns `AGENT` and the prompts that the episodes had."""
    prompts = pa.array([each.prompt_ids for each in episodes], rows.INTS)
    table = table.set_column(table.column_names.index("prompt_ids"), table.schema.field("prompt_ids"), prompts)
    if rows.IMAGES.names[0] in table.column_names:
        table = _with_images(table, episodes)
    spans = [
        [dict(zip(SPAN, span, strict=True)) for context in each.contexts for span in context.spans] for each in episodes
    ]
    return rows.append(
        table,
        rows.AGENT,
        {
            "contexts": [_contexts(each) for each in episodes],
            "spans": spans,
            "messages": [Episode.to_json(each.messages) for each in episodes],
            "env_score": [each.score for each in episodes],
            "env_parts": [Episode.to_json(each.parts) for each in episodes],
            "env_error": [each.error for each in episodes],
            "turns": [each.turns for each in episodes],
            "ended": [each.ended for each in episodes],
            "episode": [Episode.to_json(each.numbers) for each in episodes],
        },
    )


def _with_images(table: pa.Table, episodes: list[Episode]) -> pa.Table:
    """Return `table` with the images that each episode has shown, and their hashes."""
    for name, attribute in (("images", "images"), ("image_hash", "image_hashes")):
        values = [getattr(each.contexts[0], attribute) if each.contexts else [] for each in episodes]
        place, field = table.column_names.index(name), table.schema.field(name)
        table = table.set_column(place, field, pa.array(values, rows.BINARIES))
    return table


def _contexts(episode: Episode) -> list[dict[str, Any]] | None:
    """Make the column `contexts` of a row: prompt and number of tokens of each context.

    None for a single context; its prompt is the row's own.
    """
    if len(episode.contexts) < 2:
        return None
    first, *further = trained(episode.contexts)
    lines = [{"prompt": None, "tokens": len(first.ids)}]
    return lines + [{"prompt": context.prompt_ids, "tokens": len(context.ids)} for context in further]
