"""The skeleton of an engine's model, built in a process in which vLLM has patched `transformers`."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.forks import forking
from tests.weights.test_checkpoint_names import KINDS, SIZES


def beside_an_engine(folder: str) -> tuple[int, bool]:
    """What a skeleton has if vLLM computes the model by the class of `transformers`; whether it would be compiled."""
    from types import SimpleNamespace

    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeModel
    from vllm.compilation.decorators import _support_torch_compile
    from vllm.config import CompilationConfig, CompilationMode

    from pipeline.rollout.engines.vllm.transfer import skeleton_beside

    _support_torch_compile(Qwen2MoeModel, {"input_ids": 0})
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    model = SimpleNamespace(model=folder, trust_remote_code=False)
    lm = skeleton_beside(SimpleNamespace(compilation_config=compilation, model_config=model), "AutoModelForCausalLM")
    assert compilation.mode == CompilationMode.VLLM_COMPILE, "the engine's own"
    return len(list(lm.parameters())), not lm.model.do_not_compile


@pytest.mark.vllm
def test_a_family_that_vllm_computes_by_transformers_has_a_skeleton_too(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2_moe", **SIZES, **KINDS["qwen2_moe"]))
    model.save_pretrained(tmp_path)
    with ProcessPoolExecutor(1, forking("vllm.config")) as pool:
        found = pool.submit(beside_an_engine, str(tmp_path)).result(200)
    assert found == (len(list(model.parameters())), False)
