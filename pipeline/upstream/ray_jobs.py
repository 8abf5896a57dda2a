"""A Ray job whose workers do not look for modules in the current folder first.

Ray (2.60) puts the driver's current folder at the beginning of `sys.path` of all workers, before `PYTHONPATH`
(https://github.com/ray-project/ray/pull/28140), so a folder of the user named `pipeline` would take our place. It does
not for a job with a working directory, which a method of `JobConfig` decides.
"""

from ray.job_config import JobConfig

from pipeline.upstream import private

DECIDES = "_runtime_env_has_working_dir"


class RayJobConfig(JobConfig):
    """The settings of such a job. `PYTHONPATH` has the current folder, after Slipstream's (`run/cluster.py`).

    Raises:
        ImportError: this Ray has no such method.
    """

    def __init__(self) -> None:
        private(JobConfig, DECIDES, "ray")
        super().__init__()

    def _runtime_env_has_working_dir(self) -> bool:
        return True
