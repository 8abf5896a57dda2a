"""The teacher of a row, and the prompt that this teacher reads."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.teacher import FIELD_NAMES, TeacherConfig
from pipeline.errors import nearest


@dataclass(frozen=True)
class TeacherRows:
    """The teachers of a run, by the column that chooses among them."""

    by: str = "data_source"
    """Column that chooses."""
    by_value: Mapping[str, str] = field(default_factory=dict)
    """Name of the teacher by value of the column; empty if one teacher, whose name is empty, takes all rows."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """`teacher.prompt` of the teachers that have one, by name."""
    longest: Mapping[str, int] = field(default_factory=dict)
    """`teacher.max_token_len` by name: the maximum number of tokens in a row with the teacher's prompt."""

    @classmethod
    def of(cls, config: TeacherConfig) -> "TeacherRows":
        """Read the settings of teachers."""
        declared = {name or "": one for name, one in config.declared().items()}
        prompts = {name: one.prompt for name, one in declared.items() if one.prompt is not None}
        return cls(config.by, config.by_value(), prompts, {name: one.max_token_len for name, one in declared.items()})

    def name_of(self, data_source: str, agent_name: str | None, extra_info: Mapping[str, Any]) -> str:
        """Return the name of a row's teacher.

        Raises:
            ValueError: no teacher has the row's value of the column.
        """
        if not self.by_value:
            return ""
        columns = {"data_source": data_source, "agent_name": agent_name}
        value = columns[self.by] if self.by in columns else extra_info.get(self.by.partition(".")[2])
        name = self.by_value.get(value if isinstance(value, str) else json.dumps(value))
        if name is None:
            known = ", ".join(self.by_value)
            raise ValueError(
                f"`{self.by}` is {value!r:.80}, for which there is no teacher (teachers take {known})"
                f"{nearest(str(value), self.by_value)}; add it to the sources of one in teacher.named, or leave the "
                "row out"
            )
        return name

    def check(self, data_source: str, agent_name: str | None, extra_info: Any) -> str:
        """Check that a row has a teacher, and what the teacher's prompt reads; returns the teacher's name.

        Raises:
            ValueError: it has no teacher, or `extra_info` lacks a value that the teacher's prompt needs.
        """
        info = extra_info if isinstance(extra_info, Mapping) else {}
        teacher = self.name_of(data_source, agent_name, info)
        for name in FIELD_NAMES.findall(self.prompts.get(teacher, "")):
            key = name.partition(".")[2]
            if key and info.get(key) is None:
                raise ValueError(f"`extra_info.{key}` is missing, which the teacher's prompt reads")
        return teacher


def taught(template: str, messages: list[dict[str, Any]], ground_truth: Any, extra_info: Mapping[str, Any]) -> list:
    """Return the messages that a teacher reads: the last one has the text of `template`.

    Args:
        template: `teacher.prompt`.
        messages: the policy's prompt.
        ground_truth: the row's ground truth.
        extra_info: the row's `extra_info`.
    """
    last = messages[-1]
    values = {"prompt": last["content"], "ground_truth": ground_truth}

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        value = values[name] if name in values else extra_info[name.partition(".")[2]]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return [*messages[:-1], {**last, "content": FIELD_NAMES.sub(filled, template)}]
