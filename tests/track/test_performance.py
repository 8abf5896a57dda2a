"""Rates that follow from seconds and tokens, memory, and the ranks' shares of the tokens."""

import mmap

import pytest
import torch

from pipeline.stats import reduce
from pipeline.track.performance import GIB, derived, memory_metrics, sequence_balance
from tests.track.test_metrics import table

TIMES = {
    "timing_s/step": 4.0,
    "timing_s/gen": 1.0,
    "timing_s/old_log_prob": 0.5,
    "timing_s/update_critic": 0.25,
    "timing_s/update_actor": 2.0,
    "timing_s/publish": 0.125,
    "rollout/generate_s/max": 0.8,
}


def test_rates_by_hand():
    assert derived(TIMES, prompt_tokens=600, response_tokens=400, policy_tokens=200, workers=2) == pytest.approx(
        {
            "perf/total_num_tokens": 1000,
            "perf/time_per_step": 4.0,
            "perf/throughput": 1000 / 4 / 2,
            "perf/train_idle": 0.25,
            "perf/rollout_tokens_per_s": 250,
            "timing_per_token_ms/gen": 5.0,
            "timing_per_token_ms/old_log_prob": 0.5,
            "timing_per_token_ms/update_critic": 0.25,
            "timing_per_token_ms/update_actor": 2.0,
        }
    )


def test_what_has_no_part_or_no_tokens_is_left_out():
    assert derived({"timing_s/step": 2.0, "timing_s/update_actor": 1.0}, 10, 0, 0, 1) == {
        "perf/total_num_tokens": 10,
        "perf/time_per_step": 2.0,
        "perf/throughput": 5.0,
        "timing_per_token_ms/update_actor": 100.0,
    }
    empty = derived(TIMES, 0, 0, 0, 1)
    assert empty["perf/throughput"] == 0 and not [name for name in empty if name.startswith("timing_per_token_ms")]


def test_resident_memory_follows_what_is_touched_and_given_back():
    def resident() -> float:
        return reduce([memory_metrics(torch.device("cpu"))])["perf/cpu_memory_used_gb"]

    before = resident()
    block = mmap.mmap(-1, 256 << 20)
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    assert resident() - before == pytest.approx(0.25, abs=0.05)
    block.close()
    assert resident() - before == pytest.approx(0.0, abs=0.05)


def test_gpu_memory_is_the_most_so_far_and_only_of_a_gpu(monkeypatch):
    device = torch.device("cuda", 3)
    for kind, held in (("allocated", 3), ("reserved", 4)):
        monkeypatch.setattr(f"torch.cuda.max_memory_{kind}", lambda asked, held=held: held * GIB * (asked == device))
    got = reduce([memory_metrics(device)])
    assert got.pop("perf/cpu_memory_used_gb") > 0
    assert got == {"actor/perf/max_memory_allocated_gb": 3.0, "actor/perf/max_memory_reserved_gb": 4.0}
    assert list(memory_metrics(torch.device("cpu"))) == ["perf/cpu_memory_used_gb"]


def test_balance_is_over_ranks():
    """Two prompt tokens in every row."""
    ranks = [table({"n": 3}, {"n": 0}), table({"n": 10}), table()]
    assert reduce(sequence_balance(rows) for rows in ranks) == pytest.approx(
        {"global_seqlen/mean": 19 / 3, "global_seqlen/max": 12, "global_seqlen/min": 0}
    )
