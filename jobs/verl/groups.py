"""Rule for dynamic sampling (`algorithm.filter_groups`)."""

from jobs.verl.state import State

_GROUPS = "algorithm.filter_groups"
_SCORES = ("seq_reward", "seq_final_reward", "reward")
"""verl's names of what is `score` here."""
MOST_BATCHES = 100


def groups(state: State) -> None:
    """What is compared, and for how long groups are generated."""
    metric, most = state.get(f"{_GROUPS}.metric"), state.get(f"{_GROUPS}.max_num_gen_batches")
    if not state.get(f"{_GROUPS}.enable"):
        for key in ("metric", "max_num_gen_batches"):
            state.drop(f"{_GROUPS}.{key}")
            state.leave(f"{_GROUPS}.{key}", "groups are not filtered; nothing is lost")
        return
    if metric in _SCORES:
        state.set(f"{_GROUPS}.metric", "score")
        if metric == "seq_final_reward":
            state.note(f"{_GROUPS}.metric=seq_final_reward is score here, from which no KL has been taken yet")
    if f"{_GROUPS}.max_num_gen_batches" not in state.values or most < 1:
        state.set(f"{_GROUPS}.max_num_gen_batches", MOST_BATCHES)
        state.note(
            f"verl generates batches without a limit; here the run ends where {MOST_BATCHES} do not fill an iteration"
        )
    state.note(
        "groups that agree are replaced chunk by chunk, not by another batch; epochs count the iterations as if none "
        "were dropped, so the data is gone through more often"
    )
