"""The reward model against the plain model's scores, one row at a time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    T5Config,
    T5ForSequenceClassification,
)

from pipeline.config.learner import FSDPConfig
from pipeline.config.model import ModelConfig
from pipeline.models.fsdp import save_hf, shard
from pipeline.models.packing import lay_out
from pipeline.models.reward_model import RewardModel, load_reward_model
from pipeline.models.sharing import Passes
from tests.models.test_fsdp import NoTokenizer
from tests.models.test_policy import SIZES, VOCAB
from tests.sentences import Named

ENCODER = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")} | {
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen3": lambda **more: Qwen3ForSequenceClassification(Qwen3Config(**SIZES | {"num_labels": 1} | more)),
    "gpt2": lambda **more: GPT2ForSequenceClassification(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=24, num_labels=1, **more)
    ),
    "bert": lambda **more: BertForSequenceClassification(BertConfig(**ENCODER | {"num_labels": 1} | more)),
    "roberta": lambda **more: RobertaForSequenceClassification(RobertaConfig(**ENCODER | {"num_labels": 1} | more)),
    "deberta": lambda **more: DebertaV2ForSequenceClassification(
        DebertaV2Config(**ENCODER | {"num_labels": 1, "pad_token_id": 0} | more)
    ),
}
DECODERS = ("qwen3", "gpt2")
LENGTHS = (7, 1, 4, 12)


def build(family: str, **more: Any) -> RewardModel:
    torch.manual_seed(7)
    return RewardModel(FAMILIES[family](**more)).eval()


def ragged(lengths: Any, seed: int = 0, low: int = 1) -> list[list[int]]:
    """Rows of random ids from `low` on."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def pack(rows: list[list[int]], padding: int = 0, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Right-padded ids and lengths."""
    input_ids = torch.full((len(rows), max(map(len, rows)) + padding), pad)
    for place, ids in enumerate(rows):
        input_ids[place, : len(ids)] = torch.tensor(ids)
    return input_ids, torch.tensor([len(ids) for ids in rows])


def theirs(lm: Any, rows: list[list[int]]) -> Tensor:
    """What `transformers` itself gives for each row alone."""
    return torch.cat([lm(input_ids=torch.tensor([ids])).logits[:, 0] for ids in rows])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_gets_what_each_row_gets_alone_with_gradients(family: str) -> None:
    model, alone, rows = build(family), build(family).lm, ragged(LENGTHS)
    got, want = model(*pack(rows, padding=3, pad=5)), theirs(alone, rows)
    assert got.dtype == torch.float32 and got.shape == (4,) and got.std() > 0
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    for scores in (got, want):
        (scores - 1).square().sum().backward()
    wanted = dict(alone.named_parameters())
    assert {model.hf_name(name) for name, _ in model.named_parameters()} == wanted.keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[model.hf_name(name)].grad, atol=1e-5, rtol=1e-4, msg=name)
    # A row without tokens gets the score of its first position.
    assert model(*(part[:1] for part in pack(rows)))[0] != model(pack(rows)[0][:1], torch.tensor([0]))[0]


def test_packed_rows_get_what_each_row_gets_alone_with_gradients() -> None:
    assert not Passes.of(build("bert"), "auto").packed
    model, alone, rows = build("qwen3"), build("qwen3").lm, ragged(LENGTHS)
    assert Passes.of(model, "auto").packed
    batch = lay_out([np.array(ids) for ids in rows], packed=True)
    assert batch.input_ids.shape == (1, sum(map(len, rows)))
    got = model(batch.input_ids, batch.lengths, batch.positions, batch.packing)
    want = theirs(alone, rows)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    for scores in (got, want):
        (scores - 1).square().sum().backward()
    wanted = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[model.hf_name(name)].grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["qwen3", "bert"])
@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    padding=st.integers(0, 9),
    pad=st.integers(0, VOCAB - 1),
    data=st.data(),
)
def test_padding_and_company_change_nothing(family: str, lengths: Any, padding: int, pad: int, data: Any) -> None:
    model, rows = build(family), ragged(lengths, low=0)
    order = data.draw(st.permutations(range(len(rows))))
    with torch.no_grad():
        alone = [model(*pack([ids])) for ids in rows]
        together = model(*pack([rows[i] for i in order], padding, pad))
    torch.testing.assert_close(together, torch.cat([alone[i] for i in order]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pad", [2, 0, None])
def test_the_last_token_is_scored_whatever_pads(pad: int | None) -> None:
    model = build("qwen3", pad_token_id=pad, eos_token_id=2)
    rows = [[*ids, 2] for ids in ragged(LENGTHS, low=3)]
    input_ids, lengths = pack(rows, pad=2)
    hidden = model.lm.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state
    want = torch.stack([hidden[b, len(ids) - 1] @ model.lm.score.weight[0] for b, ids in enumerate(rows)])
    torch.testing.assert_close(model(input_ids, lengths), want, atol=1e-6, rtol=1e-5)
    if pad == 2:  # what this guards against
        assert not torch.isclose(theirs(model.lm, rows), want).any()


@pytest.mark.parametrize(("family", "room"), [("qwen3", None), ("gpt2", 24), ("bert", 24), ("roberta", 23)])
def test_room_of_a_table_of_positions(family: str, room: int | None) -> None:
    model = build(family)
    assert model.max_length == room
    if room:
        model(torch.ones(1, room, dtype=torch.long) * 3, torch.tensor([room]))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.ones(1, room + 1, dtype=torch.long) * 3, torch.tensor([room + 1]))


def test_models_that_cannot_be_reward_models(named: Named) -> None:
    with pytest.raises(ValueError) as refused:
        build("bert", num_labels=3)
    named(refused.value, "3")
    t5 = T5Config(vocab_size=VOCAB, d_model=8, d_ff=8, num_layers=1, num_labels=1)
    with pytest.raises(ValueError) as refused:
        RewardModel(T5ForSequenceClassification(t5))
    named(refused.value, "T5ForSequenceClassification")
    with pytest.raises(ValueError, match="BertForSequenceClassification cannot be a reward model"):
        build("bert", is_decoder=True)
    both_ways = FAMILIES["qwen3"]()
    for layer in both_ways.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError) as refused:
        RewardModel(both_ways)
    named(refused.value, "Qwen3ForSequenceClassification")

    class Capped(LlamaForSequenceClassification):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = torch.tanh(output.logits * 10)
            return output

    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    with pytest.raises(ValueError, match="Capped reads its score in a way that is not supported"):
        RewardModel(Capped(LlamaConfig(**sizes, num_labels=1)))


# loading and saving


def saved(folder: Path, model: Any, **kwargs: Any) -> ModelConfig:
    model.save_pretrained(folder, **kwargs)
    return ModelConfig(path=str(folder))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_what_is_saved_is_a_sequence_classifier_with_the_same_scores(tmp_path: Path, family: str) -> None:
    first = saved(tmp_path / "first", build(family).lm)
    model, rows = load_reward_model(first), ragged(LENGTHS)
    assert model.training
    want = model.eval()(*pack(rows))
    torch.testing.assert_close(want, build(family)(*pack(rows)))
    shard(model, FSDPConfig(), "cpu")
    torch.testing.assert_close(model(*pack(rows)), want)
    save_hf(model, NoTokenizer(), tmp_path / "second")
    alone = AutoModelForSequenceClassification.from_pretrained(tmp_path / "second").eval()
    assert alone.num_labels == 1
    torch.testing.assert_close(theirs(alone, rows), want, atol=1e-6, rtol=1e-5)
    again = load_reward_model(ModelConfig(path=str(tmp_path / "second"))).eval()
    torch.testing.assert_close(again(*pack(rows, padding=4)), want, atol=1e-6, rtol=1e-5)


def test_a_language_model_gets_a_head_of_zeros_and_only_when_asked(tmp_path: Path, named: Named) -> None:
    torch.manual_seed(7)
    lm = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
    config = saved(tmp_path / "lm", lm)
    with pytest.raises(ValueError) as refused:
        load_reward_model(config, "reward.model.path")
    named(refused.value, "reward.model.path= jobs.reward_model")
    model, rows = load_reward_model(config, new_head=True), pack(ragged(LENGTHS))
    for name, parameter in lm.model.named_parameters():
        assert torch.equal(dict(model.lm.model.named_parameters())[name], parameter)
    scores = model(*rows)
    assert not scores.any()
    (scores - 1).square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()} == {"lm.score.weight"}


def test_a_new_head_of_several_layers_is_alike_on_all_ranks_and_can_learn(tmp_path: Path) -> None:
    torch.manual_seed(7)
    config = saved(tmp_path / "encoder", RobertaModel(RobertaConfig(**ENCODER), add_pooling_layer=False))
    before, models = torch.random.get_rng_state(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(load_reward_model(config, new_head=True))
    torch.random.set_rng_state(before)
    one, two = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(one[name], two[name]) for name in one)
    scores = models[0](*pack(ragged(LENGTHS)))
    assert not scores.any()
    (scores - 1).square().sum().backward()
    moved = {name for name, p in one.items() if p.grad is not None and p.grad.any()}
    assert moved == {"lm.classifier.out_proj.weight", "lm.classifier.out_proj.bias"}


def test_checkpoints_that_are_refused(tmp_path: Path, named: Named) -> None:
    classifier = saved(tmp_path / "classifier", FAMILIES["qwen3"](num_labels=3))
    for new_head in (False, True):
        with pytest.raises(ValueError) as refused:
            load_reward_model(classifier, new_head=new_head)
        named(refused.value, "model.path= score.weight [3 32]")
    reward = build("qwen3").lm
    state = {name: p for name, p in reward.state_dict().items() if name != "model.norm.weight"}
    headless = {name: p for name, p in state.items() if "score" not in name}
    half = saved(tmp_path / "half", reward, state_dict=state)
    headless = saved(tmp_path / "headless", reward, state_dict=headless)
    for config, new_head in ((half, False), (half, True), (headless, True)):
        with pytest.raises(ValueError) as refused:
            load_reward_model(config, new_head=new_head)
        named(refused.value, "1 model.norm.weight")
    roberta = build("roberta").lm
    state = {name: p for name, p in roberta.state_dict().items() if "classifier.dense" not in name}
    with pytest.raises(ValueError) as refused:
        load_reward_model(saved(tmp_path / "dense", roberta, state_dict=state), new_head=True)
    named(refused.value, "2 classifier.dense.bias")
    with pytest.raises(ValueError) as refused:
        load_reward_model(ModelConfig(path=str(tmp_path / "nowhere")), "reward.model.path")
    named(refused.value, "reward.model.path=")
    with pytest.raises(ValueError) as refused:
        load_reward_model(ModelConfig(), "reward.model.path")
    named(refused.value, "reward.model.path")
    (tmp_path / "headless" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ValueError, match="headless cannot be loaded: ValueError: Unrecognized configuration class"):
        load_reward_model(headless)
