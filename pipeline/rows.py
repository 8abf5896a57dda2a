"""Columns of a row, which is one trajectory in an Arrow table, and functions that read them.

Every stage takes a `pyarrow.Table` of rows and returns a table with the same rows in the same order and further columns
(only rollout turns each prompt into `n` rows). `SCHEMA` lists all columns, with the stage that writes each and the
stages that read it. Tables can be written to parquet as they are.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import arrow_serializer as blocks

# A worker imports this module with the first stage that it runs.
blocks.register()

INTS = pa.list_(pa.int32())
FLOATS = pa.list_(pa.float32())
RUNS = pa.list_(pa.struct([("version", pa.int64()), ("tokens", pa.int32())]))
"""Run lengths: policy versions in the order of the tokens, each with the number of tokens that it generated."""


SPANS = pa.list_(pa.struct([("kind", pa.int8()), ("tokens", pa.int32()), ("reward", pa.float32())]))
"""Spans of an episode's response, in order: the kind (`ANSWER`: a turn of the policy, `OBSERVATION`: a reply of tools
or the environment), the number of tokens, and the reward of a turn (null without a reward)."""
ANSWER, OBSERVATION = 1, 0

CONTEXTS = pa.list_(pa.struct([("prompt", INTS), ("tokens", pa.int32())]))
"""Token sequences of an episode, in order: the prompt tokens of each, and the number of tokens of the row's response
that follow this prompt. The prompt of the first sequence is in `prompt_ids`, and null here."""

UNKNOWN = -(2**31)
"""Entry of `support_sizes` for a token whose support was too large to be written (`rollout.max_support`)."""

ROUTES = pa.large_list(pa.int16())
"""Experts of the tokens of a row, layer after layer: all contexts, each with its prompt, token after token."""
UNROUTED = -1
"""Entry of `routes` for a token that no engine passed through the model, such as the last one of a response."""

BINARIES = pa.list_(pa.binary())

_TYPES = {
    "ints": INTS,
    "binaries": BINARIES,
    "floats": FLOATS,
    "runs": RUNS,
    "mask": pa.list_(pa.int8()),
    "routes": ROUTES,
    "spans": SPANS,
    "contexts": CONTEXTS,
}


def _columns(table: str) -> pa.Schema:
    """Convert text with lines `name | type | writer | readers | what` to a schema."""
    fields = []
    for line in table.strip().splitlines():
        name, kind, writer, readers, what = line.split(" | ")
        metadata = {"writer": writer, "readers": readers, "what": what}
        fields.append(pa.field(name, _TYPES.get(kind) or pa.type_for_alias(kind), metadata=metadata))
    return pa.schema(fields)


PROMPT = _columns("""
split | string | prompts | all | `train`, `val`, or `baseline` (a greedy response for a baseline, until it is scored)
chunk | int64 | prompts | rollout, filter, track | chunk that was admitted, from 0; -1 for val
iteration | int64 | prompts, filter | all | iteration that trains the row (null before the filter); val: policy version
uid | string | prompts | advantage | group: the same for all samples of one prompt visit
epoch | int64 | prompts | resume | pass over the data, from 0
offset | int64 | prompts | resume | place in the epoch's order, filtered rows counted
prompt_index | int64 | prompts | sampler | number of the prompt in all training files, from 0; -1 if generated
data_source | string | prompts | reward, metrics | chooses the reward rule
prompt | string | prompts | track | chat messages as JSON
prompt_ids | ints | prompts | rollout, train | prompt tokens after the chat template
ground_truth | string | prompts | reward | `reward_model.ground_truth` as JSON
extra_info | string | prompts | reward | `extra_info` as JSON
agent_name | string | prompts | rollout, reward | the row's agent in `agent.named`; null: the section `agent`
""")

IMAGES = _columns("""
images | binaries | prompts, rollout | rollout, train | encoded images of the prompt and of observations, in order
image_hash | binaries | prompts, rollout | rollout, train | hash of each image with the processor's settings (16 bytes)
engine_prompt_ids | ints | prompts | rollout | `prompt_ids` with one placeholder for each image
""")
"""Columns of a run with images (`model.vision`). `prompt_ids` hold one placeholder for each feature of an image."""


def images_once(table: pa.Table) -> pa.Table:
    """Return `table` with null for images that the first row of the group has, too.

    Rows of a group (`uid`) must be neighbours. A table without the columns `IMAGES` is returned as it is.
    """
    if "images" not in table.column_names:
        return table
    uids, column = table["uid"].to_pylist(), table.schema.get_field_index("images")
    hashes, first, repeated = table["image_hash"].to_pylist(), 0, []
    for number, uid in enumerate(uids):
        first = first if uid == uids[first] else number
        repeated.append(number > first and hashes[number] == hashes[first])
    once = pc.if_else(pa.array(repeated, pa.bool_()), pa.scalar(None, BINARIES), table["images"].combine_chunks())
    return table.set_column(column, table.schema.field(column), once)


def prompt_columns(images: bool) -> pa.Schema:
    """Return the columns of prompts, in a run with or without images."""
    return pa.schema([*PROMPT, *IMAGES]) if images else PROMPT


ROLLOUT = _columns("""
sample | int32 | rollout | track | number of the sample in its group, from 0
response_ids | ints | rollout | reward, train | generated tokens, end-of-sequence included
response_mask | mask | rollout | advantage, train | 1 if the policy wrote the token, else 0 (tools, environments)
rollout_log_probs | floats | rollout | train | log-prob the engine sampled each token with
support | ints | rollout | reference, policy, train | ids that each token was sampled from, or ids left out
support_sizes | ints | rollout | reference, policy, train | per token: n ids; -n: n ids left out; 0: none left out
routes | routes | rollout | train | experts of each token of prompts and response; null without `rollout.replay_routes`
response | string | rollout | reward, track | decoded response, special tokens left out
finish_reason | string | rollout | metrics | `stop`, `length`, or `abort`
policy_version | int64 | rollout | train | oldest version that generated a token of the row; of most rows the only one
version_runs | runs | rollout | metrics | the version of each token, as run lengths
engine | string | rollout | metrics | which engine: node and process
generate_s | float32 | rollout | metrics | seconds from loaded weights to the last token
load_s | float32 | rollout | metrics | seconds from admission to loaded weights
""")

AGENT = _columns("""
contexts | contexts | rollout | reference, value, policy, train | sequences of the response; null or empty if it is one
spans | spans | rollout | reward, advantage, track | answers and observations of the response, with the answers' rewards
messages | string | rollout | reward_model, reward, track | conversations as JSON: role, content, calls (`forms.py`)
env_score | float32 | rollout | reward | sum of the environment's rewards; 0 if it failed
env_parts | string | rollout | reward | further numbers of the environment, as JSON
env_error | string | rollout | reward | why the environment failed, else null
turns | int32 | rollout | metrics | answers of the policy
ended | string | rollout | metrics | why it ended: `done`, `stop`, `turns`, `length`, `timeout`, `malformed`, `error`
episode | string | rollout | metrics | numbers of the episode as JSON: calls by tool, malformed calls, seconds
""")
"""Columns of episodes (`agent.*`). The response tokens of an episode are all tokens after the first prompt, with
observations; the column `response` is only the text of the last turn."""

REWARD_MODEL = _columns("""
rm_score | float32 | reward_model | reward | the reward model's number, null if it failed
rm_error | string | reward_model | reward | why the reward model failed, else null
""")
"""Columns of a run with a reward model."""

REWARD = _columns("""
score | float32 | reward | advantage, metrics | sum of rule, functions and reward model, shaped; 0 if one failed
reward_parts | string | reward | track | further numbers of the reward function, as JSON
reward_error | string | reward | advantage, train, metrics | why the reward failed, else null
reward_s | float32 | reward | metrics | seconds spent on the chunk's rewards
""")

BASELINE = _columns("""
baseline | float32 | baseline | advantage | score of the prompt's greedy response, null if failed
""")
"""Columns of a run whose estimator reads baselines."""

REFERENCE = _columns("""
ref_log_probs | floats | reference | advantage, train | log-prob of each token under the reference
""")
"""Columns of a run with a KL in reward or loss."""

TEACHER = _columns("""
teacher_log_probs | floats | teacher | advantage | log-prob of each token under the row's teacher
""")
"""Columns of a run with teachers."""

TEACHER_TOP = _columns("""
teacher_top_ids | ints | teacher | train | the teacher's k most likely tokens at each response token, token after token
teacher_top_log_probs | floats | teacher | train | log-prob of each of them
""")
"""Columns of a run with a distillation loss (`actor.distill_coef`)."""

VALUE = _columns("""
values | floats | value | advantage, train | the critic's value before each response token
value_version | int64 | value | metrics | version of the critic that gave the values
""")
"""Columns of a run with a critic."""

POLICY = _columns("""
sum_pi_squared | floats | policy | advantage | sum over the vocabulary of squared probabilities, per token
pi_version | int64 | policy | metrics | version of the policy that gave sum_pi_squared
""")
"""Columns of a run whose estimator reads sum_pi_squared."""

KL_COEF = _columns("""
kl_coef | float32 | advantage | metrics | coefficient of the KL in the reward at that version
""")
"""Columns of a run with a KL in the reward."""

ADVANTAGE = _columns("""
advantages | floats | advantage | train | one per response token, 0 if the token does not train
returns | floats | advantage | train | one per response token
reward | float32 | advantage | metrics | the score less the KL penalties of its tokens
kl | float32 | advantage | train, metrics | mean KL of the penalised tokens, null without
drop_reason | string | advantage | train, metrics | why the row does not train (`reward_error`), null in rows that train
""")
SCHEMA = pa.schema(
    [
        *PROMPT,
        *IMAGES,
        *ROLLOUT,
        *AGENT,
        *REWARD_MODEL,
        *REWARD,
        *BASELINE,
        *REFERENCE,
        *TEACHER,
        *TEACHER_TOP,
        *VALUE,
        *POLICY,
        *KL_COEF,
        *ADVANTAGE,
    ]
)


def append(table: pa.Table, columns: pa.Schema, values: dict) -> pa.Table:
    """Return `table` with `columns` added. `values` holds an Arrow array or a list, with one entry per row, by name.

    Raises:
        ValueError: a column is missing from `values`, or has another length than the table.
    """
    for field in columns:
        if field.name not in values:
            raise ValueError(f"column {field.name!r} is missing")
        column = values[field.name]
        if not isinstance(column, (pa.Array, pa.ChunkedArray)):
            column = pa.array(column, type=field.type)
        if len(column) != len(table):
            raise ValueError(f"column {field.name!r} has {len(column)} rows, but the table has {len(table)}")
        table = table.append_column(pa.field(field.name, field.type), column.cast(field.type))
    return table


def without_rows(table: pa.Table, columns: pa.Schema) -> pa.Table:
    """Return an empty table with the columns of `table` and `columns`, for a stage that returns no rows."""
    return append(table.slice(0, 0), columns, {name: [] for name in columns.names})


def flat(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a list column as numpy: (values [N], one row after the other; offsets [R + 1] of the rows in them).

    Raises:
        ValueError: a row of the column is null.
    """
    array = table[name].combine_chunks()
    if array.null_count:
        row = array.is_null().to_pylist().index(True)
        raise ValueError(f"column {name!r} is null in row {row}; an empty list is wanted there")
    offsets = np.zeros(len(array) + 1, dtype=np.int64)
    np.cumsum(pc.list_value_length(array).to_numpy(zero_copy_only=False), out=offsets[1:])
    return array.flatten().to_numpy(zero_copy_only=False), offsets


def token_lists(table: pa.Table, name: str) -> list[list[int]]:
    """Return a column of token ids as Python lists, which engines need."""
    values, offsets = flat(table, name)
    ids, ends = values.tolist(), offsets.tolist()
    return [ids[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]


def per_token(table: pa.Table, name: str, offsets: np.ndarray) -> np.ndarray:
    """Return the values [N] of the list column `name`, which has one entry per response token.

    Args:
        table: R rows.
        name: the column.
        offsets: [R + 1] offsets of the responses, from `flat`.

    Raises:
        ValueError: a row does not have one entry per response token.
    """
    values, found = flat(table, name)
    if not np.array_equal(found, offsets):
        counts, lengths = np.diff(found), np.diff(offsets)
        row = int(np.flatnonzero(counts != lengths)[0])
        raise ValueError(
            f"a row of uid {table['uid'][row].as_py()} has {counts[row]} entries in {name!r} but {lengths[row]} "
            "response tokens; there must be one entry per response token"
        )
    return values


def prompt_tokens(table: pa.Table) -> int:
    """Return the number of prompt tokens in the table, with the prompts of further sequences of episodes."""
    tokens = len(flat(table, "prompt_ids")[0])
    if "contexts" in table.column_names:
        prompts = table["contexts"].combine_chunks().flatten().field("prompt")
        tokens += pc.sum(pc.list_value_length(prompts)).as_py() or 0
    return tokens


def policy_tokens(table: pa.Table) -> np.ndarray:
    """Return [R] int64: the number of response tokens in each row that the policy generated, without tokens of tools
    and environments."""
    mask, offsets = flat(table, "response_mask")
    return np.diff(np.concatenate([[0], np.cumsum(mask > 0)])[offsets])


def loss_mask(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the mask of response tokens that are trained on: `response_mask`, but 0 in rows with a `drop_reason`.

    Returns:
        (mask [N], one row after the other; offsets [R + 1] of the rows in it), as from `flat`.
    """
    mask, offsets = flat(table, "response_mask")
    if "drop_reason" not in table.column_names:
        return mask, offsets
    trains = pc.is_null(table["drop_reason"]).to_numpy()
    return np.where(np.repeat(trains, np.diff(offsets)), mask, 0), offsets


def ragged(values: np.ndarray, offsets: np.ndarray, type: pa.DataType) -> pa.Array:
    """Build a list column of the type `type` from values [N] and offsets [R + 1]; the inverse of `flat`."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, type.value_type))


def version_runs(versions: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> pa.Array:
    """Build the column `version_runs` of R rows.

    Args:
        versions: [K] policy version of each run of tokens, row after row.
        tokens: [K] number of tokens in each run.
        offsets: [R + 1] index of the first run of each row, and K at the end.
    """
    kind = RUNS.value_type
    arrays = [pa.array(versions, kind.field("version").type), pa.array(tokens, kind.field("tokens").type)]
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.StructArray.from_arrays(arrays, names=["version", "tokens"])
    )


def token_versions(table: pa.Table) -> np.ndarray:
    """Return [N] int64: the policy version that generated each response token, row after row."""
    runs = table["version_runs"].combine_chunks().flatten()
    return np.repeat(runs.field("version").to_numpy(), runs.field("tokens").to_numpy())


class Spans(NamedTuple):
    """The K spans of R episodes, row after row: turns of the policy, and observations (replies of tools or
    environment)."""

    answer: np.ndarray
    """[K] bool, True for turns of the policy, False for observations."""
    row: np.ndarray
    """[K] int64, number of the span's row in the table."""
    turn: np.ndarray
    """[K] int64, number of the turn in its row, from 0; -1 for observations."""
    tokens: np.ndarray
    """[K + 1] int64, offset of the first token of each span, and the total number of tokens at the end."""
    reward: np.ndarray
    """[K] float64, reward of the turn, NaN without a reward."""


def spans_of(table: pa.Table, offsets: np.ndarray) -> Spans:
    """Read the column `spans`. `offsets` [R + 1] are the offsets of the responses, from `flat`.

    Raises:
        ValueError: the spans of a row are null, or have more or fewer tokens than its response.
    """
    column = table["spans"].combine_chunks()
    if column.null_count:
        raise ValueError("column 'spans' is null in a row; an empty list is wanted there")
    spans = column.flatten()
    counts = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    row = np.repeat(np.arange(len(table)), counts)
    tokens = spans.field("tokens").to_numpy().astype(np.int64)
    lengths, found = np.diff(offsets), np.bincount(row, tokens, len(table)).astype(np.int64)
    if not np.array_equal(found, lengths):
        wrong = int(np.flatnonzero(found != lengths)[0])
        raise ValueError(
            f"the spans of a row of uid {table['uid'][wrong].as_py()} have {found[wrong]} tokens, and its response has "
            f"{lengths[wrong]}; the rollout stage must write a span for every token"
        )
    answer = spans.field("kind").to_numpy() == ANSWER
    before = np.cumsum(answer) - answer
    first = np.cumsum(counts) - counts  # number of the first span of each row
    turn = before - np.append(before, 0)[first][row]
    reward = spans.field("reward").to_numpy(zero_copy_only=False).astype(np.float64)
    return Spans(answer, row, np.where(answer, turn, -1), np.concatenate([[0], np.cumsum(tokens)]), reward)
