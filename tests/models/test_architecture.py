"""How long the rows of a model may be: as vLLM has it, and longer only for YaRN, which it takes with one entry more."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.models.architecture import longer_positions, most_positions
from tests.folders import copied

OURS = {"max_position_embeddings": 2048}
YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}
HALF = 16
LONG = {"type": "longrope", "short_factor": [1.0] * HALF, "long_factor": [2.0] * HALF}
CASES: list[tuple[dict[str, Any], int]] = [
    ({}, 2048),
    ({"rope_scaling": None}, 2048),
    ({"rope_scaling": {"rope_type": "yarn", **YARN}}, 8192),
    ({"rope_scaling": {"type": "yarn", **YARN}}, 8192),
    ({"rope_scaling": {"type": "yarn", "factor": 4}}, 8192),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}}, 8192),
    ({"max_position_embeddings": 2560, "rope_scaling": {"rope_type": "yarn", **YARN}}, 8192),
    ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "yarn", **YARN}}, 8192),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 4096),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 4096),
    (
        {
            "max_position_embeddings": 8192,
            "rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **YARN},
        },
        8192,
    ),
    ({"max_position_embeddings": 8192, "original_max_position_embeddings": 2048, "rope_scaling": LONG}, 8192),
    ({"model_max_length": 4096}, 4096),
]


@pytest.mark.parametrize(("entries", "longest"), CASES)
def test_the_longest_row_is_read_from_the_config(entries: dict[str, Any], longest: int) -> None:
    found = most_positions(OURS | entries)
    assert found is not None and found[0] == longest


def test_a_config_without_a_length_has_no_limit() -> None:
    assert most_positions({}) is None and longer_positions({}) == {}
    assert most_positions({"n_positions": 1024}) == (1024, "n_positions")
    nested = {"full_attention": {"rope_type": "yarn", **YARN}, "sliding_attention": {"rope_type": "default"}}
    assert most_positions(OURS | {"rope_parameters": nested}) == (8192, most_positions(OURS | CASES[2][0])[1])  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_takes_rows_of_that_length_and_no_longer_ones(tiny_model: Path, tmp_path: Path) -> None:
    from vllm.config import ModelConfig

    theirs = json.loads((tiny_model / "config.json").read_text())
    del theirs["rope_parameters"]
    for number, (entries, longest) in enumerate(CASES):
        config = theirs | OURS | {"rope_theta": 1e4} | entries
        folder = copied(tiny_model, tmp_path / str(number))
        (folder / "config.json").write_text(json.dumps(config))
        more = longer_positions(config)
        made = ModelConfig(model=str(folder), max_model_len=longest, hf_overrides=dict(more))
        assert made.max_model_len == longest, entries
        if more:
            rope = made.hf_config.rope_parameters
            assert (rope["factor"], rope["original_max_position_embeddings"]) == (4, 2048)
        with pytest.raises(ValueError, match="greater than the derived"):
            ModelConfig(model=str(folder), max_model_len=longest + 1, hf_overrides=dict(more))
