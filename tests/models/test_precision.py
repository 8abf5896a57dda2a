"""A pass in another type gives the numbers of a model that was loaded in that type, and leaves the model as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

from pipeline.config.learner import FSDPConfig
from pipeline.config.model import LoraConfig, ModelConfig
from pipeline.models.fsdp import shard
from pipeline.models.policy import Policy, load_policy
from pipeline.models.precision import computing_in
from tests.models.test_pretrained import CAP, SIZES, saved
from tests.train.updates import CPU, spawn

CONFIGS: dict[str, Any] = {
    "untied": lambda: hf.Qwen3Config(**SIZES, tie_word_embeddings=False),
    "tied": lambda: hf.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "bias": lambda: hf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "experts": lambda: hf.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "cap": lambda: hf.Gemma2Config(**SIZES, **CAP, attn_logit_softcapping=5.0),
}
IDS = torch.arange(40)[None] % 90 + 3


def log_probs(policy: Policy) -> torch.Tensor:
    ids = IDS.to(CPU)
    with torch.no_grad():
        return policy(ids, torch.arange(39, device=CPU), ids[0, 1:])[0].cpu()


def load(path: Path, dtype: str = "float32", **more: Any) -> Policy:
    return load_policy(ModelConfig(path=str(path), dtype=dtype, **more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precision")


@pytest.mark.parametrize("family", CONFIGS)
def test_as_a_model_of_that_type(family: str, folder: Path) -> None:
    path = saved(folder / family, hf.AutoModelForCausalLM, CONFIGS[family]())
    policy, rounded = load(path), load(path, "bfloat16")
    before = {name: (id(weight), weight.clone()) for name, weight in policy.named_parameters()}
    own = log_probs(policy)
    with computing_in(policy, torch.bfloat16):
        found = log_probs(policy)
    torch.testing.assert_close(found, log_probs(rounded), atol=0, rtol=0)
    assert not torch.equal(found, own)
    with computing_in(policy, torch.float32):
        torch.testing.assert_close(log_probs(policy), own, atol=0, rtol=0)
    torch.testing.assert_close(log_probs(policy), own, atol=0, rtol=0)
    for name, weight in policy.named_parameters():
        assert id(weight) == before[name][0] and torch.equal(weight, before[name][1]), name
    # The other way: float32 of weights that are rounded already.
    exact = load(path, "bfloat16").float()
    with computing_in(rounded, torch.float32):
        torch.testing.assert_close(log_probs(rounded), log_probs(exact), atol=1e-6, rtol=0)


def test_adapters(folder: Path) -> None:
    path = saved(folder / "tied", hf.AutoModelForCausalLM, CONFIGS["tied"]())
    torch.manual_seed(0)
    policy = load(path, lora=LoraConfig(rank=4))
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    with computing_in(policy, torch.bfloat16):
        found = log_probs(policy)
    own = log_probs(policy)
    rounded = log_probs(policy.to(torch.bfloat16))
    # Which rounds the frequencies of the rope, too.
    assert 1e-3 < (found - rounded).abs().mean() < 2 * (found - own).abs().mean()


def test_all_is_restored_after_an_error(folder: Path) -> None:
    policy = load(saved(folder / "tied", hf.AutoModelForCausalLM, CONFIGS["tied"]()))
    own = log_probs(policy)
    broken = policy.decoder.layers[1].mlp.down_proj
    hook = broken.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), computing_in(policy, torch.bfloat16):
        log_probs(policy)
    hook.remove()
    torch.testing.assert_close(log_probs(policy), own, atol=0, rtol=0)
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in policy.modules())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", ["tied", "untied", "experts"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_gathered_weights(family: str, param_dtype: str, folder: Path) -> None:
    path = saved(folder / family, hf.AutoModelForCausalLM, CONFIGS[family]())
    plain = load(path)
    policy = shard(load(path), FSDPConfig(param_dtype=param_dtype), CPU)
    own = log_probs(policy)
    with computing_in(policy, torch.bfloat16):
        found = log_probs(policy)
    torch.testing.assert_close(found, log_probs(load(path, "bfloat16")), atol=0, rtol=0)
    with computing_in(policy, torch.float32):
        exact = log_probs(policy)
    if param_dtype == "float32":
        torch.testing.assert_close(exact, log_probs(plain), atol=1e-6, rtol=0)
    else:
        assert (exact - log_probs(plain)).abs().max() < (own - log_probs(plain)).abs().max()
    torch.testing.assert_close(log_probs(policy), own, atol=0, rtol=0)


def _slices(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    policy = shard(load(Path(folder)), FSDPConfig(), CPU)
    own = log_probs(policy)
    with computing_in(policy, torch.bfloat16):
        found = log_probs(policy)
    torch.testing.assert_close(found, log_probs(load(Path(folder), "bfloat16")), atol=0, rtol=0)
    torch.testing.assert_close(log_probs(policy), own, atol=0, rtol=0)
    dist.destroy_process_group()


def test_two_ranks(folder: Path) -> None:
    path = saved(folder / "tied", hf.AutoModelForCausalLM, CONFIGS["tied"]())
    spawn(_slices, str(path))
