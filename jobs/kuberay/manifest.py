"""RayJob manifests, read and checked before they hold a machine.

A manifest is plain YAML to edit. Checked here is what neither Kubernetes nor KubeRay can know: that the groups together
can run the settings in the entrypoint, and that whatever must outlive a cluster lies on a volume that does.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from pipeline.config import Config, load_config
from pipeline.plan import Plan, check_resources, plan
from pipeline.versions import TESTED

OUTLIVING = ("persistentVolumeClaim", "nfs", "cephfs", "csi")
"""Kinds of volumes that outlive a pod and can be mounted by several at a time."""

MARKERS = ("-m", "jobs.train")
COMMAND_ENDS = ("&&", "||", ";", "|", "&")
GPU = "nvidia.com/gpu"
UNITS = {"m": 1e-3, "": 1.0, "k": 1e3}


class ManifestError(ValueError):
    """A manifest that KubeRay would take and that could not run, or not continue; the message says why."""


@dataclass(frozen=True)
class Group:
    """Pods of one kind: the head, or a group of workers."""

    name: str
    replicas: int
    """Pods that are there when the job starts."""
    cpus: float
    """CPUs that Ray is told one pod has."""
    gpus: float
    labels: dict[str, str]
    """Of its Ray nodes."""
    mounts: dict[str, dict[str, Any]]
    """Volumes by the path at which the Ray container sees them."""


@dataclass(frozen=True)
class RayJob:
    """The parts of a manifest that the checks read."""

    name: str
    settings: tuple[str, ...]
    """Arguments of `jobs.train` in the entrypoint."""
    groups: tuple[Group, ...]
    """The head first."""


def check(path: str | Path) -> Plan:
    """The plan of the run that the manifest starts.

    Args:
        path: a YAML file with one RayJob; other documents in it are passed over.

    Raises:
        ManifestError: the manifest cannot run its settings, or would lose what it made.
        ConfigError: the settings themselves cannot be run, or their actors do not fit the pods.
        OSError: the file cannot be read.
    """
    try:
        documents = [doc for doc in yaml.safe_load_all(Path(path).read_text(encoding="utf-8")) if doc]
    except yaml.YAMLError as error:
        raise ManifestError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    jobs = [doc for doc in documents if isinstance(doc, dict) and doc.get("kind") == "RayJob"]
    if len(jobs) != 1:
        raise ManifestError(f"{path} holds {len(jobs)} RayJobs; it must hold one")
    try:
        job = parse(jobs[0])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ManifestError(f"{path} is not a RayJob with its cluster: {type(error).__name__}: {error}") from error
    config = load_config(job.settings)
    for problem in (*_operator(jobs[0]["spec"]), *_storage(job, config), *_pods(job, jobs[0]["spec"])):
        raise ManifestError(f"{path}: {problem}")
    nodes = [group for group in job.groups for _ in range(group.replicas)]
    resolved = plan(_elsewhere(config))
    resources = [{"CPU": node.cpus, "GPU": node.gpus} for node in nodes]
    check_resources(resolved, resources, [node.labels for node in nodes])
    return resolved


def parse(document: dict[str, Any]) -> RayJob:
    """The parts of a RayJob that the checks read.

    Raises:
        ManifestError: the entrypoint does not call `jobs.train`.
        KeyError, TypeError, AttributeError, IndexError: something that every RayJob has is missing or of another kind.
    """
    spec, cluster = document["spec"], document["spec"]["rayClusterSpec"]
    groups = [_group("head", 1, cluster["headGroupSpec"])]
    groups += [_group(group["groupName"], group["replicas"], group) for group in cluster.get("workerGroupSpecs", [])]
    return RayJob(document["metadata"]["name"], settings_of(spec["entrypoint"]), tuple(groups))


def settings_of(entrypoint: str) -> tuple[str, ...]:
    """The arguments of `python -m jobs.train` in a shell command.

    Raises:
        ManifestError: the command does not call it once.
    """
    words = shlex.split(entrypoint)
    starts = [index + 2 for index in range(len(words)) if tuple(words[index : index + 2]) == MARKERS]
    if len(starts) != 1:
        raise ManifestError(f"the entrypoint calls `python -m jobs.train` {len(starts)} times where once is expected")
    rest = words[starts[0] :]
    ends = [index for index, word in enumerate(rest) if word in COMMAND_ENDS]
    return tuple(rest[: ends[0]] if ends else rest)


def _group(name: str, replicas: int, spec: dict[str, Any]) -> Group:
    pod = spec["template"]["spec"]
    container, limits = pod["containers"][0], pod["containers"][0]["resources"]["limits"]
    told, own = spec.get("rayStartParams", {}), spec.get("resources", {})
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    return Group(
        name=name,
        replicas=replicas,
        cpus=float(told.get("num-cpus", own.get("CPU", -(-quantity(limits["cpu"]) // 1)))),
        gpus=float(told.get("num-gpus", own.get("GPU", limits.get(GPU, 0)))),
        labels=dict(spec.get("labels", {})),
        mounts={mount["mountPath"]: volumes[mount["name"]] for mount in container.get("volumeMounts", [])},
    )


def quantity(text: str | int | float) -> float:
    """A number of CPUs as Kubernetes writes it: `4`, `500m`."""
    digits = str(text).rstrip("mk")
    return float(digits) * UNITS[str(text)[len(digits) :]]


def _elsewhere(config: Config) -> Config:
    """The settings with paths that lie on the cluster's volumes replaced by names that no check looks up here."""
    for section in (config.model, config.critic, config.scoring.reference, config.reward.model):
        if section.path is not None and section.path.startswith("/"):
            section.path = "on/volume"
    if config.model.tokenizer_path is not None and config.model.tokenizer_path.startswith("/"):
        config.model.tokenizer_path = None
    return config


def _operator(spec: dict[str, Any]) -> Iterator[str]:
    """What KubeRay or Ray would refuse or hold against the job only once it runs."""
    cluster = spec["rayClusterSpec"]
    version = TESTED[("ray",)].removeprefix("==")
    if str(cluster.get("rayVersion")) != version:
        yield f"rayVersion is {cluster.get('rayVersion')}; the image has {version}"
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield (
            "authOptions.mode is not token, so whoever reaches the head can run code on the cluster; set "
            "authOptions: {mode: token}"
        )
    if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes: true"
    for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])):
        name = group.get("groupName", "head")
        if "labels" in group.get("rayStartParams", {}):
            yield f"group {name}: KubeRay refuses labels in rayStartParams; write them into the group's field labels"
        container = group["template"]["spec"]["containers"][0]["resources"]
        for kind, limit in container["limits"].items():
            if container.get("requests", {}).get(kind) != limit:
                yield (
                    f"group {name}: {kind} is requested as {container.get('requests', {}).get(kind)} and limited to "
                    f"{limit}; Ray counts with the limit, so they must be equal"
                )


def _storage(job: RayJob, config: Config) -> Iterator[str]:
    """What the next cluster, or another pod of this one, would not find."""
    trainer = config.trainer
    used = {"trainer.default_local_dir": trainer.default_local_dir}
    used |= {f"data.{name}_files": getattr(config.data, f"{name}_files") for name in ("train", "val")}
    for key in ("model.path", "critic.path", "scoring.reference.path", "reward.model.path"):
        section = config
        for part in key.split("."):
            section = getattr(section, part)
        # A hub name is no path.
        used |= {key: section} if isinstance(section, str) and section.startswith("/") else {}
    for key, value in used.items():
        for path in value if isinstance(value, list) else [value]:
            if path is None or ("://" in path and key != "trainer.default_local_dir"):
                continue
            if not path.startswith("/"):
                yield f"{key}={path} is relative, so each pod has its own; give an absolute path on a shared volume"
                continue
            for group in job.groups:
                volume = _volume(group, path)
                if volume is None or not any(kind in volume for kind in OUTLIVING):
                    where = "no volume" if volume is None else f"the volume {volume['name']}, which ends with its pod"
                    yield (
                        f"{key}={path} lies on {where} in group {job.name}/{group.name}; a retry is a new cluster, so "
                        f"mount one that outlives it there ({', '.join(OUTLIVING)})"
                    )


def _volume(group: Group, path: str) -> dict[str, Any] | None:
    """The volume on which a path lies; None where it is the container's own disk."""
    parents = [str(parent) for parent in (PurePosixPath(path), *PurePosixPath(path).parents)]
    return next((group.mounts[parent] for parent in parents if parent in group.mounts), None)


def _pods(job: RayJob, spec: dict[str, Any]) -> Iterator[str]:
    """What would make pods slow, or the run wait for pods that never come."""
    if job.groups[0].cpus:
        yield f"the head offers {job.groups[0].cpus:g} CPUs to the run; give it rayStartParams: {{num-cpus: '0'}}"
    for group in job.groups:
        if group.mounts.get("/dev/shm", {}).get("emptyDir", {}).get("medium") != "Memory":
            yield (
                f"group {group.name} has no emptyDir of medium Memory at /dev/shm; Ray would put its object store on "
                "disk"
            )
    for group in spec["rayClusterSpec"].get("workerGroupSpecs", []):
        low, now, high = (group[name] for name in ("minReplicas", "replicas", "maxReplicas"))
        if not low <= now <= high:
            yield f"group {group['groupName']}: replicas={now} is not between minReplicas={low} and maxReplicas={high}"
        gpus = _group(group["groupName"], now, group).gpus
        if gpus and low < now:
            yield (
                f"group {group['groupName']}: minReplicas={low} lets the autoscaler take away GPUs that the run holds; "
                f"set it to replicas={now}"
            )
