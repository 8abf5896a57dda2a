"""Train a reward model: `python -m jobs.reward_model out=DIR model.path=MODEL data.train_files=FILES [key=value ...]`.

Files are parquet with a prompt and two responses, `chosen` (preferred) and `rejected`. The start model is a language
model, which gets a new head, or a reward model that is trained further. `--help` lists all settings.

    python -m jobs.reward_model out=models/reward model.path=Qwen/Qwen2.5-0.5B-Instruct \\
        data.train_files=data/hh_rlhf/rm_train.parquet data.val_files=data/hh_rlhf/rm_test.parquet
"""

import sys

from jobs.supervised import Job
from pipeline.config.supervised import PreferenceConfig
from pipeline.supervised.preference import PreferenceLoop

JOB = Job("reward_model", __doc__ or "", PreferenceConfig, PreferenceLoop, rows_per_pass=2, causal=False)
check, run, main = JOB.check, JOB.run, JOB.main

if __name__ == "__main__":
    sys.exit(main())
