"""Of all files in a folder, the model is what `transformers` loads, and nothing is read that could run code."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.models.weight_files import (
    alone,
    check_weights,
    find_weights,
    model_files,
    model_shapes,
    note,
    tensor_shapes,
)
from tests.folders import WHOLE, configured, copied, in_shards, state_of


def loaded_by_transformers(folder: Path) -> set[str]:
    """Names of the files that `transformers` reads."""
    from transformers import AutoConfig
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    explicit = getattr(AutoConfig.from_pretrained(folder), "transformers_weights", None)
    found = _get_resolved_checkpoint_files(folder, None, None, None, None, False, explicit)[0]
    return {Path(file).name for file in found or ()}


def loaded_by_vllm(folder: str) -> set[str]:
    """Names of the files that vLLM reads, by its own choice."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    files = DefaultModelLoader(LoadConfig(load_format="hf"))._prepare_weights(folder, None, None, True, None)[1]
    return {Path(file).name for file in files}


def folders(model: Path, place: Path) -> dict[str, tuple[Path, int]]:
    """Folders by name, each with the number of files that are the model's."""
    state = state_of(model)
    other = {name: tensor + 1 for name, tensor in state.items()}
    made = {name: copied(model, place / name) for name in ("alone", "consolidated", "old_shards", "both", "adapter")}
    save_file(other, made["consolidated"] / "consolidated.safetensors", {"format": "pt"})
    save_file(other, made["old_shards"] / "model-00001-of-00003.safetensors", {"format": "pt"})
    in_shards(made["both"], other)
    save_file({"x.lora_A.weight": torch.zeros(2, 2)}, made["adapter"] / "adapter_model.safetensors")
    (made["adapter"] / "adapter_config.json").write_text("{}")
    bare = {
        name: copied(model, place / name, weights=False)
        for name in ("shards", "shards_and_more", "bin", "bin_shards", "old_bin", "named")
    }
    in_shards(bare["shards"], state)
    in_shards(bare["shards_and_more"], state)
    save_file(other, bare["shards_and_more"] / "consolidated.safetensors", {"format": "pt"})
    save_file(other, bare["shards_and_more"] / "model-00001-of-00003.safetensors", {"format": "pt"})
    torch.save(state, bare["bin"] / "pytorch_model.bin")
    torch.save(other, bare["bin"] / "adapter_model.bin")
    torch.save({}, bare["bin"] / "training_args.bin")
    in_shards(bare["bin_shards"], state, "bin")
    torch.save(state, bare["old_bin"] / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    save_file(state, bare["named"] / "mine.safetensors", {"format": "pt"})
    save_file(other, bare["named"] / WHOLE, {"format": "pt"})
    configured(bare["named"], transformers_weights="mine.safetensors")
    two = ("shards", "shards_and_more", "bin_shards")
    return {name: (folder, 2 if name in two else 1) for name, folder in (made | bare).items()}


def test_the_model_is_what_transformers_loads_and_engines_read_no_other(tiny_model: Path, tmp_path: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in state_of(tiny_model).items()}
    for name, (folder, count) in folders(tiny_model, tmp_path).items():
        found = find_weights(folder)
        names = {file.name for file in found.files}
        assert len(names) == count and names == loaded_by_transformers(folder), name
        assert model_shapes(folder) == shapes, name
        assert found.mislead_engines == (loaded_by_vllm(str(folder)) != names) or name == "shards_and_more", name
        with alone(folder) as place:
            assert loaded_by_vllm(place) == names and loaded_by_transformers(Path(place)) == names, name
            assert not (Path(place) / "adapter_config.json").exists()
            assert not list(Path(place).glob("consolidated*"))
        assert Path(place) == folder or not os.path.exists(place)
        assert bool(note(folder, "model.path=x")) == bool(found.others), name


def test_what_is_left_out_is_named(tiny_model: Path, tmp_path: Path) -> None:
    made = {name: folder for name, (folder, _) in folders(tiny_model, tmp_path).items()}
    assert note(made["alone"], "m") == ""
    assert note(made["consolidated"], "m") == "m also holds consolidated.safetensors, not read: the model is " + WHOLE
    assert "an adapter (adapter_config.json and adapter_model.safetensors), not loaded: model.lora.path" in note(
        made["adapter"], "m"
    )
    assert note(made["shards_and_more"], "m").endswith("not read: the model is the 2 files of its index")


def test_a_tied_head_in_a_pickle_counts_once(tiny_model: Path, tmp_path: Path) -> None:
    state = state_of(tiny_model)
    torch.save(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, tmp_path / "pytorch_model.bin")
    assert tensor_shapes(tmp_path / "pytorch_model.bin").keys() == state.keys()


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"x": Evil()}, "cannot be read as pure tensors .weights_only.*weights_only=False.*save_pretrained"),
        ({"state_dict": {}, "epoch": 3}, "cannot be read as pure tensors"),
        (None, "cannot be read as pure tensors .*download it again"),
    ],
)
def test_a_pickle_is_read_as_tensors_or_refused(
    content: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(content or {"x": torch.zeros(1000)}, file)
    if content is None:
        file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ValueError, match=sentence):
        tensor_shapes(file)
    assert not Path("ran").exists()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 7\n"


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no weights .*safetensors or pytorch_model.bin.; give a complete"),
        ({"model.gguf": b"x"}, "it holds model.gguf, in a format that is not read .GGUF"),
        ({"tf_model.h5": b"x", "flax_model.msgpack": b"x"}, "not read .Flax's, TensorFlow's"),
        ({"adapter_model.safetensors": b"x"}, "this is only an adapter: name its base"),
        ({"original/consolidated.00.pth": b"x"}, "the weights in its folder original/"),
        ({"model-00001-of-00002.safetensors": b"x"}, "shards without their index .model.safetensors.index.json"),
        ({WHOLE: b""}, "model.safetensors is empty"),
        ({WHOLE: POINTER}, "model.safetensors is a pointer of Git LFS .* git lfs pull"),
        ({WHOLE: b"\x80\0\0\0\0\0\0\0{"}, "model.safetensors is not a complete safetensors file"),
        ({f"{WHOLE}.index.json": b"{"}, "index.json is not valid JSON"),
        ({f"{WHOLE}.index.json": POINTER}, "index.json is a pointer of Git LFS"),
        ({f"{WHOLE}.index.json": b"{}"}, "index.json has no weight_map"),
        ({f"{WHOLE}.index.json": b'{"weight_map": {"x": "a.safetensors"}}'}, "index.json has no metadata"),
        (
            {f"{WHOLE}.index.json": b'{"metadata": {}, "weight_map": {"x": "a.safetensors"}}'},
            "names 1 files, and 1 of them are not there, the first a.safetensors",
        ),
    ],
)
def test_a_folder_without_a_whole_model_is_refused(files: dict[str, bytes], sentence: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        check_weights(tmp_path, "model.path")


def test_an_index_may_name_tensors_that_were_left_out_of_its_files(tiny_model: Path, tmp_path: Path) -> None:
    state = state_of(tiny_model)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": "model-00001-of-00002.safetensors"}
    folder = in_shards(copied(tiny_model, tmp_path / "more", weights=False), state, **more)
    assert model_shapes(folder) == {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_a_link_that_leads_nowhere_is_not_passed_over(tiny_model: Path, tmp_path: Path) -> None:
    folder = copied(tiny_model, tmp_path / "linked", weights=False)
    (folder / WHOLE).symlink_to(tmp_path / "gone")
    torch.save(state_of(tiny_model), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="model.safetensors is a link to a file that is not there"):
        find_weights(folder)


def test_the_files_of_a_hub_name_are_those_of_the_cache(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    assert model_files("some/model") is None
    config = str(tiny_model / "config.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: config)
    assert model_files("some/model") == tiny_model
    assert model_files(tmp_path) is None and model_files(None) is None
    assert json.loads((tiny_model / "config.json").read_text())
