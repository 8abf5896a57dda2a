import datetime
import decimal
import json

import numpy as np
import pytest

from pipeline.config import Config
from pipeline.config.data import DataConfig
from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.encode import COLUMNS, Prompt, PromptEncoder, to_json, to_table
from pipeline.prompts.parquet import Place
from pipeline.prompts.quarantine import Quarantine
from pipeline.sampling import row_limits

PLACE = Place("f.parquet", 2, 17)


@pytest.fixture
def encoder_of(tokenizer):
    def make(limit=0, **data):
        return PromptEncoder(ChatTokenizer(tokenizer, DataConfig(**data)), Quarantine(limit))

    return make


def prompts(*rows):
    return [Prompt(f"0-{i}", 0, i, PLACE._replace(row=i), i, row) for i, row in enumerate(rows)]


BAD = [
    ({"prompt": None}, "None is not a list of messages"),
    ({"prompt": [{"role": "alien", "content": "x"}]}, "the model's chat template fails"),
    ({"prompt": [{"role": "user", "content": "x" * 99}]}, "tokens long, more than data.max_prompt_length=40"),
    ({"data_source": None}, "`data_source` is null; every row needs one"),
    ({"data_source": 5}, "`data_source` is 5 instead of text"),
    ({"reward_model": "42"}, "`reward_model` is '42' instead of an object with `ground_truth`"),
    ({"reward_model": {"style": "rule"}}, "instead of an object with `ground_truth`"),
    ({"extra_info": {"image": b"x"}}, "column 'extra_info' cannot be written as JSON"),
    ({"images": [{"bytes": b"x"}]}, "column `images` has content, and only text can be trained"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "has a part of type 'image'; only text"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_an_unusable_row_ends_the_run_with_its_place(encoder_of, prompt_row, change, message):
    with pytest.raises(ValueError) as error:
        encoder_of(max_prompt_length=40)(prompts(prompt_row(0), prompt_row(1, **change)))
    assert str(error.value).startswith("f.parquet, row 1 (row group 2)") and message in str(error.value)


def test_unusable_rows_are_left_out_of_those_that_come_together(encoder_of, prompt_row):
    good = [prompt_row(i) for i in range(len(BAD) + 1)]
    mixed = [row for i, (change, _) in enumerate(BAD) for row in (good[i], prompt_row(50, **change))] + good[-1:]
    encoder = encoder_of(len(BAD), max_prompt_length=40)
    rows = encoder(prompts(*mixed))
    assert [row["offset"] for row in rows] == [*range(0, 2 * len(good), 2)]
    assert encoder.quarantine.count == len(BAD)
    assert to_table(rows).schema == COLUMNS
    alone = [encoder(prompts(row))[0]["prompt_ids"] for row in good]
    assert [row["prompt_ids"] for row in rows] == alone


def test_a_row_that_asks_for_what_cannot_be_sampled_ends_the_run_with_its_place(tokenizer, prompt_row):
    config = Config()
    config.data.max_response_length = 32
    asked = prompt_row(1, extra_info={"sampling_params": {"max_tokens": 33}})
    for limits in row_limits(config).values():
        encoder = PromptEncoder(ChatTokenizer(tokenizer, config.data), Quarantine(0), limits)
        with pytest.raises(ValueError) as error:
            encoder(prompts(prompt_row(0), asked))
        assert str(error.value).startswith("f.parquet, row 1 (row group 2)")
        assert "`extra_info.sampling_params.max_tokens` is 33, above data.max_response_length=32" in str(error.value)
    asked = prompt_row(1, extra_info={"sampling_params": {"max_tokens": 32, "stop": None}})
    (row,) = encoder(prompts(asked))
    assert json.loads(row["extra_info"]) == {"sampling_params": {"max_tokens": 32, "stop": None}}


def test_a_row_chooses_one_of_the_agents(tokenizer, prompt_row):
    config = Config()
    config.agent.named = {"calc": {"tools": ["a:b"]}}
    encoder = PromptEncoder(ChatTokenizer(tokenizer, config.data), Quarantine(0), row_limits(config)["train"])
    names = ["calc", None, "tool_agent", "single_turn_agent"]
    rows = encoder(prompts(*(prompt_row(0, agent_name=name) for name in names), prompt_row(0)))
    assert to_table(rows)["agent_name"].to_pylist() == [*names, None]
    for wrong in ("game", "", 5):
        with pytest.raises(ValueError) as error:
            encoder(prompts(prompt_row(0), prompt_row(1, agent_name=wrong)))
        assert str(error.value).startswith(f"f.parquet, row 1 (row group 2): `agent_name` is {wrong!r}, which is no")


def test_episodes_continue_no_begun_answer(tokenizer, prompt_row):
    begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}]
    config = Config()
    plain = PromptEncoder(ChatTokenizer(tokenizer, config.data), Quarantine(0), row_limits(config)["train"])
    (row,) = plain(prompts(prompt_row(0, prompt=begun)))
    assert json.loads(row["prompt"]) == begun and tokenizer.decode(row["prompt_ids"]) == "<user>x<assistant>So"
    # A program, and an environment, may put messages behind it.
    config.agent.named = {"calc": {"tools": ["a:b"]}, "game": {"environment": "a:B"}, "mine": {"program": "a:run"}}
    encoder = PromptEncoder(ChatTokenizer(tokenizer, config.data), Quarantine(0), row_limits(config)["train"])
    assert len(encoder(prompts(*(prompt_row(0, prompt=begun, agent_name=name) for name in ("game", "mine"))))) == 2
    for name in ("calc", None):
        with pytest.raises(ValueError, match=r"row 0 .*: the last message is the assistant's, and an answer of an epi"):
            encoder(prompts(prompt_row(0, prompt=begun, agent_name=name)))


def test_what_a_row_may_lack(encoder_of, prompt_row):
    row = prompt_row(0, reward_model=None)
    del row["extra_info"]
    (made,) = encoder_of()(prompts(row))
    assert (made["ground_truth"], made["extra_info"]) == ("null", "{}")
    del row["reward_model"]
    with pytest.raises(ValueError, match="it has no `reward_model`; write"):
        encoder_of()(prompts(row))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ({"a": np.int64(3), "b": np.array([1.5, 2.0])}, {"a": 3, "b": [1.5, 2.0]}),
        (decimal.Decimal("3.00"), 3),
        (decimal.Decimal("3.25"), 3.25),
        (decimal.Decimal("0.1234567890123456789"), "0.1234567890123456789"),
        (datetime.datetime(2024, 1, 2, 3), "2024-01-02T03:00:00"),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (datetime.timedelta(minutes=1), 60.0),
        ("π", "π"),
    ],
)
def test_to_json(value, expected):
    assert json.loads(to_json(value, "extra_info")) == expected


@pytest.mark.parametrize("value", [b"x", {"image": b"x"}, [1j]])
def test_to_json_refuses(value):
    with pytest.raises(ValueError, match="column 'extra_info' cannot be written"):
        to_json(value, "extra_info")


def test_empty_media_columns_are_no_media(encoder_of, prompt_row):
    rows = encoder_of()(prompts(prompt_row(0, images=[], videos=None)))
    assert len(rows) == 1


def test_media_columns_of_other_types(encoder_of, prompt_row):
    assert len(encoder_of()(prompts(prompt_row(0, images=0, audios=np.array([]))))) == 1
    with pytest.raises(ValueError, match="the column `images` has content"):
        encoder_of()(prompts(prompt_row(0, images=2)))


def test_what_a_teacher_reads_is_checked_with_the_row(tokenizer, prompt_row):
    config = Config()
    config.data.max_prompt_length, config.data.max_response_length = 60, 10
    config.algorithm.teacher_coef, config.teacher.path = 1.0, "x"
    config.teacher.prompt = "{prompt} {extra_info.hint}"

    def encoded(hint):
        encoder = PromptEncoder(ChatTokenizer(tokenizer, config.data), Quarantine(0), row_limits(config)["train"])
        return encoder(prompts(prompt_row(0) | {"extra_info": {"hint": hint}}))

    assert len(encoded("Look.")) == 1
    with pytest.raises(ValueError, match="extra_info.hint` is missing, which the teacher's prompt reads"):
        encoded(None)
    config.teacher.max_token_len = 40
    with pytest.raises(ValueError, match="the teacher's prompt has .* more than the 40 of the teacher's max_token_len"):
        encoded("x" * 99)
