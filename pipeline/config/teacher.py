"""Settings of teachers: models whose log-probs the policy learns from (`teacher.*`)."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.bounds import setting
from pipeline.config.scoring import REPLICAS, TRAIN_WORKERS, ScorerConfig

OWN = ("sources",)
"""Keys that a named teacher does not inherit from the section `teacher`."""
FIELD_NAMES = re.compile(r"\{(prompt|ground_truth|extra_info\.\w+)\}")
"""Placeholders of `teacher.prompt`."""


@dataclass
class TeacherConfig(ScorerConfig):
    """Teacher of the policy: a frozen model that gives the log-probs of the policy's tokens
    ([algorithms.md](algorithms.md#teachers))."""

    path: str | None = setting(None, path="model")
    """Hugging Face model with the policy's vocabulary: a folder or a hub name."""

    adapter: str | None = setting(None, path="model")
    """PEFT adapter on `path`: a folder. It is merged when the teacher is loaded."""

    url: str | None = None
    """Server with OpenAI's completions API in place of `path`, up to and with `/v1`. It must return `prompt_logprobs`
    for token ids, as vLLM's does."""

    served_model: str | None = None
    """Name of the model on the server `url`. Null takes the first model that the server lists."""

    api_key_env: str | None = None
    """Environment variable that holds the key of the server `url`."""

    timeout_s: float = setting(120.0, above=0)
    """Time limit of one request to the server `url`, in seconds."""

    placement: str = setting(REPLICAS, choices=(REPLICAS, TRAIN_WORKERS))
    """Processes that run the teacher. `replicas`: Ray actors, each with a whole model, which score rows before
    advantages are computed. `train_workers`: one model, sharded like the policy; for a single teacher."""

    offload: bool = False
    """With `placement=train_workers`: keep the sharded model in host memory, and copy each layer to the GPU when it is
    used."""

    prompt: str | None = None
    """Text that the teacher reads in place of the last message of the prompt. `{prompt}` stands for that message,
    `{ground_truth}` for the ground truth, and `{extra_info.NAME}` for a value in `extra_info`. Null: the policy's own
    prompt."""

    by: str = "data_source"
    """Column that chooses among named teachers: `data_source`, `agent_name`, or `extra_info.NAME`."""

    sources: list[str] = field(default_factory=list)
    """Values of the column `by` for which a named teacher is chosen. Empty: the teacher's name."""

    named: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Named teachers: `teacher.named.NAME.KEY=value`, with the keys of this section but `by`. A key that a named
    teacher does not set has the value in this section."""

    def declared(self) -> "dict[str | None, TeacherConfig]":
        """Return the settings of each teacher by name; None is the name of a single teacher. Empty without a
        teacher."""
        if not self.named:
            return {None: self} if self.path or self.url else {}
        default = TeacherConfig()
        plain = replace(self, named={}, **{key: getattr(default, key) for key in OWN})
        return {name: replace(plain, **given) for name, given in self.named.items()}

    def by_value(self) -> dict[str, str]:
        """Return the name of the teacher by value of the column `by`. Empty for a single teacher."""
        return {value: name for name, one in self.declared().items() if name for value in one.sources or [name]}

    def problems(self) -> dict[str, object]:
        """Return sentences on settings of teachers that exclude each other, each with a true value if it applies."""
        columns = self.by in ("data_source", "agent_name") or self.by.startswith("extra_info.")
        values = [value for name, one in self.declared().items() if name for value in one.sources or [name]]
        twice = sorted({value for value in values if values.count(value) > 1})
        table: dict[str, object] = {
            "{teacher.by} cannot choose a teacher; it is data_source, agent_name or extra_info.NAME": not columns,
            f"teacher.named: {', '.join(twice)} is a source of two teachers; leave it out of one": twice,
            "{teacher.sources} without teacher.named: one teacher takes all rows; leave it out, or name the teacher": (
                self.sources and not self.named
            ),
        }
        for name, one in self.declared().items():
            key = "teacher" if name is None else f"teacher.named.{name}"
            table |= {
                f"{key}.path and {key}.url are two teachers in one; leave one of them out": one.path and one.url,
                f"{key} has neither a path nor a url; set one of them": not (one.path or one.url),
                f"{key}.adapter needs {key}.path, the model that it belongs to": one.adapter and not one.path,
                f"{key}.placement={TRAIN_WORKERS} with {key}.url: a server runs its model itself; leave the placement "
                "out": one.url and one.placement == TRAIN_WORKERS,
                f"{key}.placement={TRAIN_WORKERS} with several teachers: train workers hold only one; set "
                f"placement={REPLICAS}": name is not None and one.placement == TRAIN_WORKERS,
                f"{key}.placement={TRAIN_WORKERS} with {key}.prompt: train workers have the policy's prompt only; set "
                f"placement={REPLICAS}": one.prompt is not None and one.placement == TRAIN_WORKERS,
                f"{key}.placement={TRAIN_WORKERS} with {key}.adapter: train workers hold no adapter of a teacher; "
                f"merge it into a model, or set placement={REPLICAS}": (
                    one.adapter is not None and one.placement == TRAIN_WORKERS
                ),
                f"{key}.offload=true needs {key}.placement={TRAIN_WORKERS}": (
                    one.offload and one.placement != TRAIN_WORKERS
                ),
                f"{key}.prompt has none of {{prompt}}, {{ground_truth}} and {{extra_info.NAME}}, so all rows would "
                "have one prompt; write one of them into it": (
                    one.prompt is not None and not FIELD_NAMES.search(one.prompt)
                ),
            }
        return table
