"""The experts of a mixture: noted in one pass, replayed in another, in all families that can."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline.config.model import ModelConfig
from pipeline.models.architecture import ROUTERS
from pipeline.models.batch import TokenBatch, TrainBatch
from pipeline.models.packing import pack
from pipeline.models.policy import Policy, load_frozen
from pipeline.models.sharing import Passes, share_prefixes
from pipeline.rows import ROUTES, UNROUTED
from tests.train.updates import table, with_routes

LAYERS, CHOSEN, EXPERTS = 3, 2, 8
WIDTH = LAYERS * CHOSEN
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": CHOSEN,
    "pad_token_id": None,
}
MADE: dict[str, Any] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=EXPERTS)),
    "olmoe normalised": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=24, norm_topk_prob=True)
    ),
}
PROMPTS, RESPONSES = [[1, 2, 3], [1, 2, 3], [5, 6]], [[4, 5, 6], [7, 8], [9, 9, 9, 9]]


def model(name: str = "qwen3_moe", spread: float = 0.3) -> Any:
    torch.manual_seed(3)
    lm = MADE[name]()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return lm


def policy(name: str = "qwen3_moe") -> Policy:
    return Policy(model(name))


def rows(routes: np.ndarray | None = None) -> TokenBatch:
    made = TokenBatch.of(PROMPTS, RESPONSES)
    made.routes = routes
    return made


def noted(own: Policy, made: TokenBatch) -> np.ndarray:
    """The experts of all rows, by the model itself, one row a pass."""
    found = np.full((int(made.token_offsets[-1]), own.routers.width), UNROUTED, np.int16)
    for row in range(len(made)):
        own.routers.note()
        own(**pack(made, [[row]]).arguments)
        start, passed = made.token_offsets[row], own.routers.noted().numpy()
        found[start : start + len(passed)] = passed
    return found


def test_every_family_with_a_known_router_has_a_case() -> None:
    assert {name.split()[0] for name in MADE} == {*ROUTERS.values()}
    assert policy("qwen3_moe").routers.width == WIDTH
    dense = Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in SIZES.items() if k != "num_experts_per_tok"}))
    assert Policy(dense).routers.width == 0


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("form", ["padded", "packed", "shared"])
def test_own_experts_change_nothing(name: str, form: str) -> None:
    own = policy(name)
    assert Passes.of(own, "always").shared
    plain = rows()
    told = rows(noted(own, plain))
    packs = [[0, 1], [2]] if form == "shared" else [[0], [1], [2]]
    kept, made = (pack(each, packs, packed=form != "padded") for each in (plain, told))
    if form == "padded":
        own.lm.config._attn_implementation = "sdpa"
    expected = own(**kept.arguments).log_probs
    gradients(own, expected)
    before = {n: p.grad.clone() for n, p in own.named_parameters() if p.grad is not None}
    found = own(**made.arguments).log_probs
    assert own.routers.differing()[0] == 0 and own.routers.differing()[1] > 0
    assert torch.equal(found, expected)
    gradients(own, found)
    assert all(torch.equal(p.grad, before[n]) for n, p in own.named_parameters() if p.grad is not None)


def gradients(own: Policy, log_probs: torch.Tensor) -> None:
    own.zero_grad()
    log_probs.sum().backward()


@pytest.mark.parametrize("name", MADE)
def test_the_experts_of_another_model_give_its_choice_with_own_weights(name: str) -> None:
    """Experts are those that were told, and their weights the router's own probabilities of them."""
    own = policy(name)
    rng = np.random.default_rng(0)
    plain = rows()
    drawn = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(int(plain.token_offsets[-1]) * LAYERS)])
    told = rows(drawn.reshape(-1, WIDTH).astype(np.int16))
    seen: list[tuple[torch.Tensor, ...]] = []
    for module in own.lm.modules():
        if type(module).__name__ in ROUTERS:
            module.register_forward_hook(lambda _, __, output: seen.append(output))
    found = own(**pack(told, [[0], [1], [2]], packed=False).arguments)
    differing, count = own.routers.differing()
    assert 0 < differing < count
    gradients(own, found.log_probs)
    made = pack(told, [[0], [1], [2]])
    assert made.routes is not None
    known = (made.routes[:, 0] != UNROUTED).numpy()
    for layer, (logits, weights, experts, *_) in enumerate(seen):
        part = slice(layer * CHOSEN, (layer + 1) * CHOSEN)
        assert np.array_equal(experts[known].numpy(), made.routes[known][:, part].numpy())
        probabilities = logits.softmax(-1).gather(1, experts)
        if name != "olmoe":
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        assert torch.allclose(weights, probabilities, atol=1e-6)
    routers = [m for m in own.lm.modules() if type(m).__name__ in ROUTERS]
    assert all(router.weight.grad is not None and router.weight.grad.abs().sum() > 0 for router in routers)


def test_gradient_checkpointing_computes_the_same_experts_again() -> None:
    told = rows(noted(policy(), rows()))
    rng = np.random.default_rng(1)
    assert told.routes is not None
    told.routes[::2] = np.where(told.routes[::2] < 0, UNROUTED, rng.integers(0, EXPERTS, told.routes[::2].shape))
    grads = []
    for checkpointing in (False, True):
        own = policy()
        if checkpointing:
            own.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        own.train()
        found = own(**pack(told, [[0], [1], [2]]).arguments)
        own.routers.differing()
        gradients(own, found.log_probs)
        differing = own.routers.differing()
        grads.append(({n: p.grad for n, p in own.named_parameters() if p.grad is not None}, differing))
    assert grads[0][1] == grads[1][1], "a layer that is computed again is not counted again"
    assert all(torch.allclose(grads[0][0][n], grads[1][0][n], atol=1e-6) for n in grads[0][0])


def test_a_pass_without_routes_is_the_routers_own() -> None:
    own, plain = policy(), rows()
    inputs = pack(plain, [[0], [1], [2]])
    expected = own(**inputs.arguments).log_probs
    other = rows(np.full((int(plain.token_offsets[-1]), WIDTH), 0, np.int16))
    assert not torch.allclose(own(**pack(other, [[0], [1], [2]]).arguments).log_probs, expected)
    assert torch.equal(own(**inputs.arguments).log_probs, expected)
    assert own.routers.differing() == (0.0, 0)
    unknown = rows(np.full((int(plain.token_offsets[-1]), WIDTH), UNROUTED, np.int16))
    assert torch.equal(own(**pack(unknown, [[0], [1], [2]]).arguments).log_probs, expected)


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (np.zeros((1, WIDTH + 2)), f"has {WIDTH + 2} experts for each token, and this model has {WIDTH}"),
        (np.full((1, WIDTH), EXPERTS), f"experts {EXPERTS} to {EXPERTS}, and this model has {EXPERTS}"),
        (np.full((1, WIDTH), -2), "names the experts -2 to -2"),
    ],
)
def test_experts_of_another_model_are_refused(routes: np.ndarray, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        policy().routers.replay(torch.from_numpy(routes.astype(np.int16)))


def test_a_frozen_model_has_experts_of_its_own(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    frozen = load_frozen(ModelConfig(path=str(tmp_path), dtype="float32"), ModelConfig(path=str(tmp_path)))
    plain = rows()
    expected = frozen(**pack(plain, [[0]]).arguments).log_probs
    told = rows(np.full((int(plain.token_offsets[-1]), WIDTH), 1, np.int16))
    assert torch.equal(frozen(**pack(told, [[0]]).arguments).log_probs, expected)


def test_prompts_whose_tokens_had_other_experts_are_not_shared() -> None:
    plain = rows()
    routes = np.zeros((int(plain.token_offsets[-1]), WIDTH), np.int16)
    assert share_prefixes(rows(routes), [0, 1, 2], 100, True) == [[0, 1], [2]]
    routes[plain.token_offsets[1]] = 1
    assert share_prefixes(rows(routes), [0, 1, 2], 100, True) == [[0], [1], [2]]


def test_the_column_reaches_the_trainer_with_null_rows_unknown() -> None:
    own = with_routes(table(0), WIDTH, EXPERTS)
    made = TrainBatch.from_table(own)
    assert made.routes is not None and made.routes.shape == (int(made.token_offsets[-1]), WIDTH)
    for row, found in enumerate(own["routes"].to_pylist()):
        part = made.routes[made.token_offsets[row] : made.token_offsets[row + 1]]
        assert (part == UNROUTED).all() if found is None else part.reshape(-1).tolist() == found
    null = table(0).append_column("routes", pa.nulls(len(own), ROUTES))
    assert TrainBatch.from_table(null).routes is None
    both = TrainBatch.concat([TrainBatch.from_table(null), made])
    assert both.routes is not None and (both.routes[: len(made.routes)] == UNROUTED).all()
    assert np.array_equal(both.routes[len(made.routes) :], made.routes)
    assert TrainBatch.concat([TrainBatch.from_table(null)]).routes is None


def test_a_row_without_an_entry_for_each_token_is_named() -> None:
    own = with_routes(table(0), WIDTH, EXPERTS)
    lists = own["routes"].to_pylist()
    lists[2] = lists[2][:-1]
    bad = own.set_column(own.schema.get_field_index("routes"), "routes", pa.array(lists, ROUTES))
    with pytest.raises(ValueError, match=r"row 2 \(uid .*\) has \d+ entries in 'routes' for \d+ tokens"):
        TrainBatch.from_table(bad)


def test_stages_without_experts_do_not_read_them() -> None:
    rows = with_routes(table(0), WIDTH, EXPERTS)
    assert TokenBatch.from_table(rows).routes is None
    assert TokenBatch.from_table(rows, routes=True).routes is not None
