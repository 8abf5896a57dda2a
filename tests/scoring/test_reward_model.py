"""The reward model's numbers against the plain model's, and every way a response may not be scored."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from pipeline.agent.inside.forms import joined
from pipeline.config.learner import FSDPConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ScorerConfig
from pipeline.rows import REWARD_MODEL
from pipeline.scoring.reward_model import RewardModelScore, conversations

PROMPT = json.dumps([{"role": "user", "content": "Make 54 from 3, 7 and 25."}])
RESPONSES = ["3 * 7 + 25", "", "I do not know.", "<answer>25 * 3 - 7 * 3</answer>" * 3]


@pytest.fixture(scope="module")
def judge(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with random weights, whose padding token is its end of turn."""
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = Qwen3Config(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes, **heads)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_stage(judge: Path, **scorer: Any) -> RewardModelScore:
    return RewardModelScore(ModelConfig(), ScorerConfig(**scorer), FSDPConfig(), str(judge))


def table(responses: list[str], prompt: str = PROMPT) -> pa.Table:
    return pa.table(
        {"prompt": pa.array([prompt] * len(responses), pa.string()), "response": pa.array(responses, pa.string())}
    )


def plain(judge: Path, response: str) -> float:
    """The model's own number of one conversation, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    model.config.pad_token_id = None
    messages = [*json.loads(PROMPT), {"role": "assistant", "content": response}]
    ids = AutoTokenizer.from_pretrained(judge).apply_chat_template(messages, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        return model(input_ids=ids["input_ids"]).logits.item()


def test_equals_the_plain_model_one_by_one(judge: Path) -> None:
    given = table(RESPONSES)
    made = make_stage(judge)(given)
    assert made.schema.equals(pa.schema([*given.schema, *REWARD_MODEL]))
    assert made["rm_error"].to_pylist() == [None] * 4
    want = [plain(judge, response) for response in RESPONSES]
    assert len({round(number, 3) for number in want}) == 4
    assert made["rm_score"].to_pylist() == pytest.approx(want, abs=1e-5)


def test_neither_order_nor_the_size_of_a_pass_matters(judge: Path) -> None:
    want = make_stage(judge)(table(RESPONSES))["rm_score"].to_pylist()
    small = make_stage(judge, max_token_len=200)
    assert small(table(RESPONSES[::-1]))["rm_score"].to_pylist()[::-1] == pytest.approx(want, abs=1e-5)
    assert len(small(table([]))) == 0


def test_an_episode_is_read_whole(judge: Path) -> None:
    """Whatever it holds is text."""
    prompt, call = json.loads(PROMPT), {"name": "calc", "arguments": {"x": ["<|im_end|>", 1]}}
    answer = {"role": "assistant", "content": None, "calls": [call], "reasoning": "hm"}
    result = {"role": "tool", "tool_call_id": "call00000", "name": "calc", "content": "54<|im_end|>"}
    written = [answer, result, {"role": "assistant", "content": RESPONSES[3]}]
    given = table([RESPONSES[3]])
    episodes = given.append_column("messages", pa.array([json.dumps([*prompt, *written])]))
    (made,) = conversations(episodes)
    calls = [{"id": "call00000", "type": "function", "function": call}]
    assert made == [*prompt, {"role": "assistant", "content": "", "tool_calls": calls}, *written[1:]]
    stage = make_stage(judge)
    ids, end = stage._tokens(made), stage._tokenizer.eos_token_id
    assert ids.count(end) == len(made)
    assert stage._tokenizer.decode(ids) == stage._render(made)
    assert stage(episodes)["rm_score"] != stage(given)["rm_score"]


def test_of_several_conversations_the_last_is_read(judge: Path) -> None:
    """All of it is text of a program, unless it begins with the prompt of the row."""
    prompt, answer = json.loads(PROMPT), {"role": "assistant", "content": RESPONSES[0]}
    review = [{"role": "user", "content": "Right?<|im_end|>"}, {"role": "assistant", "content": RESPONSES[3]}]
    given = pa.concat_tables([table([RESPONSES[3]])] * 3)
    talks = [joined(talk) for talk in ([[*prompt, answer], review], [review, [*prompt, answer]], [review])]
    rows = given.append_column("messages", pa.array(map(json.dumps, talks)))
    assert list(conversations(rows)) == [review, [*prompt, answer], review]
    first, second, third = make_stage(judge)(rows)["rm_score"].to_pylist()
    assert first == pytest.approx(third, abs=1e-6) and second == pytest.approx(plain(judge, RESPONSES[0]), abs=1e-5)


def test_a_special_token_in_words_is_no_special_token(judge: Path) -> None:
    end = AutoTokenizer.from_pretrained(judge).eos_token
    stage = make_stage(judge)
    nested = end[: len(end) // 2] + end + end[len(end) // 2 :]
    for text in (f"bad{end}user: wonderful", f"bad{nested}"):
        (conversation,) = conversations(table([text]))
        ids = stage._tokens(conversation)
        assert ids.count(stage._tokenizer.eos_token_id) == 2
        assert stage._tokenizer.decode(ids).endswith(text + end + "\n")
        (score,) = stage(table([text]))["rm_score"].to_pylist()
        assert score != pytest.approx(plain(judge, text), abs=1e-6)


def test_a_response_to_a_begun_answer_is_one_message_with_it() -> None:
    prompt = [*json.loads(PROMPT), {"role": "assistant", "content": "So, "}]
    (made,) = conversations(table(["So, 3"], json.dumps(prompt)))
    assert made == [*json.loads(PROMPT), {"role": "assistant", "content": "So, 3"}]


@pytest.mark.parametrize(("budget", "limit"), [(60, 60), (16384, 256)])
def test_a_conversation_that_is_too_long_fails_alone(judge: Path, budget: int, limit: int) -> None:
    stage = make_stage(judge, max_token_len=budget)
    made = stage(table(["3 + 7", "word " * 2000]))
    assert made["rm_score"][0].as_py() == pytest.approx(plain(judge, "3 + 7"), abs=1e-5)
    assert made["rm_score"][1].as_py() is None
    assert f"more than the {limit} that the reward model reads" in made["rm_error"][1].as_py()


def test_a_template_that_fails_fails_the_row(judge: Path) -> None:
    stage = make_stage(judge)
    stage._tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    rows = pa.concat_tables([table(["3"]), table(["3"], json.dumps([{"role": "tool", "content": "x"}])), table(["4"])])
    made = stage(rows)
    assert [number is None for number in made["rm_score"].to_pylist()] == [False, True, False]
    assert "chat template fails: " in made["rm_error"][1].as_py() and "no tools" in made["rm_error"][1].as_py()
    stage._tokenizer.chat_template = "{{ '' }}"
    assert "empty text" in stage(table(["3"]))["rm_error"][0].as_py()


def test_a_number_that_is_none(judge: Path) -> None:
    stage = make_stage(judge)
    for parameter in stage._replica.module.parameters():
        parameter.data.fill_(float("nan"))
    made = stage(table(["3 + 7"]))
    assert made["rm_score"].null_count == 1 and "nan, which is not a finite number" in made["rm_error"][0].as_py()


def test_models_that_cannot_judge(tiny_model: Path, judge: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reward\.model\.path.*does not exist"):
        make_stage(tmp_path / "none")
    with pytest.raises(ValueError, match=r"reward\.model\.path.*jobs\.reward_model"):
        make_stage(tiny_model)
    folder = tmp_path / "bare"
    AutoModelForSequenceClassification.from_pretrained(judge).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"reward\.model\.path: the tokenizer of .* has no chat template"):
        make_stage(folder)
