"""Low-rank adapters against explicitly merged weights, on one rank and on two, and in peft."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.config import Config
from pipeline.config.learner import FSDPConfig
from pipeline.config.model import LoraConfig
from pipeline.models import adapter, lora
from pipeline.models.fsdp import full_state_dict, save_hf, shard
from pipeline.models.policy import Policy, load_policy
from pipeline.models.reward_model import load_reward_model
from pipeline.models.tokenizer import load_tokenizer
from pipeline.models.value import load_value_model
from pipeline.train.setup import build_actor, build_critic
from tests.train.updates import CPU, make_config, save_update, spawn, table, update, with_values, worlds

IDS = torch.arange(3, 27).reshape(2, 12)
INDEX, TARGETS = torch.tensor([3, 4, 5, 17, 20]), torch.tensor([5, 9, 4, 30, 7])


def with_lora(model: Path, **settings: object) -> Config:
    """A run with adapters of rank 4 at scale 2."""
    config = make_config(model)
    config.model.lora = LoraConfig(rank=4, alpha=8.0)
    for name, value in settings.items():
        setattr(config.model.lora, name, value)
    return config


def moved_policy(model: Path, **settings: object) -> Policy:
    """A policy whose adapters are not zero."""
    policy = load_policy(with_lora(model, **settings).model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def log_probs(policy: Policy) -> Tensor:
    return policy(IDS, INDEX, TARGETS)[0]


def merged_policy(model: Path, policy: Policy) -> Policy:
    """A policy without adapters that has the merged weights."""
    plain = load_policy(make_config(model).model)
    weights = dict(lora.published(policy))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights
    return plain


def test_log_probs_are_those_of_merged_weights(tiny_model: Path) -> None:
    policy, base = moved_policy(tiny_model), load_policy(make_config(tiny_model).model)
    own, merged = log_probs(policy), log_probs(merged_policy(tiny_model, policy))
    torch.testing.assert_close(own, merged, rtol=1e-5, atol=1e-5)
    assert (own - log_probs(base)).abs().max() > 0.1
    with lora.without_adapters(policy):
        assert torch.equal(log_probs(policy), log_probs(base))
    assert torch.equal(log_probs(policy), own)


def test_gradients_are_those_through_merged_weights(tiny_model: Path) -> None:
    """dL/dB = scale dL/dW A^T and dL/dA = scale B^T dL/dW, with W the merged weight."""
    policy = moved_policy(tiny_model)
    plain = merged_policy(tiny_model, policy)
    for module in (policy, plain):
        log_probs(module).sum().backward()
    layers = {name: part for name, part in policy.named_modules() if hasattr(part, "lora_A")}
    assert len(layers) == 2 * 7, "all linear layers of both blocks"
    for name, layer in layers.items():
        whole = plain.get_submodule(name).weight.grad
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        torch.testing.assert_close(b.grad, 2.0 * whole @ a.detach().T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.grad, 2.0 * b.detach().T @ whole, rtol=1e-4, atol=1e-5)
    trained = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in policy.named_parameters() if ".lora_" in name}


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        (r".*layers\.1\.mlp\.(up|down)_proj", {"up_proj", "down_proj"}),
        (["layers.0.mlp.gate_proj"], {"gate_proj"}),
    ],
)
def test_targets_choose_layers_as_peft_reads_them(tiny_model: Path, targets: object, layers: set[str]) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    policy = load_policy(with_lora(tiny_model, target_modules=targets).model)
    ours = {name.removeprefix("lm.") for name, part in policy.named_modules() if hasattr(part, "lora_A")}
    assert {name.rpartition(".")[2] for name in ours} == layers
    plain = get_peft_model(load_policy(make_config(tiny_model).model).lm, PeftConfig(r=4, target_modules=targets))
    theirs = {name.removeprefix("base_model.model.") for name, part in plain.named_modules() if hasattr(part, "lora_A")}
    assert ours == theirs


@pytest.mark.parametrize("targets", [["q_proj", "query"], ["lm_head"], "q_proj"])
def test_refuses_targets_that_match_nothing(tiny_model: Path, targets: object) -> None:
    with pytest.raises(ValueError, match=r"target_modules: .* matches no linear layer inside of the Qwen3ForCausalLM"):
        load_policy(with_lora(tiny_model, target_modules=targets).model)


def test_starts_as_the_base_with_equal_adapters(tiny_model: Path) -> None:
    torch.manual_seed(1)
    first = load_policy(with_lora(tiny_model).model)
    before = torch.get_rng_state()
    second = load_policy(with_lora(tiny_model).model)
    assert torch.equal(before, torch.get_rng_state())
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(log_probs(first), log_probs(load_policy(make_config(tiny_model).model)))


def test_adapters_of_a_bfloat16_base_are_float32(tiny_model: Path) -> None:
    config = with_lora(tiny_model)
    config.model.dtype = "bfloat16"
    policy = load_policy(config.model)
    kinds = {".lora_" in name: parameter.dtype for name, parameter in policy.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    assert {tensor.dtype for name, tensor in lora.published(policy) if "proj" in name} == {torch.float32}
    # Heads that are trained beside the adapters, too.
    heads = load_value_model(config.model).head, load_reward_model(config.model, new_head=True).lm.score
    assert {parameter.dtype for head in heads for parameter in head.parameters()} == {torch.float32}


@pytest.mark.usefixtures("one_rank")
def test_a_bfloat16_base_trains_sharded(tiny_model: Path) -> None:
    config = with_lora(tiny_model)
    config.model.dtype = "bfloat16"
    for build, rows in ((build_actor, table()), (build_critic, with_values(table()))):
        learner = build(config, CPU, 10)
        before = full_state_dict(learner.module)
        update(learner, rows)
        after = full_state_dict(learner.module)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed and all("proj" in name or name.startswith("head.") for name in changed)


def _updates(rank: int, model: str, folder: str) -> None:
    for world in worlds(rank, folder):
        for name in ("actor", "copies", "critic"):
            build, rows = (build_critic, with_values(table())) if name == "critic" else (build_actor, table())
            config = with_lora(Path(model))
            config.actor.parallel.replicate = world if name == "copies" else 1
            learner = build(config, CPU, 10)
            assert learner.mesh.shards.size() == (1 if name == "copies" else world)
            base = {n: p.full_tensor() for n, p in learner.module.named_parameters() if not p.requires_grad}
            save_update(learner, rows, f"{folder}/{name}{world}")
            numbers = sum(state["exp_avg"].numel() for state in learner.optimizer.state.values())
            assert numbers == sum(p.numel() for p in learner.module.parameters() if p.requires_grad)
            for n, parameter in learner.module.named_parameters():
                assert n not in base or torch.equal(base[n], parameter.full_tensor()), n
            raw = {n: p.full_tensor().detach() for n, p in learner.module.named_parameters() if p.requires_grad}
            if dist.get_rank() == 0:
                torch.save(raw, f"{folder}/{name}{world}.trained")
            dist.barrier()


@pytest.mark.slow
def test_two_ranks_train_and_publish_as_one(tiny_model: Path, tmp_path: Path) -> None:
    spawn(_updates, str(tiny_model), str(tmp_path))
    for name in ("actor", "copies", "critic"):
        for end in (".trained", ""):
            one, two = (torch.load(tmp_path / f"{name}{world}{end}", weights_only=False) for world in (1, 2))
            one, two = (one, two) if end else (one["state"], two["state"])
            assert one.keys() == two.keys() and ("lora_B" in str(one.keys())) == bool(end)
            for key in one:
                torch.testing.assert_close(one[key], two[key], rtol=0, atol=1e-6)
    start = full_state_dict(load_policy(make_config(tiny_model).model))
    moved = torch.load(tmp_path / "actor2", weights_only=False)["state"]
    assert max(float((start[key] - moved[key]).abs().max()) for key in start) > 1e-4
    assert torch.equal(start["lm.model.norm.weight"], moved["lm.model.norm.weight"])


def saved(model: Path, folder: Path) -> Policy:
    """The policy that `save_hf` has written into `folder`."""
    policy = moved_policy(model)
    save_hf(policy, load_tokenizer(make_config(model).model), folder)
    return policy


def test_saves_the_merged_model_and_an_adapter_that_peft_reads(tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = saved(tiny_model, tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "model" / "adapter")
    with torch.no_grad():
        expected = policy.lm(IDS).logits
        torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(read(IDS).logits, expected)
    settings = json.loads((tmp_path / "model" / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tiny_model)
    assert settings["target_modules"] == sorted({name.rpartition(".")[2] for name in matrices_of(tiny_model)})


def test_starts_from_an_adapter(tiny_model: Path, tmp_path: Path) -> None:
    policy = saved(tiny_model, tmp_path / "model")
    again = load_policy(with_lora(tiny_model, path=str(tmp_path / "model" / "adapter")).model)
    assert torch.equal(log_probs(again), log_probs(policy))
    config = with_lora(tiny_model, path=str(tmp_path / "model" / "adapter"))
    assert all("lora_B" not in n or not p.any() for n, p in load_value_model(config.model).named_parameters())
    with pytest.raises(ValueError, match=r"does not fit model.path and model.lora.target_modules"):
        load_policy(with_lora(tiny_model, path=config.model.lora.path, target_modules=["q_proj"]).model)


def matrices_of(model: Path) -> dict[str, tuple[int, int]]:
    lm = load_policy(make_config(model).model).lm
    return {
        name: (part.out_features, part.in_features)
        for name, part in lm.named_modules()
        if isinstance(part, nn.Linear) and name != "lm_head"
    }


def test_finds_unfitting_adapters_by_their_files(tiny_model: Path, tmp_path: Path) -> None:
    saved(tiny_model, tmp_path / "model")
    folder, matrices = tmp_path / "model" / "adapter", matrices_of(tiny_model)

    def found(shapes: dict[str, tuple[int, int]] = matrices, **settings: object) -> str:
        config = LoraConfig(rank=4, alpha=8.0, path=str(folder))
        for name, value in settings.items():
            setattr(config, name, value)
        return " | ".join(adapter.problems(config, shapes, "BASE"))

    assert found() == ""
    assert "r=4 and model.lora.rank=8; set model.lora.rank=4" in found(rank=8)
    assert "lora_alpha=8.0 and model.lora.alpha=16; set model.lora.alpha=8.0" in found(alpha=16.0)
    other = {name: (rows, 2 * columns) for name, (rows, columns) in matrices.items()}
    assert "an adapter of another base: model.path=BASE has" in found(other)
    assert "holds no adapter_config.json" in found(path=str(tmp_path))
    assert "query matches no linear layer inside of model.path=BASE" in found(target_modules=["query"])
    assert "model.lora.rank=1000 is more than the" in found(rank=1000)
    layers = "[down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj]"
    fewer = found(target_modules=["q_proj"])
    assert "has 14 layers and model.lora.target_modules=['q_proj'] chooses 2, model.layers.0.mlp.down_proj" in fewer
    assert fewer.endswith(f"on one side only; set it to {layers}")
    deeper = {name.replace("layers.1.", "layers.2."): shape for name, shape in matrices.items()} | matrices
    assert "chooses 21" in found(deeper) and found(deeper).endswith("set it to a list of its layers")
    settings = json.loads((folder / "adapter_config.json").read_text())
    for entry, value, wanted in (
        ("use_dora", True, "its use_dora is True"),
        ("lora_bias", True, "its lora_bias is True"),
        ("init_lora_weights", "pissa_niter_4", "changed at its start (init_lora_weights is pissa_niter_4); merge it"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(settings | {entry: value}))
        assert wanted in found()
    for nothing in ("[1]", "{}"):
        (folder / "adapter_config.json").write_text(nothing)
        assert "adapter_config.json has no r and lora_alpha; give the folder of an adapter" in found()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    whole = load_file(folder / "adapter_model.safetensors") | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}
    save_file(whole, folder / "adapter_model.safetensors")
    assert "holds more than low-rank matrices: lm_head.weight;" in found()


def test_a_reward_model_trains_its_head_beside_the_adapter(tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    model = load_reward_model(with_lora(tiny_model).model, new_head=True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "lm.score.weight" in trained and all(".lora_" in name for name in trained - {"lm.score.weight"})
    with torch.no_grad():
        for name in trained:
            model.get_parameter(name).normal_(0.0, 0.1)
    save_hf(model, load_tokenizer(make_config(tiny_model).model), tmp_path / "model")
    lengths = torch.tensor([12, 12])
    merged = load_reward_model(make_config(tmp_path / "model").model)
    torch.testing.assert_close(merged(IDS, lengths), model(IDS, lengths), rtol=1e-5, atol=1e-5)
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    read = PeftModel.from_pretrained(base, tmp_path / "model" / "adapter")
    last = read.base_model.model.model(IDS).last_hidden_state[:, -1]
    torch.testing.assert_close(read.base_model.model.score(last)[:, 0], model(IDS, lengths), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_sharding_keeps_what_is_published(tiny_model: Path) -> None:
    policy = moved_policy(tiny_model)
    before = {name: tensor.detach().clone() for name, tensor in lora.published(policy)}
    alone = {name: tensor.detach().clone() for name, tensor in lora.published(policy, adapter_alone=True)}
    assert alone and not alone.keys() & before.keys()
    shard(policy, make_config(tiny_model).actor.fsdp, CPU)
    for expected, adapter_alone in ((before, False), (alone, True)):
        found = {name: tensor.full_tensor() for name, tensor in lora.published(policy, adapter_alone)}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.usefixtures("one_rank")
def test_a_validation_before_leaves_what_is_saved_and_published(tiny_model: Path) -> None:
    """A pass without a backward pass may leave weights gathered, in the type of the computation."""
    policy = moved_policy(tiny_model)
    shard(policy, FSDPConfig(reshard_after_forward=False, param_dtype="bfloat16"), CPU)

    def found() -> list[dict[str, Tensor]]:
        published = {name: whole.full_tensor().clone() for name, whole in lora.published(policy)}
        return [lora.adapter_state(policy), published]

    before = found()
    with torch.no_grad():
        log_probs(policy)
    after = lora.adapter_state(policy)
    with torch.no_grad():
        log_probs(policy)
    for expected, now in zip(before, (after, found()[1]), strict=True):
        assert all(torch.equal(now[name], expected[name]) and now[name].dtype == torch.float32 for name in expected)


def test_a_frozen_head_gets_no_gradient(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Size] = []
    zeros_like = torch.zeros_like

    def counted(tensor: Tensor, **options: object) -> Tensor:
        made.append(tensor.shape)
        return zeros_like(tensor, **options)

    monkeypatch.setattr("pipeline.models.head.torch.zeros_like", counted)
    policy, plain = moved_policy(tiny_model), load_policy(make_config(tiny_model).model)
    shape = plain.lm.get_output_embeddings().weight.shape
    log_probs(policy).sum().backward()
    assert shape not in made
    log_probs(plain).sum().backward()
    assert shape in made


def family(folder: Path, kind: str, **sizes: object) -> Config:
    """A run with adapters on a model of which only the `config.json` is there."""
    import transformers

    getattr(transformers, f"{kind}Config")(vocab_size=300, **sizes).save_pretrained(folder)
    return with_lora(folder)


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def test_the_share_of_the_weights_with_adapters_is_said(tmp_path: Path) -> None:
    dense = lora.coverage(family(tmp_path / "dense", "Qwen3", **SMALL, **HEADS).model)
    assert dense and dense.complete and dense.text == "on 14 linear layers with 100.0% of the weights inside"
    config = family(tmp_path / "moe", "Qwen3Moe", **SMALL, **HEADS, **EXPERTS)
    experts = lora.coverage(config.model)
    attention, mlp, router = 64 * 16 * (4 + 2 + 2 + 4), 3 * 64 * 32 * 8, 64 * 8
    total = attention + mlp + router
    assert experts and not experts.complete
    assert experts.text == (
        f"on 8 linear layers with {attention / total:.1%} of the weights inside of model.path={tmp_path / 'moe'}; "
        "model.lora.target_modules=all-linear covers less than expected: these are not linear layers in transformers, "
        f"so they get no adapter: mlp.experts.gate_up_proj ({mlp * 2 / 3 / total:.1%}), mlp.experts.down_proj "
        f"({mlp / 3 / total:.1%}), mlp.gate ({router / total:.1%})"
    )
    config.model.lora.target_modules = ["q_proj"]
    some = lora.coverage(config.model)
    assert some and some.complete and some.text.startswith(f"on 2 linear layers with {64 * 64 / total:.1%} ")
    assert lora.coverage(make_config(tmp_path / "moe").model) is None


def test_targets_that_miss_only_the_experts_are_named(tmp_path: Path) -> None:
    """The first layer has no experts here, and its linear layers match."""
    config = family(tmp_path, "Qwen3Moe", **SMALL, **HEADS, **EXPERTS, mlp_only_layers=[0])
    config.model.lora.target_modules = ["q_proj", "down_proj"]
    found = lora.coverage(config.model)
    assert found and not found.complete and found.text.startswith("on 3 linear layers with ")
    assert re.search(r"so they get no adapter: mlp\.experts\.down_proj \([0-9.]+%\)$", found.text)


def test_layers_called_as_experts_were_keep_their_adapters(tmp_path: Path) -> None:
    """A shared expert has linear layers; all that is trained is published."""
    import transformers

    experts = {**EXPERTS, "shared_expert_intermediate_size": 32}
    config = family(tmp_path, "Qwen2Moe", **SMALL, num_attention_heads=4, num_key_value_heads=2, **experts)
    transformers.Qwen2MoeForCausalLM(transformers.AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    policy = load_policy(config.model)
    layers = {name.partition(".lora_")[0] for name, _ in policy.named_parameters() if ".lora_" in name}
    assert {name.rpartition(".")[2] for name in layers} >= {"gate_proj", "up_proj", "down_proj", "q_proj"}
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.01)
    base, published = load_policy(make_config(tmp_path).model), dict(lora.published(policy))
    changed = {name for name, weight in base.named_parameters() if not torch.equal(weight, published[name])}
    assert changed == {f"{name}.weight" for name in layers}


@pytest.mark.parametrize(("kind", "sizes"), [("GPT2", {"n_embd": 64, "n_layer": 1, "n_head": 4})])
def test_a_model_without_linear_layers_is_refused_before_it_is_loaded(
    tmp_path: Path, kind: str, sizes: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="all-linear matches no linear layer inside of the GPT2LMHeadModel"):
        lora.coverage(family(tmp_path, kind, **sizes).model)
    with pytest.raises(ValueError, match=r"target_modules does not fit model\.path: .*'out_proj' is incompatible"):
        lora.coverage(family(tmp_path / "mamba", "Mamba", hidden_size=64, num_hidden_layers=1).model)
    with pytest.raises(ValueError, match=r"model\.path=.*nowhere cannot be loaded"):
        lora.coverage(with_lora(tmp_path / "nowhere").model)
