"""Models as they are loaded to train and to score: the numbers of their family's own code, row by row, in each form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.greeting import Greeting, Way
from pipeline.models.handshake import LIMIT, Compared
from pipeline.models.packing import lay_out, pack
from pipeline.models.policy import Policy, load_policy
from pipeline.models.pretrained import load_pretrained
from pipeline.models.reward_model import RewardModel, load_reward_model
from pipeline.models.sharing import Passes
from pipeline.models.value import ValueModel, load_value_model

CPU = torch.device("cpu")
VOCAB, WINDOW, BORDER = 97, 16, 32
SIZES: dict[str, Any] = {
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
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0 + 3 * number for number in range(4)],
    "original_max_position_embeddings": BORDER,
}
PLAIN = {name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0}
OPT = {name: size for name, size in PLAIN.items() if name != "intermediate_size"} | {
    "ffn_dim": 48,
    "dropout": 0.1,
    "word_embed_proj_dim": 32,
    "init_std": 0.2,
}
CAP = {"query_pre_attn_scalar": 8, "sliding_window": WINDOW}
MAKE: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: hf.Qwen3Config(**SIZES),
    "qwen2": lambda: hf.Qwen2Config(**PLAIN, num_key_value_heads=2),
    "llama": lambda: hf.LlamaConfig(**SIZES, attention_bias=True),
    "gemma 2, cap 5": lambda: hf.Gemma2Config(**SIZES, **CAP, attn_logit_softcapping=5.0),
    "gemma 2, no cap": lambda: hf.Gemma2Config(**SIZES, **CAP, attn_logit_softcapping=None),
    "gemma 3": lambda: hf.Gemma3TextConfig(**SIZES, **CAP),
    "phi-3, longrope": lambda: hf.Phi3Config(
        **PLAIN, num_key_value_heads=2, rope_parameters=LONG, original_max_position_embeddings=BORDER
    ),
    "mistral, window": lambda: hf.MistralConfig(**SIZES, sliding_window=WINDOW),
    "cohere 2": lambda: hf.Cohere2Config(**PLAIN, num_key_value_heads=2, sliding_window=WINDOW),
    "gpt-2": lambda: hf.GPT2Config(**GPT2, attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1),
    "opt": lambda: hf.OPTConfig(**OPT),
    "starcoder 2": lambda: hf.Starcoder2Config(**PLAIN, num_key_value_heads=2, sliding_window=WINDOW),
    "granite": lambda: hf.GraniteConfig(**PLAIN, num_key_value_heads=2, attention_multiplier=0.3),
    "olmo 2": lambda: hf.Olmo2Config(**PLAIN, num_key_value_heads=2),
}
NOT_REWARD = ("cohere 2", "olmo 2", "granite")
"""Families of which `transformers` has no classifier."""
EAGER = ("gemma 2, cap 5",)
"""Families whose attention needs more than the fast one computes."""
ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: hf.BertConfig(**PLAIN, num_labels=1),
    "roberta": lambda: hf.RobertaConfig(**PLAIN, num_labels=1),
    "deberta 2": lambda: hf.DebertaV2Config(
        **PLAIN, num_labels=1, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "modernbert": lambda: hf.ModernBertConfig(
        **PLAIN, num_labels=1, local_attention=8, cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2
    ),
}
ROWS = ((3, 5), (3, 9), (20, 6), (20, 10))
"""Tokens of prompts and responses; rows of one prompt are neighbours."""
BEYOND = ((28, 9), (28, 12), (36, 6), (36, 10))
"""All longer than `BORDER`."""


def saved(folder: Path, auto: Any, config: Any) -> Path:
    if not (folder / "config.json").exists():
        torch.manual_seed(3)
        model = auto.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight += 0.1 * torch.randn_like(weight)
                if "q_proj" in name or "k_proj" in name:
                    weight *= 3
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def settings(path: Path, **more: Any) -> ModelConfig:
    return ModelConfig(path=str(path), **more)


def draw(lengths: tuple[tuple[int, int], ...]) -> tuple[list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(0)
    prompts = {length: rng.integers(3, VOCAB, length).tolist() for length, _ in lengths}
    return [prompts[length] for length, _ in lengths], [rng.integers(3, VOCAB, count).tolist() for _, count in lengths]


def own_model(auto: Any, path: Path, **options: Any) -> Any:
    return auto.from_pretrained(path, attn_implementation="eager", dtype=torch.float32, **options).eval()


@torch.no_grad()
def own_log_probs(lm: Any, prompt: list[int], response: list[int]) -> np.ndarray:
    logits = lm(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


def greeting(lm: Any, lengths: tuple[tuple[int, int], ...]) -> Greeting:
    prompts, responses = draw(lengths)
    pairs = list(zip(prompts, responses, strict=True))
    return Greeting(
        "own", prompts, [np.array(made) for made in responses], [own_log_probs(lm, *pair) for pair in pairs]
    )


def lengths_of(family: str, longest: int) -> tuple[tuple[int, int], ...]:
    return BEYOND if longest > BORDER else ROWS


@pytest.mark.parametrize("longest", [BORDER, 64], ids=["short", "long"])
@pytest.mark.parametrize("family", MAKE)
def test_log_probs_are_those_of_the_familys_own_code(family: str, longest: int, folder: Path) -> None:
    path = saved(folder / family, hf.AutoModelForCausalLM, MAKE[family]())
    policy = load_policy(settings(path), longest=longest)
    passes = Passes.of(policy, "auto")
    compared = Compared(
        policy, greeting(own_model(hf.AutoModelForCausalLM, path), lengths_of(family, longest)), CPU, 256
    )
    way = Way(compared.config._attn_implementation, passes.packed, passes.shared)
    for found in compared.differences(way):
        assert found.largest < LIMIT, (family, way, found)
    assert (way.attention == "eager") == (family in EAGER)
    assert any("'eager'" in note for note in passes.notes) == (family in EAGER)
    assert any("longrope" in note for note in passes.notes) == ("longrope" in family)
    assert any("rows are padded" in note for note in passes.notes) == (not passes.packed)


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma 2, cap 5", "phi-3, longrope", "mistral, window", "cohere 2", "gpt-2", "opt"]
)
def test_values_are_those_of_the_familys_own_code(family: str, folder: Path) -> None:
    path = saved(folder / family, hf.AutoModelForCausalLM, MAKE[family]())
    model = load_value_model(settings(path), longest=BORDER)
    torch.manual_seed(1)
    nn.init.normal_(model.head.weight)
    passes = Passes.of(model, "auto")
    own = own_model(hf.AutoModelForCausalLM, path).get_decoder()
    prompts, responses = draw(ROWS)
    rows = Compared(model, Greeting("", prompts, [*map(np.array, responses)], [np.zeros(1)]), CPU, 256).rows  # type: ignore[arg-type]
    packs = [[0, 1], [2, 3]] if passes.shared else [[0], [1], [2], [3]]
    with torch.no_grad():
        batch = pack(rows, packs, packed=passes.packed)
        found = model(batch.input_ids, batch.logit_index, batch.positions, batch.packing)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            states = own(input_ids=torch.tensor([prompt + response])).last_hidden_state[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(found[batch.row_index == row], model.head(states)[:, 0], atol=LIMIT, rtol=1e-4)
    assert any("'eager'" in note for note in passes.notes) == (family in EAGER)


@pytest.mark.parametrize("family", [*(name for name in MAKE if name not in NOT_REWARD), *ENCODERS])
def test_scores_are_those_of_the_familys_own_code(family: str, folder: Path) -> None:
    config = (MAKE | ENCODERS)[family]()
    config.num_labels = 1
    path = saved(folder / f"{family} score", hf.AutoModelForSequenceClassification, config)
    model = load_reward_model(settings(path), longest=BORDER)
    passes = Passes.of(model, "never")
    own = own_model(hf.AutoModelForSequenceClassification, path)
    prompts, responses = draw(ROWS)
    rows = [np.array(prompt + response) for prompt, response in zip(prompts, responses, strict=True)]
    with torch.no_grad():
        batch = lay_out(rows, passes.packed)
        found = model(batch.input_ids, batch.lengths, batch.positions, batch.packing)
        expected = [own(input_ids=torch.tensor(row)[None]).logits[0, 0] for row in rows]
    torch.testing.assert_close(found, torch.stack(expected), atol=LIMIT, rtol=1e-4)


class Neighbours(nn.Module):
    """Adds to each state the mean over the whole pass, as a normalisation over a batch does."""

    def forward(self, states: Tensor) -> Tensor:
        return states + 0.1 * states.mean((0, 1), keepdim=True)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("kind", [Policy, ValueModel, RewardModel])
def test_a_model_whose_rows_depend_on_their_neighbours_is_refused(kind: Any, window: int | None) -> None:
    torch.manual_seed(0)
    config = hf.MistralConfig(**SIZES, sliding_window=window, num_labels=1)
    reward = kind is RewardModel
    lm: Any = (hf.MistralForSequenceClassification if reward else hf.MistralForCausalLM)(config)
    module = kind(lm)
    module.decoder.norm = nn.Sequential(module.decoder.norm, Neighbours())
    with pytest.raises(ValueError, match="MistralModel cannot be trained: the numbers of a row of 6 tokens change by"):
        Passes.of(module, "auto")


def test_what_is_chosen_is_in_the_notes_with_its_key_and_path(folder: Path) -> None:
    path = saved(folder / "gemma 2, cap 5", hf.AutoModelForCausalLM, MAKE["gemma 2, cap 5"]())
    lm, _ = load_pretrained(hf.AutoModelForCausalLM, settings(path), "critic.path")
    notes = Passes.of(ValueModel(lm), "auto").notes
    assert notes[0].startswith(f"critic.path={path}: attention 'sdpa' leaves out softcap, so 'eager' computes it")
    assert "rows are padded, and samples do not share their prompt in Gemma2Model" in notes[1]
    assert "notes" not in lm.config.to_json_string()
