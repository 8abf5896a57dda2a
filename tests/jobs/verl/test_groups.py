"""verl's dynamic sampling as ours."""

import pytest

from tests.jobs.verl.test_convert import left, notes, values

ON, METRIC, MOST = (f"algorithm.filter_groups.{key}" for key in ("enable=true", "metric", "max_num_gen_batches"))


def test_keys_keep_their_names() -> None:
    found = values(ON, f"{METRIC}=acc", f"{MOST}=7")
    assert [found[key] for key in ("algorithm.filter_groups.enable", METRIC, MOST)] == [True, "acc", 7]
    assert "chunk by chunk" in notes(ON) and not left(ON, f"{METRIC}=acc", f"{MOST}=7")


@pytest.mark.parametrize("metric", ["seq_reward", "seq_final_reward", "reward", "score", "null"])
def test_what_verl_calls_rewards_is_the_score(metric: str) -> None:
    assert values(ON, f"{METRIC}={metric}").get(METRIC, "score") == "score"
    assert ("no KL has been taken" in notes(ON, f"{METRIC}={metric}")) == (metric == "seq_final_reward")


@pytest.mark.parametrize("given", [[], [f"{MOST}=0"], [f"{MOST}=-1"]])
def test_no_limit_becomes_one(given: list[str]) -> None:
    assert values(ON, *given)[MOST] == 100
    assert "without a limit" in notes(ON, *given)


def test_without_filter_nothing_is_lost() -> None:
    off = ["algorithm.filter_groups.enable=false", f"{METRIC}=acc", f"{MOST}=7"]
    assert not {METRIC, MOST} & values(*off).keys()
    assert left(*off) == dict.fromkeys((METRIC, MOST), "groups are not filtered; nothing is lost")
    assert "chunk by chunk" not in notes(*off)
