"""Run `jobs.train` as a RayJob: `python -m jobs.kuberay.train experiment=countdown_cpu ...`.

KubeRay retries every failed job on a new cluster (`backoffLimit`), after any exit code, but not a job that was stopped.
So after exit code 2 (bad settings or input, which a new cluster would refuse again) this job stops itself through Ray:
`kubectl get rayjob` shows STOPPED, and the reason is in the job's log.

This is one command, not a shell script with two, because KubeRay's `K8sJobMode` would run a second command outside of
Ray.
"""

import json
import os
import sys
import time

from jobs import train

REFUSED = 2
"""Exit code of `jobs.train` for settings or input that cannot be used."""
STOP_S = 60.0
"""Time limit, in seconds, for Ray to end this process after the job was stopped."""


def main(arguments: list[str] | None = None) -> int:
    """Train with `arguments`, and stop the Ray job of this process if they are refused. Returns the exit code."""
    try:
        code = train.main(sys.argv[1:] if arguments is None else arguments)
    except SystemExit as wrong_option:
        code = int(wrong_option.code or 0)
    if code == REFUSED:
        from ray.job_submission import JobSubmissionClient

        job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]["job_submission_id"]
        print(f"The settings or the input cannot be used, so {job} is stopped and not tried again.", flush=True)
        JobSubmissionClient().stop_job(job)
        time.sleep(STOP_S)
    return code


if __name__ == "__main__":
    sys.exit(main())
