"""A token that text or the template can give has a row in the embedding."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.model import ModelConfig
from pipeline.models.tokenizer import load_tokenizer
from pipeline.models.tokenizer_fit import check_vocabulary, vocabulary
from tests.folders import configured, copied


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(ModelConfig(path=str(tiny_model)))


def test_a_tokenizer_with_fewer_tokens_fits(tokenizer: Any, tiny_model: Path, tmp_path: Path) -> None:
    assert vocabulary(ModelConfig(path=str(tiny_model))) == 320
    assert vocabulary(ModelConfig(path=str(tmp_path))) is None
    for rows in (None, 320, 512):
        assert check_vocabulary(tokenizer, "t", rows, "model.path=m") == ""
    # An engine may sample such an id.
    assert tokenizer.decode([400]) == "" and tokenizer.batch_decode([[400]], skip_special_tokens=True) == [""]


SENTENCE = "tokenizer of t has 321 tokens with ids up to 320, and the embedding of model.path=m has 320 rows"


def test_a_token_that_the_template_writes_needs_a_row(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]}, replace_extra_special_tokens=False)
    note = check_vocabulary(tokenizer, "t", 320, "model.path=m")
    assert SENTENCE in note and "neither text nor the chat template gives one" in note
    template = tokenizer.chat_template
    for written in ("<|turn|>" + template, "{{ '<|' + 'turn' + '|>' }}" + template):
        tokenizer.chat_template = written
        with pytest.raises(ValueError, match=SENTENCE + ".*'<|turn|>' .320.; name the tokenizer"):
            check_vocabulary(tokenizer, "t", 320, "model.path=m")


def test_a_token_that_text_gives_needs_a_row(tokenizer: Any) -> None:
    tokenizer.add_tokens(["<think>"])
    with pytest.raises(ValueError, match=SENTENCE + ".*resize_token_embeddings"):
        check_vocabulary(tokenizer, "t", 320, "model.path=m")


def test_a_token_with_a_role_needs_a_row(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    with pytest.raises(ValueError, match=SENTENCE):
        check_vocabulary(tokenizer, "t", 320, "model.path=m")


@pytest.mark.parametrize(
    "roles",
    [{"pad_token": "<pad>"}, {"mask_token": "<mask>"}, {"extra_special_tokens": {"image_token": "<image_soft_token>"}}],
)
def test_a_token_that_nothing_writes_needs_no_row(roles: dict[str, Any], tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model, **roles)
    assert len(tokenizer) == 321
    assert SENTENCE in check_vocabulary(tokenizer, "t", 320, "model.path=m")


def test_a_smaller_embedding_is_found_by_its_config(tokenizer: Any, tiny_model: Path, tmp_path: Path) -> None:
    folder = configured(copied(tiny_model, tmp_path / "small"), vocab_size=100)
    rows = vocabulary(ModelConfig(path=str(folder)))
    with pytest.raises(ValueError, match="has 100 rows .*: 220 tokens have none"):
        check_vocabulary(tokenizer, "t", rows, "critic.path=m")
