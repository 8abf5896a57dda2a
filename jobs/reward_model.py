"""Train a reward model: `python -m jobs.reward_model out=DIR model.path=MODEL data.train_files=FILES [key=value ...]`.

Files are parquet with a prompt and two answers, `chosen` and `rejected`, of which the first is preferred. The model is
a language model, which gets a new head, or a reward model that is trained further. `--help` lists all settings.

    python -m jobs.reward_model out=models/reward model.path=Qwen/Qwen2.5-0.5B-Instruct \\
        data.train_files=data/hh_rlhf/rm_train.parquet data.val_files=data/hh_rlhf/rm_test.parquet
"""

import sys

from jobs.supervised import Job
from pipeline.train.preference import MEASURED, PreferenceLoop
from pipeline.train.preference_config import PreferenceConfig


def problems(config: PreferenceConfig) -> list[str]:
    """Sentences about settings that cannot work."""
    length, budget = config.data.max_length, config.trainer.max_token_len_per_gpu
    if 2 * length <= budget:
        return []
    return [
        f"two conversations of data.max_length={length}, the sides of a pair, are {2 * length} tokens, more than "
        f"trainer.max_token_len_per_gpu={budget}; both run in one forward pass, so raise the latter."
    ]


SHOWN = (*MEASURED, "val_loss", "val_accuracy", "val_margin")
JOB = Job("reward_model", __doc__ or "", PreferenceConfig, PreferenceLoop, problems, SHOWN)
check, run, main = JOB.check, JOB.run, JOB.main

if __name__ == "__main__":
    sys.exit(main())
