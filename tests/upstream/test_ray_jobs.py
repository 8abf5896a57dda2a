"""Where the workers of a job look for modules."""

import pytest
from ray.job_config import JobConfig

from pipeline.upstream.ray_jobs import DECIDES, RayJobConfig


def test_ray_is_answered_that_there_is_a_working_directory() -> None:
    job, other = RayJobConfig(), JobConfig()
    for one in (job, other):
        one.set_runtime_env({"env_vars": {}})
    assert job._runtime_env_has_working_dir() and not other._runtime_env_has_working_dir()
    # Nothing else of the job changes by it.
    assert job._get_serialized_runtime_env() == other._get_serialized_runtime_env()


def test_another_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(JobConfig, DECIDES)
    with pytest.raises(ImportError, match=DECIDES):
        RayJobConfig()
