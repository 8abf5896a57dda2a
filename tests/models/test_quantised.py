"""Quantised weights are named by their method, however they say so."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.models.quantised import check_not_quantised, quantisation

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, ""),
        ({"quantization_config": None}, ""),
        ({"quantization_config": {"load_in_4bit": False, "load_in_8bit": False}}, ""),
        ({"quantization_config": BNB}, "bitsandbytes in 4 bits (quantization_config of config.json)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq in 4 bits (quantization_config"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq in 4 bits"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8 (quantization_config"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "torchao"}}, "torchao"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors (compression_config"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
    ],
)
def test_the_method_is_named(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = quantisation(str(tmp_path))
    assert found.startswith(named) and bool(found) == bool(named)
    if named:
        with pytest.raises(
            ValueError, match="reward.model.path=.* has quantised weights: .*give the model in bfloat16"
        ):
            check_not_quantised(str(tmp_path), "reward.model.path")
    else:
        check_not_quantised(str(tmp_path), "model.path")


def test_models_of_modelopt_say_so_in_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert quantisation(str(tmp_path)) == "modelopt FP8 (hf_quant_config.json)"
