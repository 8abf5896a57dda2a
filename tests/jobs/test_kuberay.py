"""The manifests: the operator takes them, their pods can hold the run, and a claim holds what outlives a cluster."""

import gzip
import os
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jobs.demo import Demo
from jobs.kuberay import train
from pipeline.config import Config, load_config
from pipeline.plan.checks import check
from pipeline.plan.placement import Node, check_resources
from pipeline.plan.plan import plan
from pipeline.run.versions import TESTED

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = {path.stem: path for path in (ROOT / "jobs" / "kuberay").glob("*.yaml") if path.stem != "storage"}
CRD = Path(os.environ.get("KUBERAY_CRD_DIR", ROOT.parent / "shared" / "data" / "kuberay"), "ray.io_rayjobs.crd.yaml.gz")
PRESERVED = "x-kubernetes-preserve-unknown-fields"
GPU = "nvidia.com/gpu"

every_manifest = pytest.mark.parametrize("name", MANIFESTS)


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load(MANIFESTS[name].read_text())


def groups(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The head, then the groups of workers."""
    cluster = manifest["spec"]["rayClusterSpec"]
    return [{"replicas": 1, **cluster["headGroupSpec"]}, *cluster["workerGroupSpecs"]]


def container(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]["containers"][0]


def settings(manifest: dict[str, Any]) -> Config:
    """The settings in the entrypoint."""
    entrypoint = manifest["spec"]["entrypoint"]
    assert not set("&|;$`") & set(entrypoint), "KubeRay's submitter would run a second command itself"
    program, settings = shlex.split(entrypoint)[:3], shlex.split(entrypoint)[3:]
    assert program == ["python", "-m", "jobs.kuberay.train"]
    return load_config(settings)


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


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    if not CRD.is_file():
        pytest.skip(f"{CRD} is not there (KUBERAY_CRD_DIR names its folder)")
    with gzip.open(CRD) as file:
        versions = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    v1 = next(version for version in versions if version["name"] == "v1")
    return jsonschema.Draft7Validator(strict(v1["schema"]["openAPIV3Schema"]))


@every_manifest
def test_the_operator_takes_the_manifest(name: str, validator: jsonschema.Draft7Validator) -> None:
    manifest = load(name)
    validator.validate(manifest)
    manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["memory"] = "4Gi"
    with pytest.raises(jsonschema.ValidationError, match="memory"):
        validator.validate(manifest)


@every_manifest
def test_the_pods_can_hold_the_run(name: str) -> None:
    manifest = load(name)
    config = settings(manifest)
    if config.model.path.startswith("/"):
        config.model.path = "on/the-claim"  # no such folder here
    nodes: list[Node] = []
    for group in groups(manifest):
        resources = container(group)["resources"]
        assert resources["requests"] == resources["limits"], "Ray counts with limits"
        cpus = float(group["rayStartParams"].get("num-cpus", resources["limits"]["cpu"]))
        held = {"CPU": cpus, "GPU": resources["limits"].get(GPU, 0)}
        nodes += [Node(held, group.get("labels", {}))] * group["replicas"]
        if GPU in resources["limits"]:
            assert group["minReplicas"] == group["replicas"], "the autoscaler would take GPUs from the run"
    assert nodes[0].resources["CPU"] == 0, "the head is to have no work"
    check(config)
    resolved = plan(config)
    check_resources(resolved.stages, None, nodes)
    assert resolved.gpus == (0 if name == "cpu_demo" else 8)


@every_manifest
def test_what_must_outlive_a_cluster_lies_on_the_claim_in_every_pod(name: str) -> None:
    manifest = load(name)
    config = settings(manifest)
    paths = [config.trainer.default_local_dir, config.data.train_files, config.data.val_files]
    if name == "cpu_demo":
        paths.append(config.model.path)
    for group in groups(manifest):
        mounts = {mount["mountPath"]: mount["name"] for mount in container(group)["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        assert "persistentVolumeClaim" in volumes[mounts["/mnt/slipstream"]]
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert all(path.startswith("/mnt/slipstream/") for path in paths)


@every_manifest
def test_what_every_manifest_has(name: str) -> None:
    spec = load(name)["spec"]
    assert spec["shutdownAfterJobFinishes"] and spec["ttlSecondsAfterFinished"] and spec["preRunningDeadlineSeconds"]
    assert spec["backoffLimit"] >= 1
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert f"=={cluster['rayVersion']}" == TESTED[("ray",)]
    for group in groups({"spec": spec}):
        env = {entry["name"] for entry in container(group)["env"]}
        assert {"RAY_idle_worker_killing_time_threshold_ms", "RAY_JOB_STOP_WAIT_TIME_S"} <= env
        assert "MLFLOW_TRACKING_URI" not in env and "labels" not in group["rayStartParams"]


def test_the_init_step_of_the_demo_makes_its_data_and_its_model() -> None:
    manifest = load("cpu_demo")
    (step,) = groups(manifest)[1]["template"]["spec"]["initContainers"]
    assert step["command"] == ["slipstream", "demo", "--only-model"]
    made = Demo.here("countdown", 1)
    config, folder = settings(manifest), Path(step["workingDir"])
    files = [str(folder / made.data / f"{split}.parquet") for split in ("train", "test")]
    assert [config.data.train_files, config.data.val_files] == files
    assert config.model.path == str(folder / made.model)


@pytest.mark.parametrize("arguments", [["rollout.numengines=2"], ["--no-such-option"]])
def test_a_job_that_is_refused_stops_itself(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "run-1"}}')
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient.__init__", lambda client: None)
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient.stop_job", lambda client, job: stopped.append(job))
    monkeypatch.setattr(train, "STOP_S", 0)
    assert train.main(arguments) == 2 and stopped == ["run-1"]


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_job_that_ends_otherwise_is_left_to_kuberay(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.train.main", lambda arguments: code)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert train.main(["experiment=countdown_cpu"]) == code
