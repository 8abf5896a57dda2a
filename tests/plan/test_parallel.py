"""A mesh that a run or its model does not divide into is refused by a sentence."""

import json
from pathlib import Path

import pytest

from pipeline.config import load_config
from pipeline.plan.parallel import problems
from tests.sentences import Named

DENSE = {"model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 100}
LAYERS = {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64, "head_dim": 8}
EXPERTS = DENSE | {"model_type": "qwen3_moe", "num_experts": 9}


@pytest.mark.parametrize(
    ("model", "workers", "mesh", "keys"),
    [
        (DENSE, 4, ["tensor=2", "replicate=2"], []),
        (DENSE, 3, [], []),
        (EXPERTS, 4, ["replicate=4"], []),
        (
            DENSE,
            6,
            ["tensor=2", "replicate=2"],
            ["actor.parallel.tensor trainer.num_workers"],
        ),
        (DENSE, 6, ["sequence=2"], []),
        (DENSE, 6, ["sequence=3"], []),
        (EXPERTS, 12, ["sequence=3", "replicate=2"], []),
        (DENSE, 3, ["sequence=2"], ["actor.parallel.sequence trainer.num_workers"]),
        (DENSE, 4, ["sequence=4"], ["actor.parallel.sequence num_attention_heads model.path"]),
        (DENSE, 4, ["sequence=2", "tensor=2"], ["actor.parallel.sequence num_attention_heads"]),
        (
            DENSE | {"model_type": "mistral", "sliding_window": 64},
            2,
            ["sequence=2"],
            ["actor.parallel.sequence model.path"],
        ),
        (
            DENSE | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            2,
            ["sequence=2"],
            [],
        ),
        (DENSE | {"hidden_size": "x"}, 2, ["sequence=2"], ["model.path config.json"]),
        (DENSE, 3, ["tensor=3"], ["actor.parallel.tensor num_key_value_heads", "actor.parallel.tensor vocab_size"]),
        (DENSE, 2, ["tensor=2", "expert=2"], ["actor.parallel.expert model.path"]),
        (EXPERTS, 2, ["tensor=2", "expert=2"], ["actor.parallel.expert num_experts"]),
        (EXPERTS, 2, ["tensor=2"], ["actor.parallel.expert model.path"]),
        (
            DENSE | {"model_type": "gpt2"},
            2,
            ["tensor=2"],
            ["actor.parallel.tensor model.path"],
        ),
        (DENSE | LAYERS, 4, ["pipeline=2"], []),
        (DENSE | LAYERS, 12, ["pipeline=2", "sequence=6"], []),
        (DENSE | LAYERS, 4, ["pipeline=2", "sequence=4"], ["trainer.num_workers", "actor.parallel.sequence=4"]),
        (EXPERTS | LAYERS, 12, ["pipeline=3", "replicate=2"], []),
        (DENSE | LAYERS, 3, ["pipeline=2"], ["actor.parallel.pipeline trainer.num_workers"]),
        (DENSE | LAYERS, 4, ["pipeline=4"], ["actor.parallel.pipeline=4 model.path layers"]),
        (DENSE | {"model_type": "gpt2", "n_layer": 2}, 2, ["pipeline=2"], ["actor.parallel.pipeline model.path"]),
        (
            DENSE | LAYERS | {"model_type": "mistral", "sliding_window": 64},
            2,
            ["pipeline=2"],
            ["actor.parallel.pipeline model.path sliding_window"],
        ),
        (
            DENSE | LAYERS | {"model_type": "granite", "embedding_multiplier": 2.0},
            2,
            ["pipeline=2"],
            ["actor.parallel.pipeline model.path"],
        ),
        (DENSE | LAYERS | {"hidden_size": "x"}, 2, ["pipeline=2"], ["model.path config.json"]),
    ],
)
def test_what_cannot_be_divided(
    tmp_path: Path, model: dict, workers: int, mesh: list[str], keys: list[str], named: Named
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    settings = [f"actor.parallel.{setting}" for setting in mesh]
    config = load_config([f"model.path={tmp_path}", f"trainer.num_workers={workers}", *settings])
    for sentence, its_keys in zip(problems(config), keys, strict=True):
        named(sentence, its_keys)


def test_families_with_names_of_their_own_have_heads_too(tmp_path: Path, named: Named) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": 12, "n_embd": 48}))
    keys = [f"model.path={tmp_path}", "trainer.num_workers=8"]
    assert list(problems(load_config([*keys, "actor.parallel.sequence=4"]))) == []
    [found] = problems(load_config([*keys, "actor.parallel.sequence=8"]))
    named(found, "actor.parallel.sequence=8 num_attention_heads=12 model.path")


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (["algorithm.adv_estimator=gae"], "critic algorithm.adv_estimator"),
        (["model.lora.rank=4"], "model.lora.rank=4"),
        (["model.vision=frozen"], "model.vision=frozen"),
        (["actor.optim.name=adamw_8bit", "model.dtype=bfloat16"], "actor.optim.name=adamw_8bit model.dtype"),
        (["rollout.replay_routes=true"], "rollout.replay_routes"),
    ],
)
def test_what_stages_cannot_have(tmp_path: Path, settings: list[str], keys: str, named: Named) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS | LAYERS))
    run = [f"model.path={tmp_path}", "trainer.num_workers=2", *settings]
    assert list(problems(load_config(run))) == []
    [found] = problems(load_config([*run, "actor.parallel.pipeline=2"]))
    named(found, f"actor.parallel.pipeline=2 {keys}")


def test_a_reference_in_the_train_workers_is_cut_too(tmp_path: Path, named: Named) -> None:
    for name, layers in (("policy", 3), ("reference", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(DENSE | LAYERS | {"num_hidden_layers": layers}))
    run = [f"model.path={tmp_path}/policy", "trainer.num_workers=2", "actor.parallel.pipeline=2"]
    run += [f"scoring.reference.path={tmp_path}/reference", "actor.use_kl_loss=true"]
    assert list(problems(load_config(run))) == []
    [found] = problems(load_config([*run, "scoring.reference.placement=train_workers"]))
    named(found, "actor.parallel.pipeline=2 scoring.reference.path layer")


@pytest.mark.parametrize(("parts", "divides"), [(1, True), (2, True), (3, False), (4, False), (6, True), (12, False)])
def test_engines_divide_heads(tmp_path: Path, parts: int, divides: bool, named: Named) -> None:
    """6 heads of queries and 2 of keys: with 6 GPUs each of the latter is on three, with 3 neither two nor one of them
    has whole ones."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    keys = [f"model.path={tmp_path}", "rollout.num_gpus=1", f"rollout.tensor_parallel_size={parts}"]
    found = list(problems(load_config(keys)))
    assert len(found) == (not divides)
    for sentence in found:
        named(sentence, f"rollout.tensor_parallel_size={parts} num_attention_heads=6 num_key_value_heads=2 model.path")


def test_adapters_are_not_divided(tmp_path: Path, named: Named) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    keys = [f"model.path={tmp_path}", "model.lora.rank=4", "trainer.num_workers=2"]
    assert list(problems(load_config([*keys, "actor.parallel.replicate=2"]))) == []
    [found] = problems(load_config([*keys, "actor.parallel.tensor=2"]))
    named(found, "model.lora.rank=4 actor.parallel.tensor=2")


def test_ranks_that_divide_positions_divide_no_other_attention(tmp_path: Path, named: Named) -> None:
    """Adapters are trained as without them; rows that must pass padded are refused."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    keys = [f"model.path={tmp_path}", "model.lora.rank=4", "trainer.num_workers=2", "actor.parallel.sequence=2"]
    assert list(problems(load_config(keys))) == []
    [found] = problems(load_config([*keys, "model.attn_implementation=eager"]))
    named(found, "actor.parallel.sequence=2 model.attn_implementation")


def test_a_reference_beside_the_actor_is_divided_as_it_is(tmp_path: Path, named: Named) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"num_key_value_heads": 3}))
    more = ["model.path=owner/model", f"scoring.reference.path={tmp_path}", "actor.use_kl_loss=true"]
    more += ["trainer.num_workers=2", "actor.parallel.tensor=2"]
    assert list(problems(load_config(more))) == []
    [found] = problems(load_config([*more, "scoring.reference.placement=train_workers"]))
    named(found, "actor.parallel.tensor num_key_value_heads=3 scoring.reference.path")


def test_the_critic_is_divided_as_the_actor_is(tmp_path: Path, named: Named) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"num_key_value_heads": 3}))
    more = ["model.path=owner/model", f"critic.path={tmp_path}", "algorithm.adv_estimator=gae", "trainer.num_workers=2"]
    [found] = problems(load_config([*more, "actor.parallel.tensor=2"]))
    named(found, "actor.parallel.tensor num_key_value_heads=3 critic.path")
