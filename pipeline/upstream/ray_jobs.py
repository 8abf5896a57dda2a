"""Configuration of a Ray job whose workers do not search the current folder for modules first.

Ray (2.60) puts the driver's current folder at the beginning of `sys.path` of all workers, before `PYTHONPATH`
(https://github.com/ray-project/ray/pull/28140), so a folder `pipeline` of the user would be imported instead of
Slipstream's. Ray does not do so for jobs with a working directory. Whether a job has one is decided by a method of
`JobConfig`, which is overridden here.
"""

from ray.job_config import JobConfig

from pipeline.upstream import private

DECIDES = "_runtime_env_has_working_dir"


class RayJobConfig(JobConfig):
    """Configuration of a Ray job that seems to have a working directory, so that Ray leaves `sys.path` as it is.

    `run/cluster.py` puts the current folder into `PYTHONPATH`, after Slipstream's folder.

    Raises:
        ImportError: this Ray has no such method.
    """

    def __init__(self) -> None:
        private(JobConfig, DECIDES, "ray")
        super().__init__()

    def _runtime_env_has_working_dir(self) -> bool:
        return True
