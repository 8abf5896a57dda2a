"""`slipstream.json` of an exported model: the prompt and sampling settings of its run, for serving it the same way.

Nothing in the file makes a reader load code or other files: `trust_remote_code` and engine arguments come from a run's
`config.yaml` or the command line.
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
    """`trainer.experiment_name`."""
    iteration: int
    """Iterations of training that led to the weights."""
    max_prompt_length: int
    """Longest prompt in tokens."""
    max_response_length: int
    """Most tokens of a response."""
    dtype: str
    """Type that the engine computed in."""
    enforce_eager: bool
    """True if the engine ran without compiled graphs, whose rounding differs."""
    temperature: float
    """Temperature of validation; 0 is greedy."""
    top_p: float
    """`top_p` of validation."""
    top_k: int
    """`top_k` of validation; -1 is all tokens."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template."""
    tool_parser: str = "none"
    """`agent.parser` of a run with episodes."""
    reasoning_parser: str = "none"
    """`agent.reasoning_parser` of such a run."""

    @classmethod
    def of(cls, config: Config, iteration: int) -> "ModelSettings":
        """Return the settings of a run for the model of `iteration`."""
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
        """Write the settings into a model's folder."""
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")


def load_settings(folder: Path) -> ModelSettings | None:
    """Read the settings in a model's folder; None if it has none. Raises ValueError if the file is damaged."""
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
