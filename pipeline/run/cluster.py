"""Provides Ray for a driver: the cluster that `RAY_ADDRESS` names, as in `ray job submit`, else one on this machine."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from pipeline.run.begin import join, start_here
from pipeline.run.submitted import check_address, joined
from pipeline.upstream.ray_jobs import RayJobConfig

ENV = {
    "RAY_TRAIN_V2_ENABLED": "1",
    # Tokenizers are called from threads of many processes; their own threads would only warn and compete.
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # The second half of `pipeline/upstream/ray_waits.py`.
    "RAY_DATA_METADATA_PREFETCH_ON_THREAD": "0",
}


LOCAL_RAY = {
    # Ray ends workers that are idle for a second as soon as a machine has more of them than CPUs. A run has more actors
    # than that here, so every iteration would start the workers of its light stages again, imports included.
    "RAY_idle_worker_killing_time_threshold_ms": "3600000",
    # Without a dashboard, the metrics that every process reports have no reader.
    "RAY_enable_metrics_collection": "0",
    # Number of finished tasks that Ray keeps for `ray list tasks`, about 12 KiB each; its default is 100,000.
    "RAY_task_events_max_num_task_in_gcs": "2000",
    # Ray would start a worker for each CPU without knowing its environment; a run's actors have environments of their
    # own.
    "RAY_prestart_worker_first_driver": "0",
}
"""Environment variables of a Ray that is started on this machine."""


HOOK = "worker_process_setup_hook"


def start(num_cpus: int | None, object_store_gb: float | None, env_vars: Mapping[str, Any]) -> bool:
    """Join or start Ray; returns False if this process was using Ray already.

    Args:
        num_cpus: number of CPUs of a Ray on this machine; None takes all of the machine.
        object_store_gb: size of the object store of a Ray on this machine, in GiB; None leaves it to Ray.
        env_vars: environment variables of all workers, in addition to `ENV`.

    Raises:
        ValueError: the cluster cannot be joined, or Ray cannot start with this environment.
        NotStarted: Ray did not start in time.
    """
    env = environment(env_vars)
    os.environ.update(env)
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": env},
        "job_config": RayJobConfig(),
    }
    if address := joined():
        check_address()
        if HOOK not in os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", ""):
            # Ray puts an uploaded working directory before `PYTHONPATH`. A hook of the user's own stays.
            options["runtime_env"][HOOK] = "slipstream.own_first"
        # Ray would refuse a job that was submitted with one of these variables, PYTHONPATH for example.
        os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
        join(address, options)
        return True
    for name, value in LOCAL_RAY.items():
        os.environ.setdefault(name, value)
    # Ray counts the machine's cores and warns if more processes than that start together.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(num_cpus or 0))
    # Without an address Ray would first look for another cluster on this machine.
    options |= {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    if object_store_gb:
        options["object_store_memory"] = int(object_store_gb * 2**30)
    start_here(options)
    return True


def environment(env_vars: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of all workers: `ENV` and `env_vars`, with absolute folders in `PYTHONPATH`.

    Slipstream's source is the first of these folders, and the current folder the last.
    """
    env = ENV | {name: str(value) for name, value in env_vars.items()}
    # The workers run this source tree too, installed or not.
    root = str(Path(__file__).resolve().parents[2])
    folders = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")).split(os.pathsep)
    paths = [root, *(os.path.abspath(os.path.expanduser(folder)) for folder in folders if folder), os.getcwd()]
    return env | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def release_placement_groups() -> None:
    """Remove this job's placement groups.

    The groups of a killed Ray Train controller would hold their CPUs and GPUs until the end of the job: Ray Train's own
    cleaner needs the dashboard, which not every Ray has.
    """
    job = ray.get_runtime_context().get_job_id()
    for number, group in placement_group_table().items():
        # The id ends with the id of the job that created the group.
        if number.endswith(job) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))
