"""The teacher stages: log-probs of response tokens under frozen teachers, and a teacher's most likely tokens.

Each pool of teachers is a stage. It fills the columns of the rows that its teachers take, and leaves the others to the
stages after it. The teachers of a pool are adapters on a common base, or there is only one.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipeline.config.data import DataConfig
from pipeline.config.learner import ActorConfig
from pipeline.config.model import ModelConfig
from pipeline.config.teacher import TeacherConfig
from pipeline.derived import scorer_key, scoring_model
from pipeline.models.tokenizer import load_tokenizer
from pipeline.prompts.chat import ChatTokenizer
from pipeline.rows import FLOATS, INTS, TEACHER, TEACHER_TOP, ragged
from pipeline.store.client import StoreClient
from pipeline.teachers import TeacherRows, taught

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.batch import TokenBatch
    from pipeline.models.packing import ModelInputs
    from pipeline.models.policy import Policy


class TeacherStage:
    """Stage that fills `teacher_log_probs`, and with a distillation loss `teacher_top_ids` and `teacher_top_log_probs`.

    Args:
        model: settings of the policy.
        name: name of the stage, a key of `derived.teachers`.
        pool: the teachers of the pool by name.
        rows: chooses the teacher of a row.
        data: the section `data`, for prompts of the teachers' own.
        actor: the section `actor`.
    """

    def __init__(
        self,
        model: ModelConfig,
        name: str,
        pool: Mapping[str, TeacherConfig],
        rows: TeacherRows,
        data: DataConfig,
        actor: ActorConfig,
    ) -> None:
        self._rows, self._pool = rows, pool
        self.top = actor.distill_top_k if actor.distill_coef else 0
        """Number of the teacher's most likely tokens that are wanted."""
        self._chat = ChatTokenizer(load_tokenizer(model), data) if rows.prompts else None

    def score(self, teacher: str, rows: "TokenBatch", into: list[np.ndarray]) -> None:
        """Compute the log-probs of N response tokens.

        Args:
            teacher: name of the teacher.
            rows: the rows, with the prompts that the teacher reads.
            into: arrays for the log-probs [N] and, if `top` is above 0, for ids and log-probs [N, top].
        """
        raise NotImplementedError

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return `table` with the columns of the rows that this pool's teachers take filled."""
        from pipeline.models.batch import TokenBatch

        chosen = _chosen(self._rows, table)
        for name in self._pool:
            mine = np.flatnonzero(chosen == name)
            part = table.take(mine)
            if name in self._rows.prompts and len(part):
                part = self._prompted(part, self._rows.prompts[name])
            table = merged(table, mine, self._columns(name, TokenBatch.from_table(part)))
        return table

    def _columns(self, name: str, rows: "TokenBatch") -> dict[str, pa.Array]:
        tokens, offsets, top = len(rows.response_ids), rows.row_offsets, self.top
        into = [np.zeros(tokens, np.float32)]
        if top:
            into += [np.zeros((tokens, top), np.int32), np.zeros((tokens, top), np.float32)]
        self.score(name, rows, into)
        columns = {TEACHER.names[0]: ragged(into[0], offsets, FLOATS)}
        for column, kind, values in zip(TEACHER_TOP.names, (INTS, FLOATS), into[1:], strict=False):
            columns[column] = ragged(values.reshape(-1), offsets * top, kind)
        return columns

    def _prompted(self, table: pa.Table, template: str) -> pa.Table:
        """Return `table` with the prompts that the teacher reads."""
        assert self._chat is not None
        columns = (table[name].to_pylist() for name in ("prompt", "ground_truth", "extra_info"))
        messages = [
            taught(template, json.loads(prompt), json.loads(truth), json.loads(info))
            for prompt, truth, info in zip(*columns, strict=True)
        ]
        ids = pa.array(self._chat.encode(messages, [0] * len(messages)), INTS)
        return table.set_column(table.column_names.index("prompt_ids"), table.schema.field("prompt_ids"), ids)


class Teacher(TeacherStage):
    """Stage whose teachers are models in replicas.

    Log-probs are at the sampling temperature of the rollout. `teacher_log_probs` are renormalised over the tokens'
    supports.

    Args, in addition to the arguments of `TeacherStage`:
        scorer: settings of the pool.
        temperature: sampling temperature.
        longest: maximum number of tokens in a row of the policy; None for the model's own limit.
        store, patience: as in `Replica`.

    Raises:
        ValueError: a model cannot be loaded, or its vocabulary has another size than the policy's.
    """

    def __init__(
        self,
        model: ModelConfig,
        scorer: TeacherConfig,
        name: str,
        pool: Mapping[str, TeacherConfig],
        rows: TeacherRows,
        data: DataConfig,
        actor: ActorConfig,
        temperature: float,
        longest: int | None = None,
        store: StoreClient | None = None,
        patience: float = 0.0,
    ) -> None:
        # Only the process of the stage needs torch; others import this module to plan the stream.
        from pipeline.models.policy import load_frozen
        from pipeline.scoring.replica import Replica

        super().__init__(model, name, pool, rows, data, actor)
        self._options: dict[str, Any] = {"temperature": temperature, "chunk_tokens": actor.logits_chunk_tokens}
        frozen, key = scoring_model(model, scorer, actor.fsdp, scorer.path), f"{scorer_key(name)}.path"
        longer = None if any(one.prompt for one in pool.values()) else longest
        adapters = {each: one.adapter for each, one in pool.items() if one.adapter}
        self._adapted: Any = None

        def load() -> "Policy":
            policy = load_frozen(frozen, model, longest=longer, key=key)
            self._adapted = _with_adapters(policy, adapters)
            return policy

        self._replica = Replica(load, scorer, name, model.share_prompts, store, patience)

    def score(self, teacher: str, rows: "TokenBatch", into: list[np.ndarray]) -> None:
        """See `TeacherStage.score`."""
        if self._adapted is not None:
            self._adapted.set_adapter(_ADAPTER.format(teacher))
        self._replica.fill(rows, self._forward, into)

    def _forward(self, policy: "Policy", batch: "ModelInputs") -> "Sequence[Tensor]":
        found = policy(**batch.arguments, **self._options, top=self.top)
        return [found.log_probs, *(found.top or ())]


_ADAPTER = "teacher_{}"


def _with_adapters(policy: "Policy", paths: Mapping[str, str]) -> Any:
    """Load the adapters of a pool into the model, in place; a single one is merged.

    Returns the model of peft that can switch them; None if there is nothing to switch.
    """
    if not paths:
        return None
    from peft import PeftModel

    (first, path), *others = paths.items()
    adapted = PeftModel.from_pretrained(policy.lm, path, adapter_name=_ADAPTER.format(first))
    if not others:
        adapted.merge_and_unload()
        return None
    for name, path in others:
        adapted.load_adapter(path, adapter_name=_ADAPTER.format(name))
    return adapted


def _chosen(rows: TeacherRows, table: pa.Table) -> np.ndarray:
    """[R] object, name of each row's teacher."""
    if not rows.by_value:
        return np.full(len(table), "", dtype=object)
    columns = (table[name].to_pylist() for name in ("data_source", "agent_name", "extra_info"))
    names = [rows.name_of(source, agent, json.loads(info)) for source, agent, info in zip(*columns, strict=True)]
    return np.array(names, dtype=object)


def merged(table: pa.Table, places: np.ndarray, columns: Mapping[str, pa.Array]) -> pa.Table:
    """Return `table` with `columns`, which have an entry for each of the rows `places`; other rows keep theirs, or get
    null."""
    order = np.arange(len(table))
    order[places] = len(table) + np.arange(len(places))
    for name, values in columns.items():
        there = name in table.column_names
        before = table[name].combine_chunks() if there else pa.nulls(len(table), values.type)
        column = pa.concat_arrays([before, values]).take(pa.array(order))
        if there:
            table = table.set_column(table.column_names.index(name), name, column)
        else:
            table = table.append_column(name, column)
    return table
