"""`slipstream.json` in the folder of an exported model: prompt and sampling settings for serving it as the run did.

Nothing in the file can make its reader load code or other files: `trust_remote_code` and engine arguments come only
from a run's `config.yaml` or from the command line.
"""

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import Config

FILE = "slipstream.json"


@dataclass(frozen=True)
class ModelSettings:
    """Settings with which a run validated its model."""

    run: str
    """`trainer.experiment_name` of the run."""
    iteration: int
    """Number of training iterations after which the weights were saved."""
    max_prompt_length: int
    """Maximum prompt length, in tokens."""
    max_response_length: int
    """Maximum response length, in tokens."""
    dtype: str
    """Type in which the engine computed, such as `bfloat16`."""
    enforce_eager: bool
    """True if the engine ran without compiled graphs; compiled graphs round differently."""
    temperature: float
    """Sampling temperature in validation; 0 is greedy."""
    top_p: float
    """`top_p` in validation."""
    top_k: int
    """`top_k` in validation; -1 is all tokens."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template (`data.apply_chat_template_kwargs`)."""
    tool_parser: str = "none"
    """`agent.parser` of a run with multi-turn episodes; else `none`."""
    reasoning_parser: str = "none"
    """`agent.reasoning_parser` of a run with multi-turn episodes; else `none`."""

    @classmethod
    def of(cls, config: Config, iteration: int) -> "ModelSettings":
        """Take the settings from the configuration of a run, for the weights after `iteration` iterations."""
        sampling, rollout = config.rollout.val_kwargs, config.rollout
        playing = next((agent for agent in config.agent.agents().values() if agent.plays), None)
        return cls(
            run=config.trainer.experiment_name,
            iteration=iteration,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
            dtype=rollout.dtype,
            enforce_eager=rollout.enforce_eager,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            chat_template_kwargs=dict(config.data.apply_chat_template_kwargs),
            tool_parser="none" if playing is None else playing.parser,
            reasoning_parser="none" if playing is None else playing.reasoning_parser,
        )

    def save(self, folder: Path) -> None:
        """Write `slipstream.json` into the folder of a model."""
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")


def load_settings(folder: Path) -> ModelSettings | None:
    """Read `slipstream.json` in the folder of a model; None if it is missing. Raises ValueError if it is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        settings = ModelSettings(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); export the model again, or remove the file") from error
    for item in dataclasses.fields(ModelSettings):
        value = getattr(settings, item.name)
        kind = typing.get_origin(item.type) or item.type
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{path}: {item.name} is {value!r}; export the model again, or remove the file")
    return settings
