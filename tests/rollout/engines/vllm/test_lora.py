"""The real engine with adapters, merged and alone: its log-probs are the trainer's after every update."""

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from pipeline.config import Config
from tests.rollout.engines import place as places
from tests.rollout.engines.place import Engine, Place, in_flight, repeated, updates

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def with_lora(publish: str, config: Config) -> None:
    config.model.lora.rank, config.model.lora.weight_sync = 6, publish
    if publish == "adapter":
        config.model.lora.target_modules = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


class Adapted(Place):
    """A policy whose adapter alone is trained."""

    def publish(self) -> int:
        import torch

        from pipeline.models import adapter
        from pipeline.weights.publish import pack, parts

        lora, version = self.config.model.lora, len(self.versions.shards)
        names = [adapter.peft_name(name) for name, _ in self.policy.named_parameters() if ".lora_" in name]
        settings = adapter.settings_of(lora, self.config.model.path, names) if lora.alone else None
        rename = self.policy.hf_name
        self.versions.shards[version] = [
            pack(
                parts(self.policy, rank, torch.float32, rename, settings is not None),
                rank,
                60_000,
                lambda data: data,
                adapter=settings,
            )
            for rank in (0, 1)
        ]
        self.weights[version] = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}
        return version

    def step(self) -> int:
        import torch

        generator = torch.Generator().manual_seed(len(self.versions.shards))
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        return self.publish()


def open_place(publish: str, folder: str) -> int:
    places.place = Adapted(True, folder, partial(with_lora, publish))
    return os.getpid()


def published_bytes() -> tuple[int, int]:
    """Of the newest version, and of the whole model."""
    place = places.place
    whole = sum(parameter.numel() for name, parameter in place.policy.named_parameters() if ".lora_" not in name)
    shards = place.versions.shards[max(place.versions.shards)]
    return sum(len(bucket) for shard in shards for bucket in shard.buckets), 4 * whole


def refused() -> str:
    """What an engine says to an adapter of more rows than it was started for."""
    place = places.place
    version = place.step()
    for shard in place.versions.shards[version]:
        object.__setattr__(shard, "adapter", {**(shard.adapter or {}), "r": 64})
    try:
        place.loop.run_until_complete(asyncio.wait_for(place.rollout(place.chunk(version)), 60))
    except Exception as error:  # noqa: BLE001 (its text is what the test is about)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misplaced() -> str:
    """What an engine says to the adapter of a layer that its model does not have."""
    import torch

    from pipeline.weights.publish import WeightPart, pack, parts

    place = places.place
    version = place.step()
    layer = "model.layers.7.self_attn.q_proj.lora_"
    shapes = {f"{layer}A.default.weight": (6, 64), f"{layer}B.default.weight": (64, 6)}
    more = [WeightPart(name, shape, torch.float32, torch.ones(shape), (0, 0)) for name, shape in shapes.items()]
    weights = [*parts(place.policy, 0, torch.float32, place.policy.hf_name, adapter_alone=True), *more]
    settings = place.versions.shards[version][0].adapter
    place.versions.shards[version] = [pack(weights, 0, 60_000, lambda data: data, adapter=settings)]
    try:
        place.loop.run_until_complete(asyncio.wait_for(place.rollout(place.chunk(version)), 60))
    except Exception as error:  # noqa: BLE001 (its text is what the test is about)
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module", params=["adapter", "merged"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    running: Any = Engine(open_place, request.param, str(tmp_path_factory.mktemp("engine") / "model"))
    running.publish = request.param
    yield running
    running.close()


def test_log_probs_are_the_trainers_after_every_update(engine: Any) -> None:
    found = engine(updates, 0.7)
    assert all(seen == {version} for version, seen in found["versions"])
    assert max(found["gaps"]) < 1e-4, found
    assert min(found["stale"]) > 0.1, found
    size, whole = engine(published_bytes)
    assert size < whole / 3 if engine.publish == "adapter" else size == whole


@pytest.mark.parametrize("update_kv", ["recompute", "keep"])
def test_updates_in_flight_reach_running_requests(engine: Any, update_kv: str) -> None:
    found = engine(in_flight, update_kv)
    runs = [[run["version"] for run in row] for row in found["old"]]
    assert runs == [[found["first"], found["second"]]] * 16, "every response goes on with the new adapter"
    gaps = found["gaps"]
    assert gaps["old 0"] < 1e-4 and gaps["new 1"] < 1e-4, gaps
    assert gaps["old 1"] < 1e-4 if update_kv == "recompute" else gaps["old 1"] > 1e-3, gaps


def test_seed_makes_responses_repeatable(engine: Any) -> None:
    found = engine(repeated)
    assert found["first"] == found["again"] != found["other"]


def test_an_adapter_that_the_engine_cannot_use_is_refused(engine: Any) -> None:
    if engine.publish == "adapter":
        said = engine(refused)
        assert said.startswith("FinalError: the engine cannot use the adapter") and "LoRA rank 64" in said
        assert said.endswith("set model.lora.weight_sync=merged, or other model.lora.target_modules")


def test_an_adapter_of_a_layer_that_the_engine_lacks_is_refused(engine: Any) -> None:
    if engine.publish == "adapter":
        said = engine(misplaced)
        assert "no place for the adapters of 1 layers, the first model.layers.7.self_attn.q" in said
        assert said.startswith("FinalError") and "set model.lora.weight_sync=merged" in said
