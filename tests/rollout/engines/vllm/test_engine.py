"""Translation of requests, weights and memory for vLLM, on a recording stand-in for its `LLMEngine`.

No GPU is used, and no memory: that sleeping frees any is vLLM's own business.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config import Config
from pipeline.generation import EngineRequest
from pipeline.rollout.engines.vllm import engine as module
from pipeline.rollout.engines.vllm.engine import VLLM
from pipeline.rows import UNROUTED
from pipeline.sampling import Sampling
from tests.folders import configured, copied

LOAD = ["start_weight_update", "update_weights", "finish_weight_update"]
SAMPLING = Sampling(0.8, 0.9, 20, 0, 9, ())


class Recording:
    """Records what it is asked for; a request is finished after one step."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.asked: list[tuple[str, dict[str, Any], Any]] = []
        self.version = "default"
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=None))
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 300)

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        self.asked.append((request_id, prompt, params))

    def step(self) -> list[Any]:
        spans = [SimpleNamespace(version=self.version, start=0, end=2)]
        log_probs = SimpleNamespace(logprobs=[-0.5, -0.25])
        made = SimpleNamespace(token_ids=[5, 6], logprobs=log_probs, finish_reason="stop", weight_versions=spans)
        first, second = (request_id for request_id, _, _ in self.asked)
        done = SimpleNamespace(request_id=first, finished=True, outputs=[made])
        return [done, SimpleNamespace(request_id=second, finished=False, outputs=[])]

    def abort_request(self, request_ids: list[str]) -> None:
        self.log.append(f"abort {request_ids}")

    def collective_rpc(self, method: Any, kwargs: dict[str, Any] | None = None) -> list[Any]:
        if isinstance(method, str):  # else it is the check of the names, and none of these is new
            self.log.append(method)
        return []

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self.log.append(f"reset {reset_running_requests}")

    def sleep(self, level: int) -> None:
        self.log.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.log.append(f"wake {tags}")


@pytest.fixture
def config() -> Config:
    return Config()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Recording:
    made = Recording()
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final only"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    monkeypatch.setattr(module, "build", lambda *args: made)
    module.params.cache_clear()
    return made


@pytest.fixture
def engine(fake: Recording, config: Config, request: pytest.FixtureRequest) -> VLLM:
    request.addfinalizer(module.params.cache_clear)
    return VLLM(config.model, config.rollout, 64, 0)


def test_requests_are_salted_and_labelled_with_the_version_that_was_loaded(engine: VLLM, fake: Recording) -> None:
    engine.add("a", EngineRequest([1, 2], SAMPLING))
    engine.load([], 1.0, 4)
    engine.add("b", EngineRequest([1, 2], SAMPLING))
    (_, first, _), (_, second, _) = fake.asked
    assert first == {"type": "token", "prompt_token_ids": [1, 2], "cache_salt": "v-1"}
    assert second == first | {"cache_salt": "v4"}
    (output,) = engine.step()
    assert output.request_id == "a" and output.generation.version_runs == ((4, 2),)
    assert output.generation.token_ids.tolist() == [5, 6] and output.generation.log_probs.tolist() == [-0.5, -0.25]


def test_tokens_of_weights_from_the_disk_are_of_no_version(engine: VLLM) -> None:
    for name in "ab":
        engine.add(name, EngineRequest([1], SAMPLING))
    assert engine.step()[0].generation.version_runs == ((-1, 2),)


@pytest.mark.parametrize(("replays", "training"), [(True, True), (True, False), (False, True)])
def test_experts_are_those_of_training_requests(config: Config, fake: Recording, replays: bool, training: bool) -> None:
    """vLLM returns the experts of all tokens that passed, [P + T - 1, layers, k], so the last token has none."""
    config.rollout.replay_routes = replays
    engine = VLLM(config.model, config.rollout, 64, 0)
    whole = replace(SAMPLING, top_p=1.0, top_k=-1)
    for name in "ab":
        engine.add(name, EngineRequest([1, 2], whole, for_training=training))
    outputs = fake.step()
    outputs[0].outputs[0].routed_experts = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
    fake.step = lambda: outputs  # type: ignore[method-assign]
    (output,) = engine.step()
    routes = output.generation.routes
    if not (replays and training):
        assert routes is None
        return
    assert routes is not None and routes.dtype == np.int16
    assert routes.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [UNROUTED] * 4]
    engine.abort(["b"])
    assert not engine._routed


def test_requests_that_are_sampled_alike_have_their_own_seeds(engine: VLLM, fake: Recording) -> None:
    for seed in (7, 8, None):
        engine.add(str(seed), EngineRequest([1, 2], SAMPLING, seed))
    engine.add("longer", EngineRequest([1, 2], replace(SAMPLING, max_tokens=3), 7))
    asked = [params for _, _, params in fake.asked]
    assert [params.seed for params in asked] == [7, 8, None, 7]
    assert [params.max_tokens for params in asked] == [9, 9, 9, 3]
    assert (asked[0].temperature, asked[0].top_p, asked[0].top_k) == (0.8, 0.9, 20)


def test_texts_end_a_response_only_if_the_engine_decodes(engine: VLLM, fake: Recording) -> None:
    engine.add("a", EngineRequest([1], replace(SAMPLING, stop=("x", "y"), min_tokens=3)))
    engine.add("b", EngineRequest([1], SAMPLING))
    (_, _, stopped), (_, _, plain) = fake.asked
    assert (stopped.stop, stopped.min_tokens, stopped.detokenize) == (["x", "y"], 3, True)
    assert (plain.stop, plain.min_tokens, plain.detokenize) == ([], 0, False)


@pytest.mark.parametrize("ignored", [True, False])
def test_ends_are_passed_on_unless_they_are_ignored(engine: VLLM, fake: Recording, ignored: bool) -> None:
    engine.add("a", EngineRequest([1], SAMPLING, ends=(3, 7), ignore_eos=ignored))
    ((_, _, params),) = fake.asked
    assert (params.stop_token_ids, params.ignore_eos) == ([] if ignored else [3, 7], ignored)


def test_the_cache_comes_last_when_an_engine_wakes(engine: VLLM, fake: Recording) -> None:
    engine.sleep()
    engine.wake([], 1.0, 3)
    assert fake.log == ["sleep 2", "wake ['weights']", *LOAD, "wake ['kv_cache']"] and fake.version == "3"


def test_a_base_that_is_not_sent_again_is_kept_on_the_host(fake: Recording, config: Config) -> None:
    config.model.lora.rank, config.model.lora.weight_sync = 4, "adapter"
    VLLM(config.model, config.rollout, 64, 0).sleep()
    assert fake.log == ["sleep 1"]


@pytest.mark.parametrize(("recompute", "resets"), [(True, ["reset True"]), (False, [])])
def test_an_update_drops_the_cache_if_it_is_to_be_computed_again(
    engine: VLLM, fake: Recording, recompute: bool, resets: list[str]
) -> None:
    engine.update([], 1.0, 5, recompute)
    assert fake.log == [*LOAD, *resets] and fake.version == "5"


def test_what_an_engine_forgets_and_that_it_has_nothing_to_drain(engine: VLLM, fake: Recording) -> None:
    engine.abort(["a"])
    assert fake.log == ["abort ['a']"] and engine.drain() == []


@pytest.mark.vllm
def test_an_engine_reads_the_weights_of_the_trainer_at_the_length_of_its_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    made: list[Any] = []

    calls: list[Any] = []
    engine = SimpleNamespace(collective_rpc=lambda *call, **options: calls.append((*call, options)))

    def begun(arguments: Any) -> SimpleNamespace:
        made.append((arguments, sorted(path.name for path in Path(arguments.model).glob("*.safetensors"))))
        return engine

    monkeypatch.setattr(LLMEngine, "from_engine_args", begun)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 2048}
    folder = configured(copied(tiny_model, tmp_path / "two"), rope_parameters=yarn)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    config = Config()
    for path, length, tokens in ((folder, {"max_position_embeddings": 8192}, 3000), (tiny_model, {}, 1500)):
        config.model.path = str(path)
        config.rollout.engine_kwargs = {"load_format": "auto"}
        assert module.build(config.model, config.rollout, tokens, 0) is engine
        arguments, files = made.pop()
        assert files == ["model.safetensors"] and arguments.tokenizer == str(path)
        assert (arguments.load_format, arguments.config_format) == ("hf", "hf")
        assert arguments.hf_overrides == length
    assert arguments.model == str(tiny_model)
    config.rollout.engine_kwargs = {"hf_overrides": {"rope_theta": 5.0}}
    module.build(config.model, config.rollout, 1500, 0)
    told = {"kwargs": {"init_info": {"made_by": "AutoModelForCausalLM"}}}
    assert calls == [("init_weight_transfer_engine", told)] * 3
    assert made[0][0].hf_overrides == {"rope_theta": 5.0} and made[0][0].load_format == "dummy"
