"""Preference pairs to token rows."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from jobs.prepare import hh_rlhf
from pipeline.config.supervised import PreferenceDataConfig
from pipeline.supervised.data import find_row_groups, held_rows, read
from pipeline.supervised.preference_data import Encoder

ASK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2 + 2?"}]
GOOD = [{"role": "assistant", "content": "<answer> 4 </answer>"}]
BAD = [
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "5, I think."},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def encode(tokenizer: Any, rows: list[dict[str, Any]], **data: Any) -> list[dict[str, Any]]:
    encoder = Encoder(tokenizer, PreferenceDataConfig(**data))
    table = pa.Table.from_pylist(rows)
    assert encoder.problem(table.schema, encoder.data) is None
    table = table.select(encoder.columns(table.column_names))
    return encoder.encode(table, [f"f.parquet, row {row}" for row in range(len(rows))]).to_pylist()


def test_each_side_is_the_whole_conversation_without_an_opening_for_another_turn(tokenizer: Any) -> None:
    (row,) = encode(tokenizer, [{"prompt": ASK, "chosen": GOOD, "rejected": BAD, "extra": 1}])
    for name, side in (("chosen_ids", GOOD), ("rejected_ids", BAD)):
        assert row[name] == tokenizer.apply_chat_template([*ASK, *side])["input_ids"]
    assert tokenizer.decode(row["chosen_ids"]).endswith("</answer><|im_end|>\n")
    assert row["margin"] == 0


def test_whole_conversations_text_and_other_columns_give_the_same_tokens(tokenizer: Any) -> None:
    user = ASK[1:]
    want = encode(tokenizer, [{"prompt": user, "chosen": GOOD, "rejected": BAD}])
    whole = {"chosen": [*user, *GOOD], "rejected": [*user, *BAD]}
    assert encode(tokenizer, [whole]) == want
    # A prompt column beside whole conversations, as some data sets have it.
    assert encode(tokenizer, [{"prompt": user[0]["content"], **whole}], prompt_key=None) == want
    texts = {"question": user[0]["content"], "chosen": GOOD[0]["content"], "rejected": BAD}
    assert encode(tokenizer, [texts], prompt_key="question") == want
    other = {"prompt": user, "yes": GOOD, "no": BAD, "by": 2}
    (row,) = encode(tokenizer, [other], chosen_key="yes", rejected_key="no", margin_key="by")
    assert row == want[0] | {"margin": 2.0}


def test_template_arguments_reach_the_template(tokenizer: Any) -> None:
    template = tokenizer.chat_template
    tokenizer.chat_template = template + "{{ mood }}"
    try:
        (row,) = encode(
            tokenizer,
            [{"prompt": ASK, "chosen": GOOD, "rejected": BAD}],
            apply_chat_template_kwargs={"mood": "calm"},
        )
    finally:
        tokenizer.chat_template = template
    assert tokenizer.decode(row["chosen_ids"]).endswith("<|im_end|>\ncalm")


def test_long_pairs(tokenizer: Any) -> None:
    rows = [{"prompt": ASK, "chosen": GOOD, "rejected": side} for side in (BAD, GOOD)]
    whole = encode(tokenizer, rows)
    limit = len(whole[1]["chosen_ids"])
    assert len(whole[0]["rejected_ids"]) > limit
    left = encode(tokenizer, rows, max_length=limit, truncation="left")
    assert left[0]["rejected_ids"] == whole[0]["rejected_ids"][-limit:]
    assert left[0]["chosen_ids"] == whole[0]["chosen_ids"] and left[1] == whole[1]
    drop = encode(tokenizer, rows, max_length=limit, truncation="drop")
    assert drop[0]["chosen_ids"] == drop[0]["rejected_ids"] == [] and drop[1] == whole[1]
    with pytest.raises(
        ValueError,
        match=rf"f.parquet, row 0, column 'rejected': the conversation has .* more than data.max_length={limit}; raise",
    ):
        encode(tokenizer, rows, max_length=limit)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"chosen": None}, "column 'chosen': None is not a list of messages"),
        ({"rejected": []}, r"column 'rejected': \[\] is not a list of messages"),
        ({"prompt": None}, "column 'prompt': None is not a list of messages"),
        ({"chosen": [{"role": None, "content": "x"}]}, "column 'chosen': message 0 has no role"),
        ({"chosen": [{"role": "assistant", "content": None}]}, "column 'chosen': message 0 has no content"),
        ({"chosen": [*GOOD, *ASK[1:]]}, "column 'chosen': the last message is of role 'user', not the assistant's"),
        ({"rejected": [*ASK, *GOOD]}, "column 'rejected': the answer begins with .* 'system'; .* data.prompt_key=null"),
        ({"by": None}, "column 'by': the margin is None, not a finite number"),
        ({"by": float("inf")}, "column 'by': the margin is inf, not a finite number"),
    ],
)
def test_bad_rows_are_named(tokenizer: Any, change: dict[str, Any], sentence: str) -> None:
    good = {"prompt": ASK, "chosen": GOOD, "rejected": BAD, "by": 1.0}
    with pytest.raises(ValueError, match=f"^f.parquet, row 1, {sentence}"):
        encode(tokenizer, [good, good | change], margin_key="by")


def test_a_missing_prompt_and_a_failing_template_are_named(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="row 0, column 'chosen': the conversation begins with the assistant; .* name"):
        encode(tokenizer, [{"asked": ASK, "chosen": GOOD, "rejected": BAD}])
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ raise_exception('no') }}"
        with pytest.raises(ValueError, match="row 0, column 'chosen': the model's chat template fails"):
            encode(tokenizer, [{"prompt": ASK, "chosen": GOOD, "rejected": BAD}])
        tokenizer.chat_template = "{% if messages[-1]['content'] == '' %}{% else %}x{% endif %}"
        with pytest.raises(ValueError, match="row 0, column 'rejected': .* makes an empty text of the conversation"):
            encode(tokenizer, [{"prompt": ASK, "chosen": GOOD, "rejected": ""}])
    finally:
        tokenizer.chat_template = template


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (
            {"prompt": [ASK], "chosen": [GOOD]},
            "has no column 'rejected', but prompt, chosen; name it with data.rejected_key",
        ),
        ({"prompt": [ASK], "chosen": [1], "rejected": [GOOD]}, "has a column 'chosen' of type int64 where a list"),
        ({"prompt": [1], "chosen": [GOOD], "rejected": [GOOD]}, "has a column 'prompt' of type int64 where a list"),
        ({"chosen": ["a"], "rejected": ["b"]}, "has a column 'chosen' of text and none for the prompt, but chosen"),
        (
            {"chosen": [GOOD], "rejected": [GOOD]},
            "has no column 'by', but chosen, rejected; name it with data.margin_key",
        ),
        ({"chosen": [GOOD], "rejected": [GOOD], "by": ["1"]}, "has a column 'by' of type string where numbers"),
    ],
)
def test_files_that_lack_a_column_are_named(tmp_path: Path, columns: dict[str, Any], sentence: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    data = PreferenceDataConfig(margin_key="by")
    with pytest.raises(ValueError, match=f"data.val_files: .*a.parquet {sentence}"):
        find_row_groups(str(tmp_path), "data.val_files", lambda schema: Encoder.problem(schema, data))


def test_files_of_hh_rlhf_are_read_and_dealt_to_the_ranks(tmp_path: Path, tokenizer: Any) -> None:
    pairs = [{"prompt": ASK[1:], "chosen": GOOD, "rejected": [BAD[0] | {"content": "x" * i}]} for i in range(1, 8)]
    file = tmp_path / "rm_train.parquet"
    pq.write_table(pa.Table.from_pylist(pairs, schema=hh_rlhf.PAIRS), file, row_group_size=3)
    encoder = Encoder(tokenizer, PreferenceDataConfig())
    groups = find_row_groups(str(file), "data.train_files", lambda schema: encoder.problem(schema, encoder.data))
    assert [(group.first_row, group.rows) for group in groups] == [(0, 3), (3, 3), (6, 1)]
    whole = pa.concat_tables(table for group in groups for table in read(group, encoder, None)).to_pylist()
    assert [len(row["rejected_ids"]) for row in whole] == sorted(len(row["rejected_ids"]) for row in whole)
    shares = [held_rows(groups, encoder, 5, rank, 2) for rank in range(2)]
    assert [share.to_pylist() for share in shares if share is not None] == [whole[0:5:2], whole[1:5:2]]
    assert held_rows([], encoder, -1, 0, 1) is None
