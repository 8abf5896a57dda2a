"""The tiny policy's tokenizer, template and sizes."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs import tiny
from jobs.prepare import countdown
from jobs.prepare.puzzles import Puzzle

PUZZLE = Puzzle((3, 17, 25), 64, "(25 - 17) * 3 + 40", "25 - 17 = 8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "model"
    assert tiny.main(["--out", str(out), "--rows", "500", "--hidden", "64", "--layers", "2"]) == 0
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=100)
@given(text=st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "replace")))
def test_any_text_survives(tokenizer, text: str) -> None:
    for special in tokenizer.all_special_tokens:
        text = text.replace(special, "")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_digits_are_single_tokens(tokenizer) -> None:
    ids = tokenizer("Numbers: 1234567890 + 42x7", add_special_tokens=False)["input_ids"]
    for token in ids:
        text = tokenizer.decode([token])
        assert len(text) == 1 or not any(letter.isdigit() for letter in text)


def test_numbers_of_two_digits_are_single_tokens() -> None:
    tokenizer = tiny.build_tokenizer((f"{number}\n" for number in range(100) for _ in range(3)), 512, digits=2)
    for number in range(100):
        assert len(tokenizer(str(number), add_special_tokens=False)["input_ids"]) == 1
    assert len(tokenizer("6363", add_special_tokens=False)["input_ids"]) == 2
    with pytest.raises(ValueError, match="--digits 0 must be at least 1"):
        tiny.build_tokenizer([], 512, digits=0)


def test_prompt_and_answer_split_where_generation_begins(tokenizer) -> None:
    messages = countdown.messages(PUZZLE, "short", "steps")
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    both = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = both["input_ids"], both["assistant_masks"]
    assert ids[: len(prompt)] == prompt and mask[: len(prompt)] == [0] * len(prompt)
    answer = [token for token, learnt in zip(ids, mask, strict=True) if learnt]
    assert tokenizer.decode(answer) == messages[1]["content"] + tokenizer.eos_token
    assert answer == tokenizer(messages[1]["content"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


def test_model_loads_and_counts(folder: Path, tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)  # no id that the tokenizer cannot decode
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert model.config.head_dim == 32 and model.config.tie_word_embeddings


def test_seed_and_tie(tmp_path: Path) -> None:
    tokenizer = tiny.build_tokenizer(["1 + 2"], 300)
    one, two, other = (tiny.build_model(tokenizer, 64, 1, 2, 1, tie=False, seed=seed) for seed in (1, 1, 2))
    first, same, different = (model.lm_head.weight for model in (one, two, other))
    assert (first == same).all() and not (first == different).all()
    assert one.lm_head.weight is not one.model.embed_tokens.weight


def test_data_files_shape_the_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    rows = [[{"role": "user", "content": "abracadabra"}, {"role": "assistant", "content": "hocus"}]] * 10
    pq.write_table(pa.table({"messages": rows}), file)
    assert list(tiny.texts([file], rows=2)) == ["abracadabra", "hocus"] * 2
    tokenizer = tiny.build_tokenizer(tiny.texts([file], rows=10), 400)
    assert len(tokenizer("abracadabra")["input_ids"]) == 1


def test_the_wording_of_tools_merges_and_changes_nothing_elsewhere(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "required": []}}}
    call = {"type": "function", "function": {"name": "calc", "arguments": {"expression": "34*29"}}}
    messages = [
        {"role": "user", "content": "34*29=?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "986"},
        {"role": "assistant", "content": "986"},
    ]
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "tools": [schema]}] * 10), file)
    pieces = list(tiny.texts([file], rows=1))
    assert not any("<|im_" in piece for piece in pieces)
    assert any('"name": "calc", "parameters"' in piece for piece in pieces)
    assert "user\n<tool_response>986</tool_response>" in pieces
    tokenizer = tiny.build_tokenizer(tiny.texts([file], rows=10), 1024)
    prompt = tokenizer.apply_chat_template(messages[:1], tools=[schema], add_generation_prompt=True)["input_ids"]
    ids = tokenizer.apply_chat_template(messages[:2], tools=[schema])["input_ids"]
    assert ids[: len(prompt)] == prompt
    answer = [tokenizer.decode([token]) for token in ids[len(prompt) :]]
    opening = '<tool_call>{"name": "calc", "arguments": {"expression": "'
    assert answer == [opening, *"34", "*", *"29", '"}}</tool_call>', "<|im_end|>", "\n"]


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    options = ["--rows", "20", "--hidden", "64", "--layers", "2", "--experts", "6"]
    assert tiny.main(["--out", str(tmp_path / "m"), *options]) == 0
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "m").config
    assert (config.model_type, config.num_experts, config.num_experts_per_tok) == ("qwen3_moe", 6, 2)
    assert 2 * config.moe_intermediate_size == config.intermediate_size


def test_errors_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m"
    wrong = tmp_path / "wrong.parquet"
    pq.write_table(pa.table({"text": ["x"]}), wrong)
    (tmp_path / "broken.parquet").write_text("no parquet")
    twice = tmp_path / "twice.parquet"
    pq.write_table(pa.table([pa.array(["x"])] * 2, names=["prompt", "prompt"]), twice)
    cases = {
        "gives heads of 33.3333 dimensions": ["--hidden", "200", "--heads", "6"],
        "is not a multiple of --kv-heads 4": ["--kv-heads", "4"],
        "--experts 1 must be 0, or at least 2": ["--experts", "1"],
        "--experts is for models of text": ["--experts", "4", "--vision", "qwen3_vl"],
        "--vocab 100 is too small": ["--vocab", "100"],
        "neither a `prompt` nor a `messages` column, but text": ["--data", str(wrong)],
        "twice.parquet has several columns named 'prompt'": ["--data", str(twice)],
        "cannot be read as parquet": ["--data", str(tmp_path / "broken.parquet")],
        "absent.parquet cannot be read": ["--data", str(tmp_path / "absent.parquet")],
    }
    for sentence, options in cases.items():
        assert tiny.main(["--out", str(out), "--rows", "20", *options]) == 2
        assert sentence in capsys.readouterr().err
        assert not out.exists()
    out.mkdir()
    (out / "README.md").write_text("mine")
    assert tiny.main(["--out", str(out)]) == 2
    assert "is not empty; choose another folder or remove it" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["README.md"]


def test_a_model_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny.PreTrainedTokenizerFast, "save_pretrained", full)
    options = ["--rows", "20", "--hidden", "32", "--layers", "1", "--heads", "1"]
    assert tiny.main(["--out", str(tmp_path / "m"), *options]) == 1
    assert f"cannot write {tmp_path}/m: [Errno 28] No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
