"""Models are tried without their weights: what a worker would refuse is refused, and nothing is read or downloaded."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.config import Config
from pipeline.config.engines import FACTS
from pipeline.config.model import ModelConfig
from pipeline.models.policy import load_policy
from pipeline.models.reward_model import load_reward_model
from pipeline.models.tokenizer import load_tokenizer
from pipeline.plan.trial import try_model, try_models, without_memory
from tests.folders import WHOLE, configured, copied, in_shards, state_of
from tests.sentences import Named

Tried = Callable[..., list[str]]
HEADS = ("model.embed_tokens.weight", "lm_head.weight")


def tried(folder: Path | str, key: str = "model.path", load: Any = load_policy, **settings: Any) -> list[str]:
    return list(try_model(ModelConfig(path=str(folder), **settings), key, load))


def refusal(*arguments: Any, **settings: Any) -> str:
    with pytest.raises(ValueError) as error:
        tried(*arguments, **settings)
    return str(error.value)


def test_a_complete_model_is_built_without_memory(tiny_model: Path, tmp_path: Path) -> None:
    from transformers.utils import logging as bars

    bar = bars.is_progress_bar_enabled()
    with without_memory() as built:
        policy = load_policy(ModelConfig(path=str(tiny_model)))
    assert {parameter.device.type for parameter in policy.parameters()} == {"meta"}
    assert policy.lm.name_or_path == str(tiny_model) and not built[0][1]
    assert bars.is_progress_bar_enabled() == bar
    assert tried(tiny_model) == []
    pickled = copied(tiny_model, tmp_path / "bin", weights=False)
    torch.save(state_of(tiny_model), pickled / "pytorch_model.bin")
    assert tried(pickled) == []
    # Kernels of another machine, and adapters, are of no consequence.
    assert tried(tiny_model, attn_implementation="flash_attention_2") == []
    # Outside, numbers are there again.
    assert load_policy(ModelConfig(path=str(pickled))).lm.device.type == "cpu"


def test_what_lies_next_to_a_model_is_named_and_not_loaded(tiny_model: Path, tmp_path: Path) -> None:
    folder = copied(tiny_model, tmp_path / "beside")
    save_file({"x": torch.zeros(2)}, folder / "consolidated.safetensors")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapted: Any = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder)
    (note,) = tried(folder)
    assert "also holds consolidated.safetensors, not read" in note and "an adapter" in note and "not loaded" in note
    loaded = load_policy(ModelConfig(path=str(folder)))
    assert loaded.lm.name_or_path == str(folder)
    state = loaded.state_dict()
    assert {name.removeprefix("lm.") for name in state} == {*state_of(tiny_model), HEADS[1]}
    assert all(torch.equal(state[f"lm.{name}"], tensor) for name, tensor in state_of(tiny_model).items())


def layers(count: int) -> dict[str, Any]:
    return {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}


@pytest.mark.parametrize(
    ("entries", "keys"),
    [
        (layers(1), "num_hidden_layers=1 model.layers.1."),
        (layers(3), "11 model.layers.2."),
        ({"vocab_size": 400}, "embed_tokens.weight config.json [400,"),
        ({"hidden_size": 96}, "[320, 64] config.json 96]"),
        ({"pad_token_id": 5000}, "Padding_idx"),
        ({"tie_word_embeddings": False}, "1 lm_head.weight"),
        ({"model_type": "nonsense"}, "nonsense"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ],
)
def test_a_config_of_other_weights_is_refused(
    entries: dict[str, Any], keys: str, tiny_model: Path, tmp_path: Path, named: Named
) -> None:
    folder = configured(copied(tiny_model, tmp_path / "changed"), **entries)
    named(refusal(folder), f"model.path={folder} {keys}")


def test_layers_of_other_parts_are_not_the_models(tiny_model: Path, tmp_path: Path, named: Named) -> None:
    folder, state = copied(tiny_model, tmp_path / "more"), state_of(tiny_model)
    beyond = f"model.layers.{json.loads((folder / 'config.json').read_text())['num_hidden_layers']}."
    for names in (["visual.blocks.9.attn.qkv.weight"], [f"{beyond}eh_proj.weight", f"{beyond}mlp.up_proj.weight"]):
        save_file(state | {name: torch.zeros(1) for name in names}, folder / WHOLE, {"format": "pt"})
        (note,) = tried(folder)
        named(note, f"model.path={folder} {len(names)} {names[0]}")
    # Base models are saved without the prefix.
    bare = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    save_file(bare | {f"{beyond}x".removeprefix("model."): torch.zeros(1)}, folder / WHOLE, {"format": "pt"})
    named(refusal(folder), f"model.path={folder} num_hidden_layers")


@pytest.mark.parametrize("name", ["up_proj.weight_scale_inv", "up_proj.weight_scale", "up_proj.SCB"])
def test_scales_of_quantised_weights_are_not_left_out(
    name: str, tiny_model: Path, tmp_path: Path, named: Named
) -> None:
    folder, state = copied(tiny_model, tmp_path / "scaled"), state_of(tiny_model)
    save_file(state | {f"model.layers.0.mlp.{name}": torch.ones(1)}, folder / WHOLE, {"format": "pt"})
    named(refusal(folder), f"model.path={folder} model.layers.0.mlp.{name}")


def test_a_tied_head_with_other_values_is_refused(tiny_model: Path, tmp_path: Path, named: Named) -> None:
    folder, state = copied(tiny_model, tmp_path / "tied"), state_of(tiny_model)
    embedding = state[HEADS[0]]
    save_file(state | {HEADS[1]: embedding.clone()}, folder / WHOLE, {"format": "pt"})
    assert tried(folder) == []
    save_file(state | {HEADS[1]: embedding * 2}, folder / WHOLE, {"format": "pt"})
    named(refusal(folder), f"model.path={folder} lm_head.weight")
    assert tried(configured(folder, tie_word_embeddings=False)) == []


def test_weights_under_other_names_are_named(tiny_model: Path, tmp_path: Path, named: Named) -> None:
    folder, state = copied(tiny_model, tmp_path / "other"), state_of(tiny_model)
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, folder / WHOLE, {"format": "pt"})
    named(refusal(folder), f"model.path={folder} 24 config.json module.model.")
    save_file(state | {"v_head.weight": torch.zeros(1, 64)}, folder / WHOLE, {"format": "pt"})
    (note,) = tried(folder)
    named(note, f"model.path={folder} 1 v_head.weight Qwen3ForCausalLM")


def test_a_reward_model_has_a_head_of_one_label(tiny_model: Path, tmp_path: Path, named: Named) -> None:
    key = "reward.model.path"
    named(refusal(tiny_model, key, load_reward_model), f"{key}={tiny_model}")
    assert tried(tiny_model, "model.path", lambda model, key: load_reward_model(model, key, new_head=True)) == []
    folder, state = copied(tiny_model, tmp_path / "heads"), state_of(tiny_model)
    save_file(state | {"score.weight": torch.zeros(3, 64)}, folder / WHOLE, {"format": "pt"})
    named(refusal(folder, key, load_reward_model), f"{key}={folder}")
    save_file(state | {"score.weight": torch.zeros(1, 64)}, folder / WHOLE, {"format": "pt"})
    assert tried(folder, key, load_reward_model) == []
    configured(folder, vocab_size=400)
    named(refusal(folder, key, load_reward_model), f"{key}={folder} config.json [400,")


def test_a_hub_name_is_tried_if_its_files_are_in_the_cache(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    snapshot = configured(copied(tiny_model, tmp_path / "snapshot"), vocab_size=400)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(snapshot / file))
    assert "config.json says [400, 64]" in refusal("some/model")
    (snapshot / WHOLE).unlink()
    assert tried("some/model") == []
    in_shards(snapshot, state_of(tiny_model))
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    assert tried("some/model") == []


@pytest.fixture
def config(tiny_model: Path) -> Config:
    made = Config()
    made.model.path = str(tiny_model)
    return made


def all_notes(config: Config, trained: bool = True) -> list[str]:
    return list(try_models(config, load_tokenizer(config.model), trained))


@pytest.mark.parametrize("key", ["critic", "scoring.reference", "reward.model"])
def test_every_model_of_a_run_is_tried(key: str, config: Config, tiny_model: Path, tmp_path: Path) -> None:
    folder = copied(tiny_model, tmp_path / "other")
    state = state_of(tiny_model) | {"score.weight": torch.zeros(1, 64)}
    save_file(state, folder / WHOLE, {"format": "pt"})
    config.algorithm.adv_estimator, config.algorithm.use_kl_in_reward = "gae", True
    section = {
        "critic": config.critic,
        "scoring.reference": config.scoring.reference,
        "reward.model": config.reward.model,
    }
    section[key].path = str(folder)
    assert all_notes(config) == []
    configured(folder, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ValueError, match=f"{key}.path=.*has quantised weights: awq in 4 bits"):
        all_notes(config)
    configured(folder, quantization_config=None, vocab_size=100)
    with pytest.raises(ValueError, match=f"the embedding of {key}.path=.* has 100 rows"):
        all_notes(config)


def test_an_evaluation_leaves_quantised_weights_to_the_engine(config: Config, tiny_model: Path, tmp_path: Path) -> None:
    folder = configured(copied(tiny_model, tmp_path / "few"), quantization_config={"quant_method": "fp8"})
    config.model = replace(config.model, path=str(folder))
    assert all_notes(config, trained=False) == []
    with pytest.raises(ValueError, match="model.path=.*quantised"):
        all_notes(config)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]


def test_an_evaluation_leaves_families_of_its_own_to_the_engine(
    config: Config, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = configured(copied(tiny_model, tmp_path / "own"), model_type="of_the_engine")
    tokenizer = load_tokenizer(config.model)
    config.model = replace(config.model, path=str(folder))
    (note,) = try_models(config, tokenizer, trained=False)
    assert "cannot be loaded" in note and note.endswith(
        "An evaluation leaves it to the engine; it could not be trained"
    )
    with pytest.raises(ValueError, match="cannot be loaded"):
        list(try_models(config, tokenizer))
    monkeypatch.setitem(FACTS, "vllm", replace(FACTS["vllm"], own_models=False))
    with pytest.raises(ValueError, match="cannot be loaded"):
        list(try_models(config, tokenizer, trained=False))
    configured(folder, model_type="qwen3", **layers(3))
    with pytest.raises(ValueError, match="lacks 11 weights"):
        list(try_models(config, tokenizer, trained=False))
