"""Supervised fine-tuning: `python -m jobs.sft out=DIR model.path=MODEL data.train_files=FILES [key=value ...]`.

Files are parquet with conversations as chat messages; the loss counts the assistant's messages. `--help` lists all
settings.

    python -m jobs.sft out=models/warm model.path=models/tiny data.train_files=data/sft_train.parquet optim.lr=2e-3
    ray job submit -- python -m jobs.sft out=/shared/warm model.path=Qwen/Qwen2.5-0.5B trainer.num_workers=8 \\
        trainer.use_gpu=true data.train_files=s3://bucket/sft/
"""

import sys

from jobs.supervised import Job
from pipeline.config.supervised import SFTConfig
from pipeline.supervised.sft import SFTLoop

JOB = Job("sft", __doc__ or "", SFTConfig, SFTLoop)
check, run, main = JOB.check, JOB.run, JOB.main

if __name__ == "__main__":
    sys.exit(main())
