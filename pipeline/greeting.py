"""The rows with which engine and trainer are compared before the first iteration (`models/handshake.py`).

The engine generates them as it generates all rows; the trainer computes their log-probs in each way in which rows pass
through its model. They are few and short, but one is longer than each length at which the model's configuration changes
something.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SHORT = (5, 17)
"""Lengths of the short prompts that every model gets, in tokens."""
RESPONSE = 12
"""Length of a response in tokens."""
SAMPLES, ROUNDED_SAMPLES = 2, 8
"""Numbers of responses to a shared prompt: the first if engine and trainer compute in float32, else the second, because
only many tokens show the size of rounding."""
BEYOND = 8
"""Tokens by which a long row passes a border."""
BORDER = re.compile(
    r"window(_size)?$|chunk_size$|local_attention$|original_max_position|max_position_embeddings$|floor_scale$"
)
"""Pattern in the names of numbers in a model's configuration at which attention or positions change."""


@dataclass(frozen=True)
class GreetingPlan:
    """The rows that are compared."""

    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    response: int
    """Tokens of each response."""
    samples: int
    """Responses to each prompt."""
    vocabulary: int
    """Tokens of the model."""
    seed: int
    borders: dict[int, str]
    """Lengths that the rows pass, and the number of the configuration that names each."""

    @classmethod
    def of(cls, config: Any, longest: int, seed: int, exact: bool = True) -> "GreetingPlan":
        """Choose the rows for a model.

        Args:
            config: configuration of its text model, from `transformers`.
            longest: tokens of the run's longest row.
            seed: the run's.
            exact: whether engine and trainer compute in float32.
        """
        response = max(1, min(RESPONSE, longest // 2))
        passed = {length: name for length, name in borders(config.to_dict()) if length + BEYOND <= longest}
        prompts = {min(length, longest - response) for length in SHORT}
        # The response crosses the border.
        prompts |= {length + BEYOND - response for length in passed if length + BEYOND > response}
        samples = SAMPLES if exact else ROUNDED_SAMPLES
        return cls(tuple(sorted(prompts)), response, samples, config.vocab_size, seed, dict(sorted(passed.items())))

    def passes(self, tokens: int) -> list[str]:
        """Describe the borders that a row of so many tokens passes."""
        return [f"{name}={length}" for length, name in self.borders.items() if tokens > length]


def borders(settings: Mapping[str, Any], depth: int = 2) -> list[tuple[int, str]]:
    """Return the lengths at which a model's computation changes, each with the name in its configuration."""
    found = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and depth:
            found += borders(value, depth - 1)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0 and BORDER.search(name):
            found.append((value, name))
    return found


@dataclass(frozen=True)
class Way:
    """A way in which rows pass through a model."""

    attention: str
    """Name of the attention in `transformers`."""
    packed: bool
    shared: bool

    def __str__(self) -> str:
        rows = "packed rows that share prompts" if self.shared else "packed rows" if self.packed else "padded rows"
        return f"attention {self.attention!r} over {rows}"


@dataclass(frozen=True)
class Change:
    """The handshake's change of the passes of rows."""

    decoder: str
    """Class of the models whose rows pass in another way: the policy's."""
    way: Way


@dataclass(frozen=True)
class Greeting:
    """Rows that an engine has generated, prompt by prompt."""

    engine: str
    prompts: Sequence[Sequence[int]]
    """Token ids of each row's prompt; rows of the same prompt are neighbours."""
    responses: Sequence[np.ndarray]
    """[tokens] int32 of each row."""
    log_probs: Sequence[np.ndarray]
    """[tokens] float32 of each row: the engine's, in nats, at temperature 1."""


def prompts_of(plan: GreetingPlan, tokenizer: Any) -> list[list[int]]:
    """Draw the plan's prompts, as token ids, from the tokens of the policy's tokenizer that are plain text."""
    added = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
    plain = [token for token in range(min(plan.vocabulary, len(tokenizer))) if token not in added]
    generator = np.random.default_rng(plan.seed)
    return [generator.choice(plain, length).tolist() for length in plan.prompts]
