"""Random episodes of a template family on the real engine, and all that the engine was asked.

The model is tiny. Its weights are random in some rounds, and in others fitted in a few seconds to call tools, well and
badly, and to end its answers.
"""

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import rows
from pipeline.agent import Call
from pipeline.agent.inside.frames import MAX_REASON
from pipeline.config import Config
from pipeline.rollout.seeds import seed_of
from tests.agent.families import FAMILIES, TOOLS, tokenizer
from tests.agent.hostile_values import LITERALS
from tests.agent.oracle import CALLS, ENDS, Asked, Oracle, Wrong, per_token
from tests.rollout.engines.place import CALL_S, Place

WORLDS = Path(__file__).parent / "random_worlds.py"
PROMPTS, SAMPLES = 16, 2
"""Of one chunk; two chunks run at the same time."""
ROUND = 2 * PROMPTS * SAMPLES
"""Episodes of one round."""
PARSED = set(CALLS) - {"channels"} | {"headers"}
"""Families whose calls one of vLLM's parsers reads with a small tokenizer."""
FIT_STEPS, FIT_ROWS, FIT_TOKENS = 200, 4, 384


def agents(name: str, dice: random.Random) -> dict[str, dict[str, Any]]:
    """The agents that rows choose from, with random limits."""
    talk = {
        "environment": f"{WORLDS}:Talk",
        "kwargs": {"several": name != "alternating", "opens": name != "alternating"},
    }
    tools = {"tools": [str(WORLDS)]} if name in PARSED else {}
    made: dict[str, dict[str, Any]] = {
        "talks": talk,
        "both": {**talk, **tools},
        "shown": {**talk, **tools, "context": "rerender"},
        "masks": {**talk, **tools, "on_malformed": "mask"},
        "runs": {"program": f"{WORLDS}:run", "max_contexts": 3},
    }
    if FAMILIES[name].tool:
        made["results"] = {**talk, "kwargs": {"several": False}, "observation_role": "tool"}
    if tools:
        made["calls"] = {**tools, "on_malformed": "end"}
    for agent, settings in made.items():
        settings["max_turns"] = dice.randint(2, 6)
        settings["max_turn_tokens"] = dice.choice(
            [0, 80] if agent in ("calls", "shown", "masks") else [0, 1, 3, 20, 80]
        )
        settings["max_observation_tokens"] = dice.choice([8, 60, 150])
    return made


class FuzzPlace(Place):
    """An engine with a model of the family, whose rows are random episodes.

    Args:
        name: of the family.
        seed: of all that is random.
        prefix_cache: whether the engine has one.
    """

    def __init__(self, folder: str, name: str, seed: int, prefix_cache: bool) -> None:
        self.name, self.dice = name, random.Random(f"{name}/{seed}")
        self.asked: dict[str, Asked] = {}
        self.most_gap = 0.0
        family = FAMILIES[name]
        controls = f"{family.special} {family.added}"

        def change(config: Config) -> None:
            config.agent.named = agents(name, self.dice)
            config.agent.same_seed_in_group = False
            config.agent.env_vars = {"CONTROLS": controls}
            config.data.max_prompt_length, config.data.max_response_length = 1500, 400
            config.rollout.n, config.rollout.enable_prefix_caching = SAMPLES, prefix_cache
            config.rollout.max_num_batched_tokens = 8192

        super().__init__(True, folder, change)
        self.rollout._episodes._seed = seed
        self.rollout.engine.call(self.watch).result(CALL_S)
        tools = {agent: TOOLS if name in PARSED else [] for agent in ("runs",)}
        everyone = self.rollout._episodes._agents
        for agent in self.config.agent.named:
            if agent != "runs":
                self.loop.run_until_complete(everyone[agent].start())
                tools[agent] = everyone[agent]._chat_format.tools
        self.oracle = Oracle(name, tools, {"shown"}, {"masks"}, {"runs"})
        self.random = {key: value.clone() for key, value in self.policy.state_dict().items()}
        self.fitted = self.fit()

    def tokenizer(self) -> Any:
        return tokenizer(self.name)

    def ends(self) -> list[int]:
        texts = {"channels": "<|return|> <|call|>", "unclosed": "<|user|> <|observation|>"}
        return tokenizer(self.name).convert_tokens_to_ids(texts.get(self.name, ENDS[self.name][0]).split())

    def watch(self, engine: Any) -> None:
        """Write down every request of the engine and every output."""
        llm = engine.llm
        add, step = llm.add_request, llm.step

        def added(request_id: str, prompt: Any, params: Any) -> Any:
            self.asked[request_id] = Asked(list(prompt["prompt_token_ids"]), params.seed)
            return add(request_id, prompt, params)

        def stepped() -> Any:
            outputs = step()
            for output in outputs:
                (made,) = output.outputs
                asked = self.asked[output.request_id]
                assert output.finished and asked.prompt == output.prompt_token_ids
                asked.cached, asked.finish_reason = output.num_cached_tokens or 0, made.finish_reason
                asked.tokens, asked.log_probs = tuple(made.token_ids), tuple(made.logprobs.logprobs)
                asked.versions = tuple(int(s.version) for s in made.weight_versions for _ in range(s.start, s.end))
            return outputs

        llm.add_request, llm.step = added, stepped

    def fit(self) -> dict[str, Any]:
        """Weights that write calls, broken calls and short texts, and end most of them."""
        import torch

        self.hostile()
        bridge = self.rollout._episodes._agents["both"]._chat_format.bridge
        lm, dice = self.policy.lm, random.Random(0)
        marks = [[bridge.tokens.ids[end] for end in ends.split()[:1]] for ends in ENDS[self.name]]

        def answer() -> tuple[list[int], list[int]]:
            kind, digit = dice.random(), str(dice.randrange(10))
            calls = [Call("call00000", "calc", {"expression": digit}), Call("call00001", "get", {"keys": ["a"]})]
            if self.name not in PARSED or kind < 0.3:
                thought = "<think>\nSo.\n</think>\n\n" if self.name == "thinking" and kind < 0.15 else ""
                return bridge.answer(thought + dice.choice(["", "Yes ", "é "]) + digit, []), marks[0]
            if kind < 0.4:
                calls[0] = Call("call00000", "none", {})
            single = self.name == "headers" or dice.random() < 0.8
            ids = bridge.answer("", calls[:1] if single else calls)
            if kind < 0.5:
                cut = dice.randrange(len(ids))
                ids = ids[:cut] + ids[cut + 2 :]
            return ids, marks[1]

        def line() -> tuple[list[int], list[int]]:
            ids = [dice.randrange(self.vocab) for _ in range(dice.randint(0, 200))]
            targets = [-100] * len(ids)
            while len(ids) < FIT_TOKENS:
                noise = [dice.randrange(self.vocab) for _ in range(dice.randint(0, 9))]
                said, end = answer()
                ids += noise + start
                targets += [-100] * len(noise + start)
                ids += said + end
                targets += said + end
            return ids[:FIT_TOKENS], targets[:FIT_TOKENS]

        start = bridge.prompt([{"role": "user", "content": "x"}], [])[-6:]
        optimizer = torch.optim.AdamW(lm.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=FIT_STEPS)
        for _ in range(FIT_STEPS):
            ids, targets = (torch.tensor(part) for part in zip(*(line() for _ in range(FIT_ROWS)), strict=True))
            loss = lm(input_ids=ids, labels=targets).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return {key: value.clone() for key, value in self.policy.state_dict().items()}

    def hostile(self) -> None:
        """Have every tenth answer read as a hostile call, whose tokens stay those that were sampled.

        Weights that are fitted in seconds do not write numbers of 309 digits.
        """
        if self.name not in PARSED:
            return
        dice = random.Random(f"{self.name}/hostile")
        for agent in ("both", "shown", "masks", "calls"):
            reader = self.rollout._episodes._agents[agent]._chat_format.reader

            def hostile(raw: str, ids: Any, parse: Any = reader._parse) -> Any:
                if dice.random() > 0.1:
                    return parse(raw, ids)
                self.oracle.seen["hostile values"] += 1
                literal = dice.choice(LITERALS)
                name, argument = dice.choice([("calc", "digits"), ("calc", "expression"), ("get", "keys")])
                return "", "", [(name, f'{{"expression": "1", "{argument}": {literal}}}')]

            reader._parse = hostile

    def move(self, kind: str) -> int:
        """Publish a new version: `random` or `fitted` weights, with a little noise."""
        import torch

        self.policy.load_state_dict(self.random if kind == "random" else self.fitted)
        generator = torch.Generator().manual_seed(len(self.versions.shards))
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter += 0.003 * torch.randn(parameter.shape, generator=generator)
        return self.publish()

    def games(self, version: int, number: int) -> pa.Table:
        """A chunk of prompts that choose their agents at random."""
        dice, table = self.dice, self.chunk(version, count=PROMPTS, chunk=number)
        prompts, extra = [], []
        for _ in range(PROMPTS):
            text = dice.choice(["go", "", "1 2 3", "é\n", " ".join([*FAMILIES[self.name].special.split(), "<think>"])])
            prompt = [{"role": "user", "content": text}]
            if dice.random() < 0.2:
                prompt += [{"role": "assistant", "content": "12"}, {"role": "user", "content": "  on "}]
            if dice.random() < 0.2 and self.name != "alternating":
                prompt.insert(0, {"role": "system", "content": "Be brief."})
            prompts.append(json.dumps(prompt))
            sampling = dice.choice([{}, {"max_tokens": dice.randint(1, 200)}])
            extra.append(json.dumps({"tools": TOOLS if self.name in PARSED else [], "sampling_params": sampling}))
        often = ["calls", "calls", "shown"] if self.name in PARSED else []
        names = dice.choices([*sorted(self.config.agent.named), *often], k=PROMPTS)
        if self.config.rollout.stop:  # which agents that show tools refuse
            names = dice.choices(["talks"] if self.name in PARSED else ["talks", "runs"], k=PROMPTS)
        uids = [f"{number}-{i}" for i in range(PROMPTS)]
        for column, values in (("prompt", prompts), ("extra_info", extra), ("agent_name", names), ("uid", uids)):
            place = table.column_names.index(column)
            table = table.set_column(place, table.schema.field(place), pa.array(values))
        return table

    def round(self, number: int) -> list[str]:
        """Play two chunks, in every third round with weights that change in flight; what is wrong with their rows."""
        rollout, dice = self.config.rollout, self.dice
        rollout.temperature = dice.choice([0.7, 1.0, 1.0, 1.3])
        rollout.stop = dice.choice([[], [], [], ["1"], ["es", "}"]])
        in_flight = number % 3 == 2
        rollout.weight_update = "in_flight" if in_flight else "between_chunks"
        versions = [self.move("random" if number % 3 == 0 else "fitted")]
        versions.append(self.move("fitted") if in_flight or dice.random() < 0.3 else versions[0])
        pause_s = dice.uniform(0.02, 0.3) if in_flight else 0.0
        self.asked.clear()

        async def later() -> pa.Table:
            await asyncio.sleep(pause_s)
            return await self.rollout(self.games(versions[1], 2 * number + 1))

        async def both() -> list[pa.Table]:
            return list(await asyncio.gather(self.rollout(self.games(versions[0], 2 * number)), later()))

        tables = self.loop.run_until_complete(asyncio.wait_for(both(), CALL_S))
        found = [row for table in tables for row in table.to_pylist()]
        return [problem for row in found for problem in self.problems(row)]

    def problems(self, row: dict[str, Any]) -> list[str]:
        """What is wrong with a row."""
        episode = f"{self.rollout._episodes._seed}/{row['uid']}/{row['sample']}"
        by_seed = {asked.seed: asked for asked in self.asked.values()}
        asked = [by_seed[seed] for turn in range(20) if (seed := seed_of(f"{episode}/{turn}")) in by_seed]
        where = f"{self.name} {row['agent_name']} {row['uid']} sample {row['sample']}: "
        self.oracle.seen[f"ended {row['ended']}"] += 1
        error = row["env_error"]
        if error is not None and ("ValueError: it fails" not in error or len(error) > MAX_REASON):
            return [where + error]
        try:
            self.oracle.check(row, asked)
        except Wrong as wrong:
            return [where + str(wrong)]
        gap = self.gap_of(row)
        self.most_gap = max(self.most_gap, gap)
        return [where + f"the engine's log-probs are {gap:.2g} from the trainer's"] if gap > 1e-4 else []

    def gap_of(self, row: dict[str, Any]) -> float:
        """Largest |engine - trainer| log-prob of the answers, each token under the weights of its version."""
        import torch

        versions, worst, start = np.array(per_token(row["version_runs"])), 0.0, 0
        said = np.repeat([span["kind"] for span in row["spans"]], [span["tokens"] for span in row["spans"]])
        for context in row["contexts"] or [{"prompt": None, "tokens": len(said)}]:
            prompt = row["prompt_ids"] if context["prompt"] is None else context["prompt"]
            part = slice(start, start + context["tokens"])
            response, start = row["response_ids"][part], part.stop
            own, targets = np.array(row["rollout_log_probs"][part]), torch.tensor(response)
            for version in set(versions[part].tolist()):
                self.policy.load_state_dict(self.weights[version])
                select = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
                with torch.no_grad():
                    chosen, *_ = self.policy(
                        torch.tensor([prompt + response]), select, targets, temperature=self.config.rollout.temperature
                    )
                here = (versions[part] == version) & (said[part] == rows.ANSWER)
                worst = max(worst, float(np.abs(chosen.numpy() - own)[here].max(initial=0.0)))
        return worst


place: FuzzPlace


def open_place(folder: str, name: str, seed: int, prefix_cache: bool) -> int:
    global place
    place = FuzzPlace(folder, name, seed, prefix_cache)
    return os.getpid()


def play(number: int) -> tuple[list[str], Counter[str], float]:
    """One round: what is wrong, what was seen since the beginning, and the largest gap."""
    return place.round(number), place.oracle.seen, place.most_gap
