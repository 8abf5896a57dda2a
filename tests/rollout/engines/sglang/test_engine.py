"""The translation to SGLang's interface, against an answer that its server gave."""

import base64
import pickle
import sys
from pathlib import Path

import pytest

from pipeline.config.model import ModelConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.generation import EngineRequest
from pipeline.rollout.engines.sglang import engine
from pipeline.rollout.engines.sglang.server import ServerProcess
from pipeline.sampling import Sampling

ANSWER = {
    "output_ids": [271, 190, 237],
    "meta_info": {
        "id": "a",
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-5.768320560455322, 271, None], [-5.5, 190, None], [-5.25, 237, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
    },
}
REQUEST = EngineRequest([5, 6], Sampling(0.7, 1.0, -1, 2, 9, ("x",)), seed=7, ends=(1,))


def test_an_answer_has_the_version_of_each_token() -> None:
    made = engine.read(ANSWER, 9)
    assert made.token_ids.tolist() == [271, 190, 237] and made.log_probs.tolist()[1:] == [-5.5, -5.25]
    assert (made.finish_reason, made.version_runs) == ("length", ((3, 2), (4, 1)))
    spans = {"weight_versions": [{"version": "default", "start": 0, "end": 3}]}
    unnamed = engine.read({**ANSWER, "meta_info": ANSWER["meta_info"] | spans}, -1)  # type: ignore[operator]
    assert unnamed.version_runs == ((-1, 3),), "weights that it read from the disk have no number"


def test_a_request_has_the_version_as_its_salt() -> None:
    body = engine.body("a", REQUEST, 3, seeds=False)
    assert (body["rid"], body["input_ids"], body["cache_salt"], body["return_logprob"]) == ("a", [5, 6], "v3", True)
    assert body["sampling_params"] == {
        **{"max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        **{"stop": ["x"], "stop_token_ids": [1], "ignore_eos": False},
    }
    assert engine.body("a", REQUEST, 3, seeds=True)["sampling_params"]["sampling_seed"] == 7
    past = EngineRequest([5], REQUEST.sampling, ends=(1,), ignore_eos=True)
    assert engine.body("a", past, 3, seeds=True)["sampling_params"]["stop_token_ids"] == []


def test_the_manifest_is_the_only_tensor_of_a_request() -> None:
    body = engine.tensor_body(b"{}")
    ((name, tensor),) = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
    assert (name, bytes(tensor.tolist()), body["flush_cache"]) == ("manifest", b"{}", False)


def test_arguments_of_the_server(tiny_model: Path) -> None:
    rollout = RolloutConfig(name="sglang", dtype="float32", engine_kwargs={"max_total_tokens": 4096})
    words = engine.arguments(ModelConfig(path=str(tiny_model)), rollout, 120, 5, str(tiny_model))
    given = dict(zip(words, words[1:], strict=False))
    assert given["--context-length"] == "128" and given["--random-seed"] == "5" and given["--device"] == "cpu"
    assert given["--max-total-tokens"] == "4096" and given["--load-format"] == "dummy"
    assert not any("key" in word for word in words), "every user of the machine could read it"
    rollout.num_gpus, rollout.gpu_memory_utilization, rollout.enforce_eager = 1, 0.4, True
    words = engine.arguments(ModelConfig(path=str(tiny_model)), rollout, 120, 5, str(tiny_model))
    assert "--device" not in words and "--disable-cuda-graph" in words
    assert words[words.index("--mem-fraction-static") + 1] == "0.4"


def test_an_interpreter_that_is_not_on_this_machine_is_named() -> None:
    with pytest.raises(ValueError, match=r"rollout.engine_python=/no/python is not on the machine .*make sglang-env"):
        engine.python(RolloutConfig(engine_python="/no/python"))


def test_a_server_that_ends_at_its_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"ended with code 1; its log .*sglang.log ends: (?s:.*)No module named 'sglang'"
    ):
        ServerProcess(sys.executable, [], {}, tmp_path / "sglang.log", 60)


def test_a_server_that_does_not_answer_is_an_error_with_its_deadline(tmp_path: Path) -> None:
    late = tmp_path / "python"
    late.write_text("#!/bin/sh\nsleep 60\n")
    late.chmod(0o755)
    with pytest.raises(TimeoutError, match=r"did not answer within 0 s \(trainer.deadlines.engine_start\)"):
        ServerProcess(str(late), [], {}, tmp_path / "sglang.log", 0.1)
