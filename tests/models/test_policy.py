"""The policy's log-probs against the plain model's, on ragged batches."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pipeline.config.model import ModelConfig
from pipeline.models.notes import notes_of
from pipeline.models.policy import Policy, load_policy

VOCAB = 50
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
FAMILIES = {
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3-untied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)),
    "gemma2-softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=0.5)),
    # It passes states on that others do not have.
    "gemma4-softcap": lambda: Gemma4ForCausalLM(
        Gemma4TextConfig(**SIZES, global_head_dim=8, hidden_size_per_layer_input=0, final_logit_softcapping=0.5)
    ),
    "cohere-scale": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "gpt2-tied": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "granite-scaling": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
}


def build(family: str) -> Policy:
    torch.manual_seed(7)
    return Policy(FAMILIES[family]())


def ragged(lengths: list[tuple[int, int]], seed: int = 0) -> list[tuple[list[int], int]]:
    """Rows of (ids, prompt length) with random ids, among them the pad id."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, VOCAB, (p + r,), generator=generator).tolist(), p) for p, r in lengths]


def pack(rows: list[tuple[list[int], int]], padding: int = 0, pad: int = 0):
    """Right-padded ids with the flat positions and targets of all response tokens."""
    width = max(len(ids) for ids, _ in rows) + padding
    input_ids = torch.full((len(rows), width), pad)
    select, targets = [], []
    for b, (ids, prompt) in enumerate(rows):
        input_ids[b, : len(ids)] = torch.tensor(ids)
        select += [b * width + t - 1 for t in range(prompt, len(ids))]
        targets += ids[prompt:]
    return input_ids, torch.tensor(select), torch.tensor(targets)


def plain_distributions(policy: Policy, rows, temperature: float) -> torch.Tensor:
    """Log-probs of the whole vocabulary the direct way: the model itself, masked, with full logits."""
    input_ids, select, _ = pack(rows)
    mask = torch.zeros_like(input_ids)
    for b, (ids, _) in enumerate(rows):
        mask[b, : len(ids)] = 1
    logits = policy.lm(input_ids=input_ids, attention_mask=mask).logits / temperature
    return torch.log_softmax(logits.float(), -1).flatten(0, 1)[select]


def plain(policy: Policy, rows, temperature: float):
    """Log-probs and entropies the direct way."""
    log_probs = plain_distributions(policy, rows, temperature)
    chosen = log_probs.gather(-1, pack(rows)[2][:, None])[:, 0]
    return chosen, torch.distributions.Categorical(logits=log_probs).entropy()


ROWS = ragged([(3, 5), (1, 1), (6, 2), (2, 9)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_the_plain_model_with_gradients(family: str, temperature: float) -> None:
    policy = build(family)
    want, want_entropy = plain(policy, ROWS, temperature)
    (want.sum() + 0.3 * want_entropy.sum()).backward()
    want_grads = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()

    got, entropy, *_ = policy(*pack(ROWS, pad=5), temperature, 4, True)
    assert got.dtype == torch.float32 and got.shape == want.shape
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-5, rtol=0)
    (got.sum() + 0.3 * entropy.sum()).backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, want_grads[name], atol=1e-4, rtol=1e-4)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 8)), min_size=1, max_size=5),
    padding=st.integers(0, 9),
    pad=st.integers(0, VOCAB - 1),
    chunk=st.integers(1, 50),
    data=st.data(),
)
def test_padding_order_and_chunks_change_nothing(lengths, padding, pad, chunk, data) -> None:
    policy = build("qwen3-untied")
    rows = ragged(lengths)
    order = data.draw(st.permutations(range(len(rows))))
    with torch.no_grad():
        base, *_ = policy(*pack(rows), chunk_tokens=1000)
        sums = policy.sum_pi_squared(*pack(rows)[:2], chunk_tokens=1000)
        batch = pack([rows[i] for i in order], padding, pad)
        moved, *_ = policy(*batch, chunk_tokens=chunk)
        moved_sums = policy.sum_pi_squared(*batch[:2], chunk_tokens=chunk)
    for whole, got in ((base, moved), (sums, moved_sums)):
        want = [part for i in order for part in whole.split([len(ids) - p for ids, p in rows])[i]]
        torch.testing.assert_close(got, torch.stack(want), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_sum_of_squared_probabilities(family: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build(family)
    want = plain_distributions(policy, ROWS, temperature).double().exp().square().sum(-1)
    seen: list[int] = []
    whole = Policy.logits
    monkeypatch.setattr(Policy, "logits", lambda self, h: (seen.append(len(h)), whole(self, h))[1])
    got = policy.sum_pi_squared(*pack(ROWS, pad=5)[:2], temperature, 4)
    assert got.dtype == torch.float32 and not got.requires_grad
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-4)
    assert max(seen) == 4 and sum(seen) == len(want)
    # A uniform distribution has 1 / V, a certain one 1.
    assert (got > 1 / VOCAB).all() and (got <= 1 + 1e-6).all()


def test_no_wanted_token_still_reaches_every_parameter() -> None:
    policy = build("qwen2-tied")
    empty = torch.zeros(0, dtype=torch.long)
    log_probs, *_ = policy(torch.zeros(1, 3, dtype=torch.long), empty, empty)
    log_probs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_dropout_is_off() -> None:
    policy = Policy(Qwen2ForCausalLM(Qwen2Config(**SIZES, attention_dropout=0.5)).train()).train()
    first, *_ = policy(*pack(ROWS))
    second, *_ = policy(*pack(ROWS))
    assert torch.equal(first, second)


def test_unknown_logit_arithmetic_is_refused() -> None:
    from transformers import FalconH1ForCausalLM

    config = FalconH1Config(**SIZES, mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64, lm_head_multiplier=0.25)
    with pytest.raises(ValueError, match="FalconH1ForCausalLM computes its logits in a way"):
        Policy(FalconH1ForCausalLM(config))


def test_load_policy_round_trip_and_names(tmp_path) -> None:
    policy = build("qwen2-tied")
    policy.lm.save_pretrained(tmp_path / "m")
    loaded = load_policy(ModelConfig(path=str(tmp_path / "m"), enable_gradient_checkpointing=True))
    assert loaded.training and loaded.lm.is_gradient_checkpointing
    names = {loaded.hf_name(name) for name, _ in loaded.named_parameters()}
    assert names == {name for name, _ in policy.lm.named_parameters()}
    torch.testing.assert_close(loaded(*pack(ROWS))[0], policy(*pack(ROWS))[0])


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_a_family_without_sdpa_is_computed_by_its_own_code(family: str, tmp_path: Path) -> None:
    configs = {
        "bloom": BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
        "mamba": MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
    }
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(configs[family]).save_pretrained(tmp_path)
    plain = Policy(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"))
    loaded = load_policy(ModelConfig(path=str(tmp_path)))
    torch.testing.assert_close(loaded(*pack(ROWS))[0], plain(*pack(ROWS))[0])
    assert "its family has no attention 'sdpa', so 'eager' computes it" in " ".join(notes_of(loaded))
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_policy(ModelConfig(path=str(tmp_path), attn_implementation="flex_attention"))


def test_load_policy_says_what_is_missing(tmp_path) -> None:
    with pytest.raises(ValueError, match="model.path is not set"):
        load_policy(ModelConfig())
    with pytest.raises(ValueError, match="does not exist"):
        load_policy(ModelConfig(path=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="has no config.json"):
        load_policy(ModelConfig(path=str(tmp_path)))
    model = build("qwen3-untied").lm
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no weights"):
        load_policy(ModelConfig(path=str(tmp_path)))
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="lacks 1 weights, the first lm_head.weight"):
        load_policy(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ValueError, match="model.dtype=float31 is not a known type"):
        load_policy(ModelConfig(path=str(tmp_path), dtype="float31"))
