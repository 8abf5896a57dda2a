import json

import pytest

from pipeline.prompts.feedback import outcomes
from pipeline.prompts.stage import LOOKAHEAD, Schedule
from pipeline.store.admission import Admission
from tests.prompts.recorded import record


def row(uid, chunk=0, iteration=1, **changes):
    return {
        "split": "train",
        "chunk": chunk,
        "iteration": iteration,
        "uid": uid,
        "prompt_index": int(uid),
        "data_source": "s",
        "prompt": json.dumps([{"role": "user", "content": uid}]),
        "ground_truth": json.dumps({"n": uid}),
        "extra_info": "{}",
    } | changes


def test_outcomes_are_groups_in_the_order_of_their_chunks(tmp_path):
    run = str(tmp_path)
    record(run, [row("3", chunk=1), row("2", chunk=1)], [[1.0, 0.5], [0.0, 0.0]])
    record(run, [row("7"), row("1")], [[1.0, 2.0], [0.0, 1.0]], errors={("1", 0): "late"})
    record(run, [row("9", iteration=2)], [[1.0]])
    found = outcomes(run, 1)
    assert [outcome.prompt_index for outcome in found] == [7, 1, 3, 2]
    assert [outcome.scores for outcome in found] == [[1.0, 2.0], [1.0], [1.0, 0.5], [0.0, 0.0]]
    assert [outcome.solved for outcome in found] == [1.0, 1.0, 0.5, 0.0]
    assert found[0].prompt == [{"role": "user", "content": "7"}]
    assert (found[0].ground_truth, found[0].extra_info, found[0].data_source) == ({"n": "7"}, {}, "s")


def test_acc_says_what_is_right_where_the_reward_gives_it(tmp_path):
    record(str(tmp_path), [row("1")], [[1.0, 1.0]], parts={"acc": 0.25})
    assert outcomes(str(tmp_path), 1)[0].solved == 0.25


def test_a_response_without_acc_is_not_right_among_others_that_have_it(tmp_path):
    parts = {("1", 0): {"acc": 1}, ("1", 1): {"acc": None}}
    record(str(tmp_path), [row("1"), row("2")], [[1.0, 1.0, 1.0], [1.0, 0.0]], parts_of=parts)
    assert [outcome.solved for outcome in outcomes(str(tmp_path), 1)] == [1 / 3, 1 / 2]


def test_an_iteration_that_was_not_recorded(tmp_path):
    with pytest.raises(FileNotFoundError, match="no train trajectories of iteration 5"):
        outcomes(str(tmp_path), 5)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("page_iterations", [1, 4])
def test_what_is_read_was_trained_on_before_the_page_may_be_made(staleness, page_iterations):
    admission, base = Admission(2, 8, staleness), 7
    schedule = Schedule(40, 4, 2, False, False, -1, staleness, page_prompts=8 * page_iterations)
    assert schedule.page_iterations == page_iterations
    for page in range(5):
        before = page * page_iterations
        # What `PolicyStore.wait_prompts_due` waits for.
        version = base + admission.version_needed(before * 4) - LOOKAHEAD
        for iteration in range(base + before + 1, base + before + page_iterations + 1):
            assert iteration - schedule.feedback_lag <= max(version, base)
