"""Check RayJob manifests: `python -m jobs.kuberay jobs/kuberay/one_group.yaml`."""

import argparse
import sys

from jobs.kuberay.manifest import check
from jobs.train import complain


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code (0 all can run, 2 one cannot)."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.kuberay",
        description="Check that the pods of RayJob manifests can run the settings in their entrypoints. Nothing is "
        "sent to a cluster.",
    )
    parser.add_argument(
        "manifests", nargs="+", metavar="FILE.yaml", help="a RayJob, such as jobs/kuberay/cpu_demo.yaml"
    )
    for path in parser.parse_args(arguments).manifests:
        try:
            resolved = check(path)
        except (ValueError, OSError) as error:
            complain(str(error))
            return 2
        print(f"{path}: its pods can hold the run, which needs {resolved.cpus:g} CPUs and {resolved.gpus:g} GPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
