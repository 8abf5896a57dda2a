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

    @classmethod
    def of(cls, config: TeacherConfig) -> "TeacherRows":
        """Read the settings of teachers."""
        prompts = {name or "": one.prompt for name, one in config.declared().items() if one.prompt is not None}
        return cls(config.by, config.by_value(), prompts)

    def name_of(self, data_source: str, agent_name: str | None, extra_info: Mapping[str, Any]) -> str:
        """Return the name of a row's teacher.

        Raises:
            ValueError: no teacher has the row's value of the column.
        """
        if not self.by_value:
            return ""
        columns = {"data_source": data_source, "agent_name": agent_name}
        value = columns[self.by] if self.by in columns else extra_info.get(self.by.partition(".")[2])
        if value not in self.by_value:
            known = ", ".join(self.by_value)
            raise ValueError(
                f"`{self.by}` is {value!r:.80}, for which there is no teacher (teachers take {known})"
                f"{nearest(str(value), self.by_value)}; add it to the sources of one in teacher.named, or leave the "
                "row out"
            )
        return self.by_value[str(value)]

    def check(self, data_source: str, agent_name: str | None, extra_info: Any) -> None:
        """Check that a row has a teacher, and what the teacher's prompt reads.

        Raises:
            ValueError: it has no teacher, or `extra_info` lacks a value that the teacher's prompt needs.
        """
        info = extra_info if isinstance(extra_info, Mapping) else {}
        template = self.prompts.get(self.name_of(data_source, agent_name, info), "")
        for name in FIELD_NAMES.findall(template):
            key = name.partition(".")[2]
            if key and info.get(key) is None:
                raise ValueError(f"`extra_info.{key}` is missing, which the teacher's prompt reads")


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
