"""What a saved model has besides its weights: written as it came, and tried before a run begins."""

import errno
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from pipeline.config.model import ModelConfig
from pipeline.models.ends import find_ends
from pipeline.models.fsdp import NotSavedError, save_hf, try_save
from pipeline.models.policy import load_policy
from pipeline.models.reward_model import load_reward_model
from pipeline.models.save_settings import GENERATION_FILE, check_settings


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "own"))


REFUSED: list[dict[str, Any]] = [
    {"do_sample": False, "temperature": 0.9, "top_p": 0.6},
    {"top_k": 20},
    {"num_beams": 1, "length_penalty": 2.0, "early_stopping": True},
    {"pad_token_id": -1},
]
"""Settings that `transformers` reads and refuses to write."""


@pytest.mark.parametrize("settings", REFUSED, ids=str)
@pytest.mark.parametrize("ends", [(), (2, 0)])
def test_a_generation_config_is_saved_as_it_came(
    folder: Path, tmp_path: Path, settings: dict[str, Any], ends: tuple[int, ...]
) -> None:
    (folder / GENERATION_FILE).write_text(json.dumps({"eos_token_id": 2} | settings))
    policy, tokenizer = load_policy(ModelConfig(str(folder))), AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        policy.lm.generation_config.save_pretrained(tmp_path / "refused")
    try_save(policy, tokenizer, tmp_path / "saved", None, ends)
    save_hf(policy, tokenizer, tmp_path / "saved", ends=ends)
    saved = GenerationConfig.from_pretrained(tmp_path / "saved").to_dict()
    assert {name: saved[name] for name in settings} == settings
    assert saved["eos_token_id"] == (list(ends) or 2)
    load_policy(ModelConfig(str(tmp_path / "saved")))


def test_a_reward_model_has_no_generation_config(folder: Path, tmp_path: Path) -> None:
    (folder / GENERATION_FILE).write_text(json.dumps(REFUSED[0]))
    model = load_reward_model(ModelConfig(str(folder)), new_head=True)
    save_hf(model, AutoTokenizer.from_pretrained(folder), tmp_path / "saved")
    assert not (tmp_path / "saved" / GENERATION_FILE).exists()
    load_reward_model(ModelConfig(str(tmp_path / "saved")))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"max_new_tokens": 0}', '{"cache_implementation": "none"}'])
def test_a_generation_config_that_cannot_be_used_is_named(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (folder / GENERATION_FILE).write_text(text)
    with pytest.raises(ValueError, match=rf"^{folder}/{GENERATION_FILE} cannot be used \(.+\); mend it, or remove it"):
        find_ends(ModelConfig(str(folder)), tokenizer, {})
    (folder / GENERATION_FILE).unlink()
    assert find_ends(ModelConfig(str(folder)), tokenizer, {}).ids == (2,)


class Unwritable:
    def save_pretrained(self, folder: str) -> None:
        raise TypeError("Object of type Lock is not JSON serializable")


def test_settings_that_cannot_be_written_are_refused_before_anything_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = ModelConfig(str(folder)), AutoTokenizer.from_pretrained(folder)
    check_settings(model, tokenizer)
    with pytest.raises(
        ValueError, match=f"^model.tokenizer_path={folder}: its tokenizer can be read and not written.*T"
    ):
        check_settings(model, Unwritable())
    from transformers import Qwen3Config

    monkeypatch.setattr(Qwen3Config, "save_pretrained", lambda *_: Unwritable().save_pretrained(""))
    with pytest.raises(ValueError, match=f"^model.path={folder}: its config can be read and not written"):
        check_settings(model, tokenizer)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")]
)
def test_a_full_temporary_folder_is_no_fault_of_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Unwritable, "save_pretrained", full)
    with pytest.raises(OSError, match=f"^{tempfile.gettempdir()} cannot be written: .*No space left.*; make room"):
        check_settings(ModelConfig(str(folder)), Unwritable())


def test_the_end_is_tried_without_a_trace(folder: Path, tmp_path: Path) -> None:
    policy, tokenizer = load_policy(ModelConfig(str(folder))), AutoTokenizer.from_pretrained(folder)
    before = sorted(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    for out, tried, reason in (
        (tmp_path / "made" / "later" / "model", tokenizer, None),
        (folder, tokenizer, None),
        (folder, Unwritable(), "Object of type Lock"),
        (tmp_path / "file", tokenizer, "it is a file"),
        (tmp_path / "file" / "model", tokenizer, "Not a directory"),
        # Its own name has room on the disk, and the one that it is written under has none.
        (tmp_path / ("n" * 240), tokenizer, "File name too long"),
    ):
        if reason is None:
            try_save(policy, tried, out, replace=True)
        else:
            with pytest.raises(NotSavedError, match=f"could not be saved in {out} at the end: {reason}"):
                try_save(policy, tried, out, replace=True)
    (tmp_path / "file").unlink()
    assert sorted(tmp_path.iterdir()) == before
