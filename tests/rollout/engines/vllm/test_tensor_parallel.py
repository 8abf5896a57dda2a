"""Engines on several GPUs: what Ray and vLLM are asked for. None is started."""

from typing import Any

import pytest

from pipeline import stream
from pipeline.config import Config
from pipeline.rollout.engines.vllm import tensor_parallel


@pytest.fixture
def config() -> Config:
    made = Config()
    made.rollout.num_cpus, made.rollout.num_gpus, made.rollout.tensor_parallel_size = 3, 1, 4
    return made


def groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[dict[str, float]], dict[str, Any]]]:
    """Placement groups that are asked for: bundles and options."""
    asked: list[tuple[list[dict[str, float]], dict[str, Any]]] = []

    def make(bundles: list[dict[str, float]], **options: Any) -> str:
        asked.append((bundles, options))
        return f"group {len(asked)}"

    monkeypatch.setattr("ray.util.placement_group", make)
    return asked


def test_every_engine_has_a_group_of_its_own_on_one_node(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = groups(monkeypatch)
    args = stream.engines(config, 2, 5)
    assert (args["num_cpus"], args["num_gpus"]) == (3, 0) and args["compute"].max_size == 2
    strategies = [args["ray_remote_args_fn"]()["scheduling_strategy"] for _ in range(2)]
    assert [strategy.placement_group for strategy in strategies] == ["group 1", "group 2"]
    for strategy in strategies:
        # vLLM's workers take the GPUs of the actor's group.
        assert strategy.placement_group_bundle_index == 0 and strategy.placement_group_capture_child_tasks
    wanted = [{"CPU": 3, "GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]
    assert asked == [(wanted, {"strategy": "STRICT_PACK"})] * 2


def test_the_group_follows_the_placement(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = groups(monkeypatch)
    config.trainer.placement = {"rollout": {"kind": "engine"}}
    args = stream.engines(config, 1, 1)
    assert "label_selector" not in args, "the bundles have it"
    args["ray_remote_args_fn"]()
    ((_, options),) = asked
    assert options["bundle_label_selector"] == [{"kind": "engine"}] * 4


def test_the_executor_lets_published_weights_go(config: Config) -> None:
    env = stream.engines(config, 1, 1)["runtime_env"]["env_vars"]
    assert env.items() >= {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}.items()


def test_an_engine_on_one_gpu_is_as_ever(config: Config) -> None:
    config.rollout.tensor_parallel_size = 1
    args = stream.engines(config, 1, 1)
    assert args["num_gpus"] == 1 and "ray_remote_args_fn" not in args
    assert not args["runtime_env"]["env_vars"].keys() & tensor_parallel.ENV.keys()
    assert tensor_parallel.engine_args(1) == {}
