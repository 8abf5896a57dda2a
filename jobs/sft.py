"""Supervised fine-tuning: `python -m jobs.sft out=DIR model.path=MODEL data.train_files=FILES [key=value ...]`.

Conversations come as chat messages in parquet; the assistant's tokens are learnt. `--help` lists all
settings.

    python -m jobs.sft out=models/warm model.path=models/tiny data.train_files=data/sft_train.parquet optim.lr=2e-3
    ray job submit -- python -m jobs.sft out=/shared/warm model.path=Qwen/Qwen2.5-0.5B trainer.num_workers=8 \\
        trainer.use_gpu=true data.train_files=s3://bucket/sft/
"""

import sys

from jobs.supervised import Job
from pipeline.train.sft import SFTLoop
from pipeline.train.sft_config import SFTConfig


def problems(config: SFTConfig) -> list[str]:
    """Sentences about settings that cannot work."""
    found, (length, budget) = [], (config.data.max_length, config.trainer.max_token_len_per_gpu)
    if config.trainer.logits_chunk_tokens < 1:
        found.append(f"trainer.logits_chunk_tokens={config.trainer.logits_chunk_tokens} must be at least 1.")
    if length > budget:
        found.append(
            f"data.max_length={length} is more than trainer.max_token_len_per_gpu={budget}, so the longest row would "
            "fit in no forward pass; raise the latter."
        )
    return found


JOB = Job("sft", __doc__ or "", SFTConfig, SFTLoop, problems, ("loss", "val_loss"))
check, run, main = JOB.check, JOB.run, JOB.main

if __name__ == "__main__":
    sys.exit(main())
