"""Train with Megatron's layers on CPUs: `python -m tests.megatron.train KEY=VALUE ...`, as `slipstream train`.

With the demo's warm start (`make demo-model`), Countdown in two stages:

    python -m tests.megatron.train experiment=countdown_cpu model.path=models/tiny-sft-1 actor.parallel.pipeline=2 \\
        data.train_files=data/countdown-1/train.parquet data.val_files=data/countdown-1/test.parquet

Every process of the run that it starts gets the shim. For tests alone: Megatron is not made for CPUs.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(arguments: list[str]) -> int:
    """Run `slipstream train` with `actor.strategy=megatron` and these arguments."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Ray's workers inherit it.
    os.environ["__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"] = "tests.megatron.shim.install"
    from jobs import train
    from pipeline.plan import check_megatron
    from tests.megatron import shim

    shim.install()
    check_megatron.NEEDS_GPU = False
    return train.main(["actor.strategy=megatron", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
