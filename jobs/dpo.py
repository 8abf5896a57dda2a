"""Learn preferences: `python -m jobs.dpo out=DIR model.path=MODEL data.train_files=FILES [key=value ...]`.

Files are parquet with a prompt and two responses, `chosen` (preferred) and `rejected`. The policy is held close to its
start model; a first pass over the rows computes the log-probs of the start model. `python -m jobs.prepare pairs` makes
pairs from the recorded responses of a run. `--help` lists all settings.

    python -m jobs.dpo out=models/dpo model.path=models/warm data.train_files=data/pairs/train.parquet
    python -m jobs.dpo out=models/ipo model.path=Qwen/Qwen2.5-0.5B-Instruct loss.type=ipo loss.beta=0.1 \\
        data.train_files=pairs.parquet trainer.num_workers=8 trainer.use_gpu=true
"""

import sys

from jobs.supervised import Job
from pipeline.config import ConfigError
from pipeline.config.preference import DPOConfig
from pipeline.losses.preference import get_preference_loss
from pipeline.supervised.dpo import DPOLoop


class DPOJob(Job[DPOConfig]):
    """The job `dpo`, which also checks the name of the loss before anything starts."""

    def check(self, config: DPOConfig) -> None:
        """Refuse settings that cannot work, as in `Job.check`, and an unknown loss."""
        super().check(config)
        try:
            get_preference_loss(config.loss.type)
        except ValueError as error:
            raise ConfigError(str(error)) from error


JOB = DPOJob("dpo", __doc__ or "", DPOConfig, DPOLoop, rows_per_pass=2)
check, run, main = JOB.check, JOB.run, JOB.main

if __name__ == "__main__":
    sys.exit(main())
