"""Learn preferences: `python -m jobs.dpo out=DIR model.path=MODEL data.train_files=FILES [key=value ...]`.

Files are parquet with a prompt and two answers, `chosen` and `rejected`, of which the first is preferred; for
loss.type=kto also with one answer, `completion`, and a `label` that says whether it is good. The model is held to
what it is at the start: its log-probs are computed in a first pass over the rows. `python -m jobs.prepare pairs` makes
pairs from the recorded answers of a run. `--help` lists all settings.

    python -m jobs.dpo out=models/dpo model.path=models/warm data.train_files=data/pairs/train.parquet
    python -m jobs.dpo out=models/kto model.path=Qwen/Qwen2.5-0.5B-Instruct loss.type=kto loss.beta=0.1 \\
        data.train_files=kto.parquet trainer.num_workers=8 trainer.use_gpu=true
"""

import sys
from dataclasses import replace
from typing import Any

from jobs.supervised import Job
from pipeline.config import ConfigError
from pipeline.config.preference import DPOConfig
from pipeline.supervised.dpo import MEASURED, DPOLoop, loop_of

SHOWN = (*MEASURED, *(f"val_{name}" for name in ("loss", "rewards/margins", "rewards/accuracies")))


class DPOJob(Job[DPOConfig]):
    """The job, whose loop depends on the loss."""

    def run(self, config: DPOConfig) -> dict[str, float]:
        """See `Job.run`."""
        try:
            loop: Any = loop_of(config.loss.type)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return Job.run(replace(self, loop=loop), config)


JOB = DPOJob("dpo", __doc__ or "", DPOConfig, DPOLoop, SHOWN, rows_per_pass=2)
check, run, main = JOB.check, JOB.run, JOB.main

if __name__ == "__main__":
    sys.exit(main())
