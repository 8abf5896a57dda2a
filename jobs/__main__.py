"""The command `slipstream JOB ...`, which runs the same jobs as `python -m jobs.JOB ...`."""

import difflib
import importlib
import os
import sys

from jobs.entry import command

JOBS = {
    "demo": "train a small model on two CPU cores, from an empty folder",
    "train": "train a policy by reinforcement learning",
    "sft": "fine-tune a model on conversations",
    "reward_model": "train a reward model on preferences",
    "dpo": "learn preferences without a reward model (DPO, IPO)",
    "evaluate": "sample responses of a model and score them",
    "show": "print one recorded conversation of a run",
    "compare": "draw the learning curves of several runs",
    "replay": "train on the recorded responses of another run",
    "export": "make a model folder of a checkpoint, and register it",
    "serve": "serve a trained model with OpenAI's interface",
    "prepare": "write a data set as parquet files of prompts",
    "tiny": "make a tiny random model with its tokenizer",
    "from_gguf": "make a model folder from a GGUF file, to train it",
    "from_verl": "translate a verl script into a configuration",
    "docs": "read the pages, the examples and the manifests",
}
"""Names of the jobs, with their descriptions."""


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the job named by the first argument, with the other arguments. Returns the exit code of the job; 2 for an
    unknown job."""
    name, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: slipstream JOB ...\n\njobs:")
        for job, text in JOBS.items():
            print(f"  {job:<20}{text}")
        print("\n`slipstream JOB --help` describes a job, which `python -m jobs.JOB` runs too.")
        return 0
    job = name.replace("-", "_")
    if job not in JOBS:
        nearest = difflib.get_close_matches(job, JOBS, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else "slipstream --help lists them"
        print(f"slipstream: the job {name!r} does not exist; {hint}", file=sys.stderr)
        return 2
    # Modules in the current folder, such as a reward function, can be imported; installed modules come first.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    module = importlib.import_module("jobs.prepare.__main__" if job == "prepare" else f"jobs.{job}")
    return int(module.main(others) or 0)


if __name__ == "__main__":
    sys.exit(main())
