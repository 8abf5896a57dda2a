"""Rules for prompts, rewards and the run itself."""

from jobs.verl.state import State
from pipeline.checks import LOGGERS
from pipeline.reward.rules import RULES

_RESUME = {"auto": "auto", "disable": "never"}


def data(state: State) -> None:
    """Which prompts are read, and what happens to long ones."""
    if state.get("data.truncation") == "error" and not state.get("data.filter_overlong_prompts"):
        state.note(
            "a prompt longer than data.max_prompt_length ends the run with its file and row; verl 0.9.1 cuts it on the "
            "left, whatever data.truncation is (as data.truncation=left does here)"
        )
    for split in ("train", "val"):
        if state.get(f"data.{split}_max_samples") > 0:
            state.note(f"data.{split}_max_samples takes the first rows; verl draws them at random where it shuffles")
    if "data.seed" in state.given and "trainer.seed" in state.values:
        state.note("data.seed is trainer.seed, which seeds sampling, too; the order of the prompts is not verl's")


def reward(state: State) -> None:
    """Which rule scores a row."""
    if "reward.custom_reward_function.path" not in state.values:
        state.note(
            "without a reward function the row's data_source chooses the rule, and there are rules for "
            f"{', '.join(sorted(RULES))} only; others need reward.custom_reward_function.path. GSM8K's takes the last "
            "number where there is no ####, for which verl's gives 0"
        )


def run(state: State) -> None:
    """Length, name, folder, trackers and checkpoints."""
    _resume(state)
    loggers = state.get("trainer.logger")
    if dropped := [logger for logger in loggers if logger not in LOGGERS]:
        state.set("trainer.logger", [logger for logger in loggers if logger in LOGGERS])
        state.note(
            f"trainer.logger: {', '.join(dropped)} is not supported and left out; metrics.jsonl is always written"
        )
    for key in ("trainer.test_freq", "trainer.save_freq"):
        if state.get(key) == 0:
            state.drop(key)
    if state.get("trainer.max_ckpt_to_keep") < 1:
        state.drop("trainer.max_ckpt_to_keep")
    if state.get("trainer.total_training_steps") is not None:
        state.note(
            "trainer.total_training_steps decides alone; verl ends after trainer.total_epochs where that is earlier"
        )
    _folder(state)


def _resume(state: State) -> None:
    mode = state.given.get("trainer.resume_mode", "auto")
    state.drop("trainer.resume")
    if not isinstance(mode, str) or mode not in _RESUME:
        state.leave("trainer.resume_mode", "a run continues from its own folder only (trainer.resume)")
        return
    state.set("trainer.resume", _RESUME[mode])
    if mode == "disable":
        state.note("trainer.resume=never refuses a folder that holds a run; verl begins anew in it")


def _folder(state: State) -> None:
    """verl's folder is the run's own; ours is the one of all runs."""
    experiment = state.get("trainer.experiment_name")
    folder = experiment.replace("/", "-")
    if folder != experiment:
        state.set("trainer.experiment_name", folder)
        state.note(f"trainer.experiment_name={experiment} names a folder, so it is {folder} here")
    place = state.values.get("trainer.default_local_dir", "").rstrip("/")
    if not place:
        return
    parent, _, last = place.rpartition("/")
    if parent and last == experiment == folder:
        state.set("trainer.default_local_dir", parent)
    else:
        state.note(f"the run's folder is trainer.default_local_dir/trainer.experiment_name, {place}/{folder}")
