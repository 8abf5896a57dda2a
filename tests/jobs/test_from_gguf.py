"""`python -m jobs.from_gguf`: a folder with the file's weights and tokenizer, or a sentence."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jobs import from_gguf
from jobs.from_gguf import main
from pipeline.models.weight_files import check_weights

HEADS, KV_HEADS = 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
# Two spaces are one token if digits stay apart from the spaces before them.
MERGES = ["Ġ Ġ", "Ġ 1"]
NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Part of a tensor's name in transformers, to its name in a file."""


def in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order, which rotates neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    tokens = 256 + len(SPECIAL) + len(MERGES)
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": tokens}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64, tie_word_embeddings=True))


def write(
    file: Path,
    model: LlamaForCausalLM,
    quantised: bool = False,
    architecture: str = "llama",
    rule: str = "smollm",
    template: str | None = TEMPLATE,
    without: str = "",
    extra: str = "",
    scaling: str = "",
) -> Path:
    """Write the model as llama.cpp would."""
    config, writer = model.config, gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    writer.add_name("tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    tokens = [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    for name, tensor in model.state_dict().items():
        [short] = [short for long, short in NAMES.items() if f"{long}." in name] or [""]
        if not short or short == without:
            continue  # the head is the embedding
        place = f"blk.{name.split('.')[2]}.{short}" if ".layers." in name else short
        weight = tensor.numpy()
        if short in ("attn_q", "attn_k"):
            weight = in_pairs(weight, HEADS if short == "attn_q" else KV_HEADS)
        if quantised and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{place}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{place}.weight", np.ascontiguousarray(weight))
    if extra:
        writer.add_tensor(extra, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_the_folder_holds_the_model_of_the_file(
    original: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert main([str(write(tmp_path / "m.gguf", original)), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{out}: llama, {original.num_parameters():,} parameters in float32, 261 tokens"]
    check_weights(out, "model.path")
    model, found = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and config["architectures"] == ["LlamaForCausalLM"]
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "é  17"}], tokenize=False)
    assert text == "<|im_start|>user\né  17<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and ids[0] == 1 and ids.count(2) == 1
    assert tokenizer.convert_ids_to_tokens(tokenizer("  17")["input_ids"]) == ["ĠĠ", "1", "7"]
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_quantised_weights_are_unpacked_and_the_loss_is_said(
    original: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write(tmp_path / "m.gguf", original, quantised=True), tmp_path / "model"
    assert main([str(file), "--out", str(out), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "in bfloat16" in said and "note: its weights were quantised (Q8_0); the precision lost" in said
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16 and not getattr(model, "is_quantized", False)
    for name, tensor in original.state_dict().items():
        assert torch.allclose(model.state_dict()[name].float(), tensor, atol=2e-3, rtol=1e-2), name


def test_what_the_file_lacks_is_noted(
    original: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "m.gguf", original, rule="somebodys", template=None)
    assert main([str(file), "--out", str(tmp_path / "model")]) == 0
    said = capsys.readouterr().out
    assert "the tokenizer's rule somebodys" in said and "model.tokenizer_path" in said
    assert "no chat template; put a chat_template.jinja" in said


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architecture": "nonesuch"}, ["of the architecture nonesuch", "train the original model"]),
        ({"without": "attn_norm"}, ["lacks 2 tensors", "input_layernorm"]),
        ({"extra": "rope_freqs.weight"}, ["it has rope_freqs.weight", "train the original model"]),
        ({"scaling": "yarn"}, ["scales rotary embeddings (yarn)"]),
    ],
)
def test_a_model_that_is_not_read_whole_is_refused(
    changes: dict[str, Any],
    parts: list[str],
    original: LlamaForCausalLM,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write(tmp_path / "m.gguf", original, **changes)
    assert main([str(file), "--out", str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err
    assert str(file) in error and all(part in error for part in parts), error
    assert not (tmp_path / "model").exists()


def test_a_block_after_the_last_layer_is_left_out(original: LlamaForCausalLM, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", original, extra="blk.2.nextn.weight")
    assert main([str(file), "--out", str(tmp_path / "model")]) == 0


def test_files_and_folders_that_cannot_be_used(
    original: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "m.gguf", original)
    (tmp_path / "half.gguf").write_bytes(file.read_bytes()[:20000])
    (tmp_path / "text.gguf").write_text("no model at all")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    for name, out, part in (
        ("nowhere.gguf", "model", "does not exist"),
        ("half.gguf", "model", "half.gguf is not a complete GGUF file"),
        ("text.gguf", "model", "text.gguf is not a complete GGUF file"),
        ("m.gguf", "full", "full is not empty"),
    ):
        assert main([str(tmp_path / name), "--out", str(tmp_path / out)]) == 2
        assert part in capsys.readouterr().err
    monkeypatch.setattr(from_gguf.importlib.util, "find_spec", lambda name: None)
    assert main([str(file), "--out", str(tmp_path / "model")]) == 2
    assert "pip install gguf" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
