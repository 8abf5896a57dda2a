"""Sampling settings of responses: defaults of the run, and values that single rows set instead.

A row of a prompt file may set any of these keys in its `extra_info`:

    {"sampling_params": {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "min_tokens": 8,
                         "max_tokens": 64, "stop": ["</answer>"]}}

The values are checked when the row is read (`RowLimits`), before it reaches an engine.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pipeline.config import Config
from pipeline.config.rollout import RolloutConfig
from pipeline.derived import reads_teacher
from pipeline.errors import nearest
from pipeline.reward.truths import TruthCheck, truth_check
from pipeline.teachers import TeacherRows

KEY = "sampling_params"
MOST_STOPS, LONGEST_STOP = 16, 256
"""Maximum number of texts that may end a response, and of characters in each: engines search for all of them after each
token."""
WARMEST, COLDEST = 2.0, 0.01
"""Largest and smallest temperature that vLLM accepts, apart from 0."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one response, with names as in `rollout.*`. `max_tokens` is the maximum length in tokens."""

    temperature: float
    top_p: float
    top_k: int
    min_tokens: int
    max_tokens: int
    stop: tuple[str, ...]
    min_p: float = 0.0

    @classmethod
    def of(cls, rollout: RolloutConfig, max_response_length: int, split: str) -> "Sampling":
        """Return the default settings of the run for rows of a split (`train` or `val`)."""
        chosen = rollout if split == "train" else rollout.val_kwargs
        limits = rollout.min_tokens, max_response_length, tuple(rollout.stop)
        return cls(chosen.temperature, chosen.top_p, chosen.top_k, *limits, rollout.min_p if split == "train" else 0.0)

    def greedy(self) -> "Sampling":
        """Return these settings with greedy sampling: the likeliest token each time."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)

    @property
    def truncated(self) -> bool:
        """True if unlikely tokens are left out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def of_row(self, extra_info: str) -> "Sampling":
        """Return these settings with the values that a row sets in `extra_info` (JSON, checked by `RowLimits`)."""
        # Most rows set nothing, and their JSON can be long.
        if f'"{KEY}"' not in extra_info:
            return self
        return replace(self, **asked(json.loads(extra_info)))


KEYS = tuple(item.name for item in fields(Sampling))

NUMBERS: dict[str, tuple[type[int] | type[float], Callable[[float], bool], str]] = {
    "temperature": (float, lambda t: t == 0 or COLDEST <= t <= WARMEST, f"0, or from {COLDEST:g} to {WARMEST:g}"),
    "top_p": (float, lambda p: 0 < p <= 1, "a number above 0 and at most 1"),
    "top_k": (int, lambda k: k == -1 or k >= 1, "a whole number of at least 1, or -1 for all tokens"),
    "min_p": (float, lambda p: 0 <= p <= 1, "a number from 0 to 1"),
    "min_tokens": (int, lambda n: n >= 0, "a whole number of at least 0"),
    "max_tokens": (int, lambda n: n >= 1, "a whole number of at least 1"),
}
"""(Type, check, description) of the allowed values, by key."""


def asked(extra_info: Any) -> dict[str, Any]:
    """Return the sampling settings that a row sets, by the names of fields in `Sampling`.

    Args:
        extra_info: `extra_info` of the row, as read from a file or from JSON. A key that is null is not set.

    Raises:
        ValueError: a key or a value is not allowed; the text names both.
    """
    values = extra_info.get(KEY) if isinstance(extra_info, Mapping) else None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ValueError(f"`extra_info.{KEY}` is {values!r:.80}; it must be an object with any of {', '.join(KEYS)}")
    found = {}
    for key, value in values.items():
        if key not in KEYS:
            raise ValueError(f"`extra_info.{KEY}.{key}` is not known; a row may set {', '.join(KEYS)}")
        if value is not None:
            found[key] = _stops(value) if key == "stop" else _number(key, value)
    return found


@dataclass(frozen=True)
class RowLimits:
    """Limits on what rows of a split may request: sampling settings, agents and ground truths."""

    own: Sampling
    """Sampling settings of a row that sets none."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Sampling settings that rows must not set, each with the reason."""
    agents: Collection[str | None] = (None,)
    """Allowed values of `agent_name`."""
    asked: Collection[str | None] = ()
    """Values of `agent_name` for which the prompt must not end with an assistant message."""
    truths: TruthCheck = field(default_factory=TruthCheck)
    """Check of the ground truth of rows."""
    teachers: TeacherRows | None = None
    """Teachers of the rows; None if rows need none."""

    def check_asks(self, name: str | None) -> None:
        """Refuse a prompt that ends with an assistant message if the agent `name` cannot continue it. Call this only
        for such prompts.

        Raises:
            ValueError: the agent is in `asked`.
        """
        if name in self.asked:
            raise ValueError(
                "the last message is the assistant's, and an answer of an episode cannot be continued; end with a "
                "message that the policy is to answer, or leave the row to a run without agents"
            )

    def check_agent(self, name: str | None) -> None:
        """Check that the config declares the agent `name`.

        Raises:
            ValueError: it does not; the text names the agents of the config.
        """
        if name not in self.agents:
            known = ", ".join(agent for agent in self.agents if agent)
            raise ValueError(
                f"`agent_name` is {name!r:.80}, which is not an agent of the config ({known}); declare "
                f"agent.named.{name}, or name one of these in the row"
            )

    def check(self, extra_info: Any) -> None:
        """Check the sampling settings that a row sets in `extra_info`.

        Raises:
            ValueError: a key or a value is not allowed; the text names both.
        """
        found = asked(extra_info)
        for key in found:
            if key in self.refused:
                raise ValueError(
                    f"`extra_info.{KEY}.{key}` is {found[key]!r}, and this row may not set it: {self.refused[key]}; "
                    "remove it from the row"
                )
        wanted, longest = replace(self.own, **found), self.own.max_tokens
        if wanted.max_tokens > longest:
            raise ValueError(
                f"`extra_info.{KEY}.max_tokens` is {wanted.max_tokens}, above data.max_response_length={longest}; "
                "lower it, or raise that"
            )
        if wanted.min_tokens > wanted.max_tokens:
            raise ValueError(
                f"`extra_info.{KEY}` gives a response at least min_tokens={wanted.min_tokens} and at most "
                f"max_tokens={wanted.max_tokens} tokens; lower the one or raise the other"
            )


def check_agents(named: Collection[str], chosen: Collection[str | None]) -> None:
    """Check that each named agent is chosen by at least one row.

    Args:
        named: the names in `agent.named`.
        chosen: the names in the column `agent_name` of the rows.

    Raises:
        ValueError: no row chooses one of them; the text names the agents that rows choose.
    """
    known = sorted(name for name in chosen if name)
    for name in named:
        if name not in known:
            raise ValueError(
                f"agent.named.{name} is chosen by no row; the names in the column `agent_name` are: "
                f"{', '.join(known) or 'none'}{nearest(name, known)}"
            )


def row_limits(config: Config) -> dict[str, RowLimits]:
    """Return the limits on what rows may request, by split (`train` and `val`).

    Training rows must not change the sampling distribution in ways that the trainer's log-probs do not follow.
    """
    refused = {"temperature": "the trainer computes the log-probs of all rows at rollout.temperature"}
    rollout, longest = config.rollout, config.data.max_response_length
    if not rollout.facts.supports:
        why = f"rollout.name={rollout.name} does not return the tokens that it samples from"
        refused |= dict.fromkeys(("top_p", "top_k", "min_p", "min_tokens"), why)
    if reads_teacher(config) and any(one.url for one in config.teacher.declared().values()):
        why = "the served teacher returns log-probs over the whole vocabulary"
        refused |= dict.fromkeys(("top_p", "top_k", "min_p", "min_tokens"), why)
    agents = config.agent.agents()
    asked = [name for name, agent in agents.items() if agent.environment is None and not agent.driven]
    asked = asked if config.agent.used else []
    calls = {}
    if any(agent.tools for agent in agents.values()):
        calls = {"stop": "a text could end an answer inside a call of agent.tools"}
    truths = truth_check(config.reward, config.agent)
    return {
        "train": RowLimits(
            *(Sampling.of(rollout, longest, "train"), refused | calls, agents.keys(), asked, truths),
            TeacherRows.of(config.teacher) if reads_teacher(config) else None,
        ),
        "val": RowLimits(Sampling.of(rollout, longest, "val"), calls, agents.keys(), asked, truths),
    }


def _number(key: str, value: Any) -> float | int:
    kind, fits, wanted = NUMBERS[key]
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    # A column of whole numbers in which some are missing is often stored as floats.
    if not known or (kind is int and value != int(value)) or not fits(value):
        raise ValueError(f"`extra_info.{KEY}.{key}` is {value!r:.80}; it must be {wanted}")
    return kind(value)


def _stops(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if problem := stop_problem(texts):
        raise ValueError(f"`extra_info.{KEY}.stop` {problem}; it must be a text or a list of texts that end a response")
    return tuple(texts)


def stop_problem(texts: Any) -> str:
    """Return the problem with `texts`, a list of texts that end a response, as text; "" if they can be used."""
    if not isinstance(texts, (list, tuple)):
        return f"is {texts!r:.80}"
    if len(texts) > MOST_STOPS:
        return f"has {len(texts)} texts, more than {MOST_STOPS}"
    for text in texts:
        if not isinstance(text, str) or not text:
            return f"holds {text!r:.80}"
        if len(text) > LONGEST_STOP:
            return f"holds a text of {len(text)} characters, more than {LONGEST_STOP}"
    return ""
