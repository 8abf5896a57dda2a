import re

import pytest

from pipeline.config.model import ModelConfig
from pipeline.models.tokenizer import load_tokenizer


@pytest.fixture
def tokenizer(tiny_model):
    return load_tokenizer(ModelConfig(path=str(tiny_model)))


def test_a_tokenizer_may_have_its_own_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "model").mkdir()
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path / "model"), tokenizer_path=str(tmp_path / "tokenizer")))
    assert loaded("hé 1")["input_ids"] == tokenizer("hé 1")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template


def test_what_cannot_be_loaded(tokenizer, tmp_path):
    def refuses(match, **settings):
        with pytest.raises(ValueError, match=match):
            load_tokenizer(ModelConfig(**settings))

    model, bare, broken = (tmp_path / name for name in ("model", "bare", "broken"))
    for folder in (model, broken):
        folder.mkdir()
    refuses(r"model\.path is not set")
    refuses(r"model\.path=/no/such/folder: the folder", path="/no/such/folder")
    refuses(rf"model\.path: folder {re.escape(str(model))} holds no tokenizer", path=str(model))
    refuses(r"model\.tokenizer_path=/no/such: the folder", path=str(model), tokenizer_path="/no/such")
    (broken / "tokenizer.json").write_text("{")
    refuses(r"the tokenizer of .*broken cannot be loaded: ", path=str(broken))
    tokenizer.save_pretrained(bare)
    (bare / "chat_template.jinja").unlink()
    refuses(r"model\.path: the tokenizer of .*bare has no chat template", path=str(bare))
    assert load_tokenizer(ModelConfig(path=str(bare)), needs_chat_template=False).chat_template is None


def test_remote_code_runs_only_when_allowed(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*model\.trust_remote_code=true"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert not (tmp_path / "ran").exists()
