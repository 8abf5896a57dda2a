"""The manifests are what the operator takes, and their pods can run what their entrypoints ask for."""

import copy
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jobs.kuberay.__main__ import main
from jobs.kuberay.manifest import ManifestError, check, settings_of
from pipeline.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = {path.stem: path for path in (ROOT / "jobs" / "kuberay").glob("*.yaml") if path.stem != "storage"}
CRD = Path(os.environ.get("KUBERAY_CRD_DIR", ROOT.parent / "shared" / "data" / "kuberay"), "ray.io_rayjobs.crd.yaml.gz")
CPU_WORKER = ("rayClusterSpec", "workerGroupSpecs", 0)
POD = ("template", "spec")


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load(MANIFESTS[name].read_text())


def changed(name: str, value: Any, *keys: str | int) -> dict[str, Any]:
    """The manifest with another value at one place of its `spec`; aliases elsewhere keep theirs."""
    # YAML makes one object of an anchor and its aliases.
    manifest = copy.deepcopy(load(name))
    place = manifest["spec"]
    for key in keys[:-1]:
        place[key] = copy.copy(place[key])
        place = place[key]
    place[keys[-1]] = value(place[keys[-1]]) if callable(value) else value
    return manifest


Write = Callable[[dict[str, Any]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(manifest: dict[str, Any]) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(manifest))
        return path

    return to_file


def strict(schema: Any) -> Any:
    """The schema with unknown fields refused, as the API server does it."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not {"additionalProperties", PRESERVED} & schema.keys():
        result["additionalProperties"] = False
    return result


PRESERVED = "x-kubernetes-preserve-unknown-fields"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    if not CRD.is_file():
        pytest.skip(f"{CRD} is not there (KUBERAY_CRD_DIR names its folder)")
    with gzip.open(CRD) as file:
        versions = yaml.safe_load(file)["spec"]["versions"]
    return jsonschema.Draft7Validator(
        strict(next(version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1"))
    )


def test_there_are_three_manifests() -> None:
    assert sorted(MANIFESTS) == ["cpu_demo", "one_group", "three_groups"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_operator_takes_the_manifest(name: str, validator: jsonschema.Draft7Validator) -> None:
    validator.validate(load(name))


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        (1, ("shutdownAfterJobFinish",)),
        ("3", ("backoffLimit",)),
        ("none", ("rayClusterSpec", "authOptions", "mode")),
        ("4Gi", (*CPU_WORKER, *POD, "containers", 0, "memory")),
    ],
)
def test_the_schema_is_held_against_every_field(
    validator: jsonschema.Draft7Validator, value: Any, keys: tuple[str | int, ...]
) -> None:
    manifest = load("cpu_demo")
    place: Any = manifest["spec"]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(manifest)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_pods_can_hold_the_run(name: str) -> None:
    gpus = 0 if name == "cpu_demo" else 8
    assert check(MANIFESTS[name]).gpus == gpus


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_every_manifest_has(name: str) -> None:
    spec = load(name)["spec"]
    assert spec["shutdownAfterJobFinishes"] and spec["ttlSecondsAfterFinished"] and spec["preRunningDeadlineSeconds"]
    assert spec["backoffLimit"] >= 1
    cluster = spec["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        env = {entry["name"] for entry in group["template"]["spec"]["containers"][0]["env"]}
        assert {"RAY_idle_worker_killing_time_threshold_ms", "RAY_JOB_STOP_WAIT_TIME_S"} <= env
    if name != "cpu_demo":
        assert "MLFLOW_TRACKING_URI" in env and "gcsFaultToleranceOptions:" in MANIFESTS[name].read_text()


def test_the_demo_makes_its_model_with_the_makefile() -> None:
    first, _ = load("cpu_demo")["spec"]["entrypoint"].split("&&")
    words = first.split()
    assert words[:4] == ["make", "-C", "/opt/slipstream", "demo-model"]
    makefile = (ROOT / "Makefile").read_text()
    assert "\ndemo-model: $(WARM)/config.json" in makefile
    assert all(f"\n{word.split('=')[0]} := " in makefile for word in words[4:])
    assert "WORKDIR /opt/slipstream" in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("name", "value", "keys", "message"),
    [
        (
            "one_group",
            "4",
            (*CPU_WORKER, *POD, "containers", 0, "resources", "limits", "nvidia.com/gpu"),
            "requested as 8",
        ),
        ("one_group", {"num-gpus": "4"}, (*CPU_WORKER, "rayStartParams"), r"= 8 GPUs and the cluster has 4"),
        ("cpu_demo", {"num-cpus": "4"}, (*CPU_WORKER, "rayStartParams"), r"5 CPUs and the cluster has 4"),
        ("cpu_demo", 0, (*CPU_WORKER, "replicas"), r"replicas=0 is not between minReplicas=1"),
        (
            "three_groups",
            {"role": "rolout"},
            ("rayClusterSpec", "workerGroupSpecs", 1, "labels"),
            "labelled role=rollout",
        ),
        ("three_groups", 3, ("rayClusterSpec", "workerGroupSpecs", 1, "minReplicas"), "take away GPUs"),
        (
            "three_groups",
            lambda text: text.replace("rollout.role=rollout", "rollout.role=train"),
            ("entrypoint",),
            r"rollout \+ train need 8 GPUs on nodes labelled role=train .* have 4",
        ),
        ("cpu_demo", {}, ("rayClusterSpec", "headGroupSpec", "rayStartParams"), "the head offers 1 CPUs"),
        ("cpu_demo", {"labels": "a=b", "num-cpus": "8"}, (*CPU_WORKER, "rayStartParams"), "labels in rayStartParams"),
        ("cpu_demo", "2.59.0", ("rayClusterSpec", "rayVersion"), "rayVersion is 2.59.0; the image has 2.60.0"),
        ("cpu_demo", {}, ("rayClusterSpec", "authOptions"), "authOptions.mode is not token"),
        ("cpu_demo", False, ("shutdownAfterJobFinishes",), "ttlSecondsAfterFinished needs"),
        (
            "cpu_demo",
            lambda text: text.replace("/mnt/slipstream/runs", "runs"),
            ("entrypoint",),
            "trainer.default_local_dir=runs is relative",
        ),
        (
            "cpu_demo",
            lambda text: text.replace("model.path=/mnt/slipstream", "model.path=/cache"),
            ("entrypoint",),
            "model.path=/cache/models/tiny-sft-1 lies on no volume in group slipstream-cpu-demo/head",
        ),
        (
            "cpu_demo",
            [{"name": "runs", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
            (*CPU_WORKER, *POD, "volumes"),
            "the volume runs, which ends with its pod in group slipstream-cpu-demo/cpu",
        ),
        (
            "cpu_demo",
            [{"name": "runs", "persistentVolumeClaim": {}}, {"name": "shm", "emptyDir": {}}],
            (*CPU_WORKER, *POD, "volumes"),
            "group cpu has no emptyDir of medium Memory at /dev/shm",
        ),
        ("cpu_demo", lambda text: text + " rollout.numengines=2", ("entrypoint",), "rollout.num_engines"),
        ("cpu_demo", "echo", ("entrypoint",), r"calls `python -m jobs.train` 0 times"),
        ("cpu_demo", None, ("rayClusterSpec",), "is not a RayJob with its cluster"),
    ],
)
def test_a_manifest_that_cannot_run_or_continue_is_refused(
    write: Write, name: str, value: Any, keys: tuple[str | int, ...], message: str
) -> None:
    with pytest.raises((ManifestError, ConfigError), match=message):
        check(write(changed(name, value, *keys)))


def test_settings_end_with_their_command() -> None:
    assert settings_of("prepare a=1 && python -m jobs.train b=2 'c=[1, 2]' && echo d=3") == ("b=2", "c=[1, 2]")
    with pytest.raises(ManifestError, match="2 times"):
        settings_of("python -m jobs.train a=1; python -m jobs.train b=2")


def test_the_command(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(MANIFESTS["cpu_demo"]), str(MANIFESTS["one_group"])]) == 0
    assert "10 CPUs and 8 GPUs" in capsys.readouterr().out
    assert main([str(write(changed("cpu_demo", "1.0", "rayClusterSpec", "rayVersion")))]) == 2
    assert "rayVersion is 1.0" in capsys.readouterr().err
    broken = write({"kind": "Job"})
    assert main([str(broken)]) == 2
    assert "holds 0 RayJobs" in capsys.readouterr().err
