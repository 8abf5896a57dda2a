"""Two teachers, advantages and a loss from them, and tokens of a part of the vocabulary, in one run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from pipeline.rows import flat
from pipeline.track.trajectories import read_trajectories
from tests.runs import starter, tiny_settings
from tests.scoring.test_reference import other_model

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

TOP = 5


def test_two_teachers_and_tokens_of_a_part_of_the_vocabulary(
    tmp_path: Path, tiny_model: Path, prompt_files: Any, ray_session: None
) -> None:
    teacher = other_model(tmp_path / "teacher", AutoConfig.from_pretrained(tiny_model).vocab_size)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(teacher)
    run = starter(tiny_settings(tmp_path, tiny_model, prompt_files))(
        *("taught", "algorithm=opd", "rollout.top_k=30", "trainer.total_training_steps=2", "trainer.num_workers=2"),
        *("actor.distill_coef=0.5", f"actor.distill_top_k={TOP}"),
        *(f"teacher.named.own.path={tiny_model}", "teacher.named.own.sources=[nothing]"),
        *(f"teacher.named.other.path={teacher}", "teacher.named.other.sources=[countdown]"),
    )
    rows = read_trajectories(str(run.folder), 1)
    tokens, offsets = flat(rows, "response_ids")
    sizes = flat(rows, "support_sizes")[0]
    # Each was sampled from 30 tokens; of tokens that are as likely as the 30th there may be more.
    assert (sizes >= 30).all() and np.median(sizes) == 30
    assert len(flat(rows, "teacher_top_ids")[0]) == TOP * len(tokens)
    record = run.records[1]
    assert record["training/rollout_log_probs_diff_max"] < 1e-4, "engine and trainer renormalise over the same tokens"
    assert record["rollout/support_unknown"] == 0
    advantages, mask = (flat(rows, name)[0] for name in ("advantages", "response_mask"))
    ratio = flat(rows, "teacher_log_probs")[0] - flat(rows, "rollout_log_probs")[0]
    np.testing.assert_allclose(advantages, ratio * (mask > 0), atol=1e-5)
    assert record["teacher/kl"] == pytest.approx(-ratio[mask > 0].mean(), abs=1e-4)
    assert record["teacher/kl"] > 0 and record["actor/distill_loss"] > 0
