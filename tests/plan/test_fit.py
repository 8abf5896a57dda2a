"""GPUs whose memory is too small for what is on them."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import load_config
from pipeline.plan.fit import too_large
from pipeline.plan.gpus import GIB, GPUS, Gpu, known, local_gpu, parse
from pipeline.plan.memory import Models, estimate
from pipeline.plan.models import ModelFiles

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 8}
MODEL = ModelFiles(SIZES, parameters=GIB, head=0)
RUN = ["trainer.use_gpu=true", "rollout.num_gpus=1", "data.train_batch_size=64", "actor.ppo_max_token_len_per_gpu=1024"]


def found(gib: float, *settings: str) -> list[str]:
    config = load_config([*RUN, *settings])
    return list(too_large(config, estimate(config, Models(MODEL, MODEL, MODEL, None)), Gpu("Z1", int(gib * GIB), 1)))


def test_train_worker_and_engine_on_gpus_of_their_own() -> None:
    """16 GiB of state, and 5 for gathered layers and their gradients; an engine of 2 GiB in half of a GPU."""
    assert found(30) == []
    [worker] = found(23)
    assert worker.startswith("a train worker needs 21.0 GiB of 23 GiB (Z1), and an estimate may fill 20.7 GiB")
    assert found(23, "trainer.num_workers=2") == []
    engine = found(30, "rollout.gpu_memory_utilization=0.05")
    assert len(engine) == 1 and engine[0].startswith("an engine needs 2.0 GiB of each GPU for weights and one sequence")
    assert found(4, "trainer.use_gpu=false", "rollout.tensor_parallel_size=2") == []
    assert found(4, "trainer.use_gpu=false") != []


def test_both_on_one_gpu() -> None:
    shared = ["rollout.num_gpus=0.4", "trainer.gpus_per_worker=0.6"]
    assert found(60, *shared) == []
    [beside] = found(40, *shared)
    assert beside.startswith("a train worker with an engine that never sleeps and an engine need 21.0 GiB + 20.0 GiB")
    # An engine sleeps while layers are gathered.
    assert found(41, *shared, "rollout.sleep=true") == []
    [between] = found(36, *shared, "rollout.sleep=true")
    assert between.startswith("a train worker between updates and an engine need 16.0 GiB + 18.0 GiB")


def test_engines_that_share_a_gpu_add_up() -> None:
    several = ["rollout.num_gpus=0.5", "rollout.num_engines=4"]
    assert found(30, "rollout.gpu_memory_utilization=0.4", *several) == []
    [two] = found(30, "rollout.gpu_memory_utilization=0.6", *several)
    assert two.startswith("2 engines of rollout.num_gpus=0.5 on one GPU need 2 x 18.0 GiB")


def test_a_replica_holds_a_whole_model() -> None:
    kl = ["actor.use_kl_loss=true", "scoring.reference.num_gpus=0.05"]
    assert found(60, *kl) == []
    [replica] = found(40, *kl)
    assert replica == (
        "a reference replica has 2.0 GiB of weights, and scoring.reference.num_gpus=0.05 is 2.0 GiB of 40 GiB (Z1)"
    )


def test_kinds_of_gpus() -> None:
    assert known("NVIDIA H100 80GB HBM3") is GPUS["H100"] and known("NVIDIA L40S") is GPUS["L40S"]
    for card in ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"):
        assert known(card) is GPUS["A100-40GB"]
    for card in ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"):
        assert known(card) is GPUS["A100"]
    assert known("NVIDIA L4") is GPUS["L4"] and known("NVIDIA T4") is known("NVIDIA L40") is None
    assert parse("16xH200") == (16, GPUS["H200"])
    for text, part in (
        ("0", "is not a number of GPUs"),
        ("xH100", "is not a number"),
        ("", "is not a number"),
        ("8x", "names an unknown kind"),
        ("8xT4", "known are A100,"),
    ):
        with pytest.raises(ValueError, match=part):
            parse(text)


@pytest.mark.parametrize(
    ("card", "wanted"),
    [
        ("NVIDIA A100-SXM4-40GB, 40960", GPUS["A100-40GB"]),
        ("NVIDIA H100 80GB HBM3, 81559", GPUS["H100"]),
        ("NVIDIA H100 80GB HBM3, 40960", replace(GPUS["H100"], memory=40 * GIB)),
        ("Some Card, 1024", Gpu("Some Card", GIB, None)),
        ("No devices were found", None),
    ],
)
def test_the_gpu_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str, wanted: Gpu | None
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\necho '{card}'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert local_gpu() == wanted
    assert parse("2") == (2, wanted or GPUS["H100"])


def test_a_machine_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_gpu() is None and parse("4") == (4, GPUS["H100"])
