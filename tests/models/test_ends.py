"""Where answers end, by the model's files, the tokenizer and what its chat template writes behind an answer."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pipeline.config.model import ModelConfig
from pipeline.models.ends import Ends, find_ends
from pipeline.models.fsdp import save_hf
from pipeline.models.policy import load_policy
from pipeline.models.tokenizer import load_tokenizer

PAD, START, END = 0, 1, 2
"""`<|endoftext|>`, `<|im_start|>` and `<|im_end|>` of the tiny model."""
Change = Callable[..., Path]


def turns(behind: str, last: str = "") -> str:
    """A template of turns, with what stands behind each and behind the conversation."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}" + behind + "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}" + last + "{% endif %}"
    )


@pytest.fixture
def change(tiny_model: Path, tmp_path: Path) -> Change:
    """Makes a copy of the tiny model with other ends in its files, None where a file is missing or silent."""

    def made(
        tokenizer: str | None = "<|im_end|>", config: Any = END, generation: Any = END, template: str | None = None
    ) -> Path:
        folder = Path(shutil.copytree(tiny_model, tmp_path / "changed"))
        settings = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config}
        (folder / "config.json").write_text(json.dumps(settings))
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": tokenizer}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if generation is None:
            (folder / "generation_config.json").unlink()
        else:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return made


def found(folder: Path, **kwargs: Any) -> Ends:
    model = ModelConfig(str(folder))
    return find_ends(model, load_tokenizer(model, needs_chat_template=False), kwargs)


def test_all_agree(tiny_model: Path) -> None:
    assert found(tiny_model) == Ends((END,), (), "answers end with <|im_end|> (2)", True)


def test_a_base_model_with_the_template_of_another_one(change: Change) -> None:
    ends = found(change("<|endoftext|>", PAD, PAD))
    assert ends.ids == (PAD, END) and ends.missing == (END,) and ends.learnt
    assert ends.line == "answers end with <|endoftext|> (0) or <|im_end|> (2, in the chat template only)"


@pytest.mark.parametrize(
    ("tokenizer", "config", "generation", "ids"),
    [
        ("<|endoftext|>", PAD, [PAD, 5, 7], (PAD, 5, 7, END)),
        ("<|im_end|>", PAD, None, (PAD, END)),
        ("<|im_end|>", [PAD, 5], None, (PAD, 5, END)),
        ("<|endoftext|>", END, [5], (5, PAD, END)),
        (None, None, None, (END,)),
        ("<|endoftext|>", None, [PAD, 999, -1], (PAD, END)),
        ("<|im_end|>", PAD, [], (PAD, END)),
    ],
)
def test_ids_are_those_of_all_files(change: Change, tokenizer: Any, config: Any, generation: Any, ids: Any) -> None:
    assert found(change(tokenizer, config, generation)).ids == ids


def test_a_tokenizer_of_another_folder_brings_its_template(change: Change, tiny_model: Path) -> None:
    folder = change("<|endoftext|>", PAD, PAD, template="{{ messages }}")
    model = ModelConfig(str(folder), str(tiny_model))
    assert find_ends(model, load_tokenizer(model), {}).ids == (PAD, END)


CLOSED = {
    "a newline behind it": turns("<|im_end|>\n"),
    "a blank before it": turns(" <|im_end|>"),
    "the end of the text behind the last turn": turns("<|im_end|>\n", "<|endoftext|>"),
    "the opening of a turn behind any conversation": turns("<|im_end|>\n", "<|im_start|>assistant\n"),
    "no second question": turns("<|im_end|>{% if loop.index > 2 %}{{ raise_exception('odd') }}{% endif %}"),
    "an end behind all but the last answer": turns("{% if not loop.last %}<|im_end|>{% endif %}", "<|im_end|>"),
    "an argument": turns("{{ closing }}"),
}


@pytest.mark.parametrize("name", CLOSED)
def test_the_end_is_found_as_the_template_writes_it(change: Change, name: str) -> None:
    for generation, ids in ((5, (5, END)), ([5, END], (5, END))):
        folder = change(None, 5, generation, CLOSED[name])
        ends = found(folder, closing="<|im_end|>")
        assert ends.ids == ids and ends.learnt and ";" not in ends.line
        shutil.rmtree(folder)


def test_the_next_turn_may_end_an_answer(change: Change) -> None:
    ends = found(change(None, 5, 5, turns("")))
    assert ends.ids == (5, START) and not ends.learnt


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (turns("<|eot|>\n"), "the chat template ends an answer with '<.eot.>', which is "),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "the chat template writes no end"),
        ("{% for m in messages %}{{ raise_exception('never') }}{% endfor %}", "fails on an answer, .* never"),
        ("{{ messages[0].content }}", "fails on an answer, .* it leaves the answer out"),
    ],
)
def test_a_template_without_an_end_is_named(change: Change, template: str, sentence: str) -> None:
    ends = found(change("<|endoftext|>", PAD, PAD, template))
    assert ends.ids == (PAD,) and not ends.learnt
    assert re.fullmatch(rf"answers end with <\|endoftext\|> \(0\); .*{sentence}.*", ends.line)


def test_an_end_that_the_model_does_not_know_is_named(change: Change) -> None:
    folder = change("<|endoftext|>", PAD, PAD)
    settings = json.loads((folder / "config.json").read_text()) | {"vocab_size": END}
    (folder / "config.json").write_text(json.dumps(settings))
    ends = found(folder)
    assert ends.ids == (PAD,)
    assert ends.line.endswith("; the chat template ends answers with token 2, and the model has 2 tokens")


def test_without_any_end(change: Change) -> None:
    folder = change(None, None, None)
    (folder / "chat_template.jinja").unlink()
    assert found(folder) == Ends((), (), "no token ends an answer, so each is as long as can be", True)


@pytest.mark.parametrize(("generation", "saved"), [(PAD, [PAD, END]), (None, [PAD, END]), ([END, PAD], [END, PAD])])
def test_a_saved_model_names_its_ends_for_generate(
    change: Change, tmp_path: Path, generation: Any, saved: list[int]
) -> None:
    folder = change("<|endoftext|>", PAD, generation)
    policy = load_policy(ModelConfig(str(folder)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    save_hf(policy, tokenizer, tmp_path / "saved", ends=found(folder).ids)
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == saved
    assert found(tmp_path / "saved").missing == ()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = tokenizer("Hello", return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=6, sequence_bias={(END,): 1e4}, pad_token_id=PAD)
    assert answer[0, ids.shape[1] :].tolist() == [END]
