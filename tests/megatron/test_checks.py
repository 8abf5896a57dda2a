"""What Megatron's layers cannot have is refused by name, before a run."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_config
from pipeline.megatron.settings import VERSION, unknown
from pipeline.plan import check_megatron
from pipeline.plan.check_megatron import problems
from tests.sentences import Named

MODEL = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}
EXPERTS = MODEL | {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}


def run(folder: Path, model: dict[str, Any], *settings: str) -> list[str]:
    (folder / "config.json").write_text(json.dumps(model))
    keys = [f"model.path={folder}", "actor.strategy=megatron", "trainer.use_gpu=true", *settings]
    return list(problems(load_config(keys)))


@pytest.mark.parametrize(
    ("model", "settings", "keys"),
    [
        (MODEL, [], None),
        (EXPERTS, ["trainer.num_workers=4", "actor.parallel.expert=2"], None),
        (MODEL, ["trainer.num_workers=4", "actor.parallel.pipeline=2", "actor.parallel.tensor=2"], None),
        (MODEL, ["trainer.use_gpu=false"], "actor.strategy=megatron trainer.use_gpu=true"),
        (MODEL, ["algorithm.adv_estimator=gae"], "critic algorithm.adv_estimator actor.strategy"),
        (MODEL, ["model.lora.rank=4"], "model.lora.rank=4 actor.strategy"),
        (MODEL, ["model.vision=frozen"], "model.vision=frozen actor.strategy"),
        (MODEL, ["rollout.replay_routes=true"], "rollout.replay_routes actor.strategy"),
        (MODEL, ["model.activation_offload=true"], "model.activation_offload actor.strategy"),
        (MODEL, ["model.trust_remote_code=true"], "model.trust_remote_code actor.strategy"),
        (MODEL, ["actor.optim.name=adamw_8bit"], "actor.optim.name=adamw_8bit actor.strategy"),
        (MODEL, ["actor.fsdp.offload=optimizer"], "actor.fsdp.offload=optimizer actor.strategy"),
        (MODEL, ["actor.fsdp.reduce_dtype=bfloat16"], "actor.fsdp.reduce_dtype=bfloat16 actor.strategy"),
        (MODEL, ["actor.fsdp.reshard_after_forward=false"], "actor.fsdp.reshard_after_forward actor.strategy"),
        (MODEL, ["model.attn_implementation=eager"], "model.attn_implementation=eager actor.strategy"),
        (MODEL, ["actor.parallel.replicate=2"], "actor.parallel.replicate=2 actor.strategy"),
        (
            MODEL,
            ["actor.use_kl_loss=true", "scoring.reference.placement=train_workers"],
            "scoring.reference.placement=train_workers actor.strategy",
        ),
        (
            MODEL,
            ["teacher.path=t", "teacher.placement=train_workers", "algorithm.teacher_coef=1"],
            "teacher.placement=train_workers actor.strategy",
        ),
        (MODEL, ["actor.parallel.pipeline=3"], "actor.parallel.pipeline=3 layers model.path"),
        (EXPERTS, ["trainer.num_workers=4", "actor.parallel.expert=4"], "actor.parallel.expert=4 num_experts"),
        (EXPERTS, ["trainer.num_workers=4", "actor.parallel.expert=3"], "actor.parallel.expert=3 trainer.num_workers"),
        (MODEL | {"model_type": "gemma3_text"}, [], "model.path model_type gemma3_text"),
        (MODEL | {"new_factor": 2.0}, [], "model.path new_factor=2.0"),
        (MODEL | {"hidden_act": "gelu"}, [], "model.path hidden_act=gelu"),
        (EXPERTS | {"mlp_only_layers": [0]}, [], "model.path mlp_only_layers"),
        (EXPERTS | {"norm_topk_prob": False}, [], "model.path norm_topk_prob"),
        ({key: value for key, value in EXPERTS.items() if key != "norm_topk_prob"}, [], "model.path norm_topk_prob"),
        (MODEL | {"rope_parameters": {"partial_rotary_factor": 0.5}}, [], "model.path partial_rotary_factor"),
        (MODEL | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, [], "model.path rope_type=yarn"),
        (MODEL | {"use_sliding_window": True}, [], "model.path use_sliding_window"),
        (MODEL | {"attention_bias": True}, [], "model.path attention_bias"),
        (MODEL | {"layer_types": ["sliding_attention"] * 4}, [], "model.path layer_types"),
    ],
)
def test_what_megatron_cannot_have(
    tmp_path: Path, model: dict[str, Any], settings: list[str], keys: str | None, named: Named
) -> None:
    found = run(tmp_path, model, *settings)
    assert len(found) == (keys is not None), found
    if keys:
        named(found[0], keys)


def test_other_strategies_are_not_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"new_factor": 2.0}))
    assert list(problems(load_config([f"model.path={tmp_path}"]))) == []


def test_the_package_must_be_there_and_be_the_proven_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: Named
) -> None:
    monkeypatch.setattr(check_megatron.metadata, "version", lambda name: "0.16.1")
    [found] = run(tmp_path, MODEL)
    named(found, f"megatron-core 0.16.1 actor.strategy=megatron {VERSION}")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(check_megatron.metadata, "version", missing)
    [found] = run(tmp_path, MODEL)
    named(found, "actor.strategy=megatron megatron-core slipstream-rl[megatron] megatron-env")


def test_the_installed_package_is_the_proven_one() -> None:
    assert metadata.version("megatron-core") == VERSION


def test_entries_of_real_models_are_known() -> None:
    """Entries of config.json of Qwen2.5-7B, Qwen3-8B, Qwen3-30B-A3B and of Llama 2."""
    common = {"architectures": ["X"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 64}
    common |= {"initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 4096, "use_cache": True}
    common |= {"num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    common |= {"rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128}
    common |= {"transformers_version": "4.40.0", "attention_dropout": 0.0}
    qwen = {"max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False}
    third = {"attention_bias": False, "head_dim": 16, "rope_scaling": None, "sliding_window": None}
    models = {
        "qwen2": qwen,
        "qwen3": qwen | third,
        "qwen3_moe": qwen
        | third
        | {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 32, "norm_topk_prob": True}
        | {"num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001},
        "llama": {"pretraining_tp": 1, "rope_scaling": None, "mlp_bias": False, "attention_bias": False},
    }
    for family, more in models.items():
        assert list(unknown({**common, "model_type": family, **more})) == []
