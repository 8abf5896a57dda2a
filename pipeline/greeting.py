"""Rows for the handshake: the comparison of engine and trainer before the first iteration (`models/handshake.py`).

The engine generates these rows like all others; the trainer computes their log-probs with each attention implementation
and packing. The rows are few and short, but for each length at which the model computes differently (such as a sliding
window), one row is longer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.generation import PromptImages

SHORT = (5, 17)
"""Lengths of the short prompts that every model gets, in tokens."""
RESPONSE = 12
"""Length of a response in tokens."""
SAMPLES, ROUNDED_SAMPLES = 2, 8
"""Number of responses per prompt: the first if engine and trainer compute in float32, else the second, since the size
of rounding errors shows only over many tokens."""
BEYOND = 8
"""Number of tokens by which a row is longer than a border."""
BORDER = re.compile(
    r"window(_size)?$|chunk_size$|local_attention$|original_max_position|max_position_embeddings$|floor_scale$"
)
"""Pattern for keys of a model's configuration with a border: a length at which attention or positions change."""


@dataclass(frozen=True)
class GreetingPlan:
    """Sizes of the rows to compare."""

    prompts: tuple[int, ...]
    """Number of tokens in each prompt."""
    response: int
    """Number of tokens in each response."""
    samples: int
    """Number of responses per prompt."""
    vocabulary: int
    """Number of tokens in the model's vocabulary."""
    seed: int
    borders: dict[int, str]
    """Borders that at least one row exceeds: length in tokens to the key in the model's configuration."""
    shown: tuple[tuple[list[int], PromptImages], ...] = ()
    """Further prompts with images: the token ids, with a placeholder for each feature, and the images."""

    @classmethod
    def of(cls, config: Any, longest: int, seed: int, exact: bool = True) -> "GreetingPlan":
        """Choose the rows for a model.

        Args:
            config: configuration of the text model, from `transformers`.
            longest: maximum number of tokens in a row of the run.
            seed: `trainer.seed`.
            exact: True if engine and trainer compute in float32.
        """
        response = max(1, min(RESPONSE, longest // 2))
        passed = {length: name for length, name in borders(config.to_dict()) if length + BEYOND <= longest}
        prompts = {min(length, longest - response) for length in SHORT}
        # The response crosses the border.
        prompts |= {length + BEYOND - response for length in passed if length + BEYOND > response}
        samples = SAMPLES if exact else ROUNDED_SAMPLES
        return cls(tuple(sorted(prompts)), response, samples, config.vocab_size, seed, dict(sorted(passed.items())))

    def passes(self, tokens: int) -> list[str]:
        """Return the borders that a row of `tokens` tokens exceeds, as texts `KEY=LENGTH`."""
        return [f"{name}={length}" for length, name in self.borders.items() if tokens > length]


def borders(settings: Mapping[str, Any], depth: int = 2) -> list[tuple[int, str]]:
    """Return (length in tokens, key) for each border in a model's configuration, nested up to `depth` levels."""
    found = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and depth:
            found += borders(value, depth - 1)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0 and BORDER.search(name):
            found.append((value, name))
    return found


@dataclass(frozen=True)
class Way:
    """How a model computes rows: attention implementation and packing."""

    attention: str
    """Name of the attention implementation in `transformers`."""
    packed: bool
    shared: bool

    def __str__(self) -> str:
        rows = "packed rows that share prompts" if self.shared else "packed rows" if self.packed else "padded rows"
        return f"attention {self.attention!r} over {rows}"


@dataclass(frozen=True)
class Change:
    """Change that the handshake makes to how rows are computed."""

    decoder: str
    """Name of the model class (the policy's) to which the change applies."""
    way: Way
    """How models of this class compute rows from now on."""


@dataclass(frozen=True)
class Greeting:
    """Rows that an engine has generated, prompt by prompt."""

    engine: str
    prompts: Sequence[Sequence[int]]
    """Token ids of each row's prompt; rows of the same prompt are neighbours."""
    responses: Sequence[np.ndarray]
    """Token ids of each row's response, [tokens] int32."""
    log_probs: Sequence[np.ndarray]
    """The engine's log-probs of each row's response, [tokens] float32, in nats, at temperature 1."""
    images: Sequence[tuple[bytes, ...]] = ()
    """The encoded images of each row's prompt; empty if no prompt has any."""


def prompts_of(plan: GreetingPlan, tokenizer: Any) -> list[list[int]]:
    """Return random prompts of the planned lengths, as token ids; special and added tokens are not used."""
    added = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
    plain = [token for token in range(min(plan.vocabulary, len(tokenizer))) if token not in added]
    generator = np.random.default_rng(plan.seed)
    return [generator.choice(plain, length).tolist() for length in plan.prompts]
