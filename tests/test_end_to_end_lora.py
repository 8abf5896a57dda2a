"""A whole run with adapters: engines get them alone, the critic's travel merged, the base is the reference."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.rows import flat
from pipeline.track.trajectories import read_trajectories
from tests.runs import TWO, score, starter, tiny_settings

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

LORA = (
    *("model.lora.rank=4", "model.lora.weight_sync=adapter", "algorithm=ppo", "critic.optim.lr=1e-2"),
    *(
        "algorithm.use_kl_in_reward=false",
        "actor.use_kl_loss=true",
        "actor.kl_loss_coef=0.5",
        "trainer.max_log_prob_gap=1e-3",
        "trainer.save_freq=1",
    ),
)


def test_a_run_with_adapters(tmp_path: Path, tiny_model: Path, prompt_files: Any, ray_session: None) -> None:
    from peft import PeftModel

    start = starter([*tiny_settings(tmp_path, tiny_model, prompt_files), *LORA, *TWO])
    start("adapters", "trainer.total_training_steps=2")
    run = start("adapters", "trainer.total_training_steps=4")
    assert sorted(run.records) == [0, 1, 2, 3, 4]
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny_model).parameters()) * 4
    for iteration in (1, 2, 3, 4):
        record = run.records[iteration]
        assert record["training/rollout_log_probs_diff_max"] < 1e-3 and record["timing_s/ref"] > 0
        assert record["perf/weight_bytes"] < whole / 3
    kl = [run.records[iteration]["actor/kl_loss"] for iteration in (1, 4)]
    assert abs(kl[0]) < 1e-6 < kl[1], "the policy begins as its reference"

    rows = read_trajectories(str(run.folder), 4)
    assert "ref_log_probs" not in rows.column_names and abs(flat(rows, "values")[0]).max() > 1e-2
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert score(base, rows) > 1e-3, "the engine had moved away from the base"
    adapted = PeftModel.from_pretrained(base, run.folder / "model" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
    assert json.loads((run.folder / "model" / "adapter" / "adapter_config.json").read_text())["r"] == 4
