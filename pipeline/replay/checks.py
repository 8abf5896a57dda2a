"""Derive and check the settings of a replay: a run that trains on recorded rows (`data.recorded_run`).

From the reward stage on, a replay is like any other run. Settings of earlier stages must fit the recorded rows: the
number of responses per prompt, their lengths, and their sampling. Importing this module loads neither torch nor Ray
nor vLLM.
"""

import copy
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pyarrow as pa

from pipeline.config import Config, ConfigError, diff, load_yaml
from pipeline.config.bounds import as_argument
from pipeline.config.schema import keys, value_of
from pipeline.conversations import begun_text
from pipeline.derived import (
    reward_parts,
    rollout_correction,
    uses_agent,
    uses_baselines,
    uses_engines,
    uses_images,
    uses_policy_scores,
)
from pipeline.models.architecture import EXPERTS
from pipeline.models.weight_files import read_config
from pipeline.replay.recording import Recording, iteration_range
from pipeline.rows import ANSWER, flat, prompt_tokens
from pipeline.storage.moved import same
from pipeline.storage.resume import CONFIG_FILE, may_differ
from pipeline.train.correction import parse

_READ = (
    *(f"data.{key}" for key in ("train_batch_size", "max_prompt_length", "max_response_length", "recorded_*")),
    *(f"rollout.{key}" for key in ("n", "temperature", "top_p", "top_k", "min_p", "replay_routes")),
    *(f"rollout.{key}" for key in ("chunk_prompts", "dtype")),
    *(f"agent.{key}" for key in ("environment", "tools", "program", "command", "reward", "named")),
)
"""Keys of `data`, `rollout` and `agent` that a replay reads."""

UNREAD = tuple(
    name
    for name in keys(Config)
    if name.startswith(("data.", "rollout.", "agent.", "stream.")) and not any(fnmatch(name, read) for read in _READ)
)
"""Keys of `data`, `rollout` and `agent` that have no effect in a replay, which reads no prompts and generates
nothing."""

CHECKED_GROUPS = 256
"""Number of groups, from the first on, in which tokens and rewards are checked before the start."""


def recorded_config(run_dir: Path) -> Config:
    """Load the settings of the run that was recorded in `run_dir`.

    Raises:
        ConfigError: `run_dir` is not the folder of a run, or this version cannot read its settings.
    """
    if not run_dir.is_dir():
        raise ConfigError(
            f"the folder {run_dir} does not exist; give the folder of a run that has trained, such as runs/NAME"
        )
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{run_dir} has no {CONFIG_FILE}, so it is not the folder of a run; give one such as runs/NAME"
        )
    try:
        return load_yaml(run_dir / CONFIG_FILE, Config)
    except ConfigError as error:
        raise ConfigError(f"the run in {run_dir} cannot be replayed by this version: {error}") from error


def replay_of(recorded: Config, run_dir: Path, iterations: str) -> Config:
    """Return the settings of the recorded run, changed into a replay: one pass over the rows, in a folder `NAME-replay`
    next to the folder of the recording.

    Args:
        recorded: settings of the run that was recorded.
        run_dir: folder of that run.
        iterations: the recorded iterations to train on, in the form of `data.recorded_iterations`.
    """
    config, default = copy.deepcopy(recorded), Config()
    for name in (*UNREAD, "trainer.val_before_train", "trainer.test_freq", "trainer.resume", "trainer.accept_changed"):
        section, _, last = name.rpartition(".")
        setattr(value_of(config, section), last, value_of(default, name))
    folder, trainer = run_dir.resolve(), config.trainer
    config.data.recorded_run, config.data.recorded_iterations = str(folder), iterations
    trainer.experiment_name, trainer.default_local_dir = f"{folder.name}-replay", str(folder.parent)
    trainer.total_epochs, trainer.total_training_steps = 1, None
    # With other settings than in the recorded run, the policy of a replay soon differs, which is normal.
    trainer.max_log_prob_gap = None
    # Groups with equal rewards were not recorded.
    config.algorithm.filter_groups.enable = False
    return config


def check_folder(config: Config, run_dir: Path) -> None:
    """Check that a replay does not write to the folder of its recording.

    Raises:
        ConfigError: `run_dir`, the folder of the run that is about to start, is the folder of the recording.
    """
    recorded = config.data.recorded_run
    if recorded is not None and run_dir.resolve() == Path(recorded).resolve():
        raise ConfigError(
            f"trainer.experiment_name={config.trainer.experiment_name} is the folder of the recording, {recorded}, "
            "whose rows the replay would replace; choose another name"
        )


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence per setting that does not work in a replay, or works only in a replay."""
    data = config.data
    if data.recorded_run is None:
        if data.recorded_iterations is not None:
            yield (
                f"data.recorded_iterations={data.recorded_iterations} does nothing without data.recorded_run; "
                "python -m jobs.replay sets both"
            )
        return
    if data.recorded_iterations is not None:
        try:
            iteration_range(data.recorded_iterations)
        except ValueError as error:
            yield str(error)
    for name, files in (("train_files", data.train_files), ("generator", data.generator)):
        if files:
            yield (
                f"data.{name} does nothing with data.recorded_run={data.recorded_run}, whose prompts come from the "
                "recording; leave one of them out"
            )
    if data.val_files or config.trainer.test_freq > 0:
        yield (
            f"data.recorded_run={data.recorded_run}: a replay starts no engine, so it cannot validate; leave out "
            "data.val_files and trainer.test_freq, and evaluate the model it saves with python -m jobs.evaluate"
        )


def notes(config: Config) -> Iterator[str]:
    """Yield sentences of advice about a replay; none if the run is not a replay."""
    if uses_engines(config):
        return
    yield (
        "a replay starts no engine, so it does not validate; data.val_files and trainer.test_freq are left out. "
        "Validate the saved model with python -m jobs.evaluate"
    )
    gap, correction = config.trainer.max_log_prob_gap, config.algorithm.rollout_correction
    if gap is not None:
        yield (
            f"trainer.max_log_prob_gap={gap:g} ends the replay in the iteration in which its policy first differs that "
            "much from the one that was recorded"
        )
    if config.actor.old_log_probs != "recompute" or not parse(correction).active:
        yield (
            "the log-probs in the rows come from the recorded policy; once the replay's policy differs from it, "
            "training is off-policy. actor.old_log_probs=recompute with algorithm.rollout_correction (as in "
            "algorithm=[NAME,tis]) weighs rows by that difference; see `slipstream docs after_training`"
        )


def check_recording(config: Config) -> int:
    """Check all files of `data.recorded_run`, and call the reward on the first prompts. Returns the number of groups.

    Raises:
        ConfigError: the settings do not fit the recording.
        ValueError, FileNotFoundError: files are missing, damaged or not from a recording, or the reward cannot be used.
    """
    from pipeline.reward.dry import check_names, check_sources, dry_call

    data = config.data
    assert data.recorded_run is not None
    recorded = recorded_config(Path(data.recorded_run))
    if found := list(_mismatches(config, recorded)):
        raise ConfigError(found[0] if len(found) == 1 else "\n- ".join(["the settings do not fit:", *found]))
    kinds = uses_baselines(config), uses_agent(config), uses_images(config)
    recording = Recording(data.recorded_run, data.recorded_iterations, *kinds)
    if recording.n != config.rollout.n:
        raise ConfigError(
            f"{data.recorded_run}/trajectories holds groups of {recording.n} rows, and by its config.yaml the run "
            f"sampled rollout.n={config.rollout.n}; the files belong to another run, or were changed"
        )
    sources = recording.check()
    rows = recording.rows(0, min(CHECKED_GROUPS, recording.groups))
    read = ["prompt", "response_ids", "response", *["spans"] * uses_agent(config)]
    _check_tokens(config, rows.select(read).to_pylist())
    _check_supports(config, recorded, rows["support_sizes"].null_count == len(rows))
    if config.rollout.replay_routes:
        _check_routes(config, rows.slice(0, recording.n))
    if uses_images(config):
        _check_images(config, rows.select(["images", "image_hash"]).to_pylist())
    check_sources(sources, config.reward, config.agent)
    check_names(config.reward, {source for found in sources.values() for source in found})
    prompts = rows.take(list(range(0, len(rows), recording.n)))
    dry_call([prompts], config.reward, reward_parts(config), config.agent)
    return recording.groups


def _mismatches(config: Config, recorded: Config) -> Iterator[str]:
    """Yield one sentence per setting that must be as in the recorded run, but is not.

    Args:
        config: settings of the replay.
        recorded: settings of the recorded run.
    """
    run_dir = config.data.recorded_run
    for name in (f"rollout.{key}" for key in ("n", "temperature", "top_p", "top_k", "min_p", "replay_routes")):
        was, now = value_of(recorded, name), value_of(config, name)
        if was != now:
            yield (
                f"{name}={now}: the responses of {run_dir} were sampled with {name}={was}, and a replay samples none; "
                "leave it as it was"
            )
    for name in ("agent.environment", "agent.tools", "agent.program", "agent.command", "agent.named"):
        moved = same(value_of(recorded, name), value_of(config, name), compared=False)
        was, now = (as_argument(value_of(of, name)) for of in (recorded, config))
        if was != now and not moved:
            yield (
                f"{name}={now}: the rows of {run_dir} were made with {name}={was}, and a replay runs no episodes; "
                "leave it as it was"
            )
    for name in ("data.max_prompt_length", "data.max_response_length"):
        was, now = value_of(recorded, name), value_of(config, name)
        if now < was:
            yield f"{name}={now}: rows of {run_dir} may have {was} tokens; leave it so or raise it"
    if uses_images(config) != uses_images(recorded):
        yield (
            f"model.vision={config.model.vision}: the rows of {run_dir} were made with model.vision="
            f"{recorded.model.vision}; either both read images or neither"
        )
    if not uses_baselines(config):
        return
    estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    if not uses_baselines(recorded):
        yield (
            f"{estimator} reads the score of a greedy response to each prompt; {run_dir} recorded none (its estimator "
            f"is {recorded.algorithm.adv_estimator}), and a replay generates none; choose another estimator"
        )
    for name, was, now in diff(recorded, config):
        scores = name.startswith(("reward.", "scoring.reward_model.")) and not may_differ(name)
        if scores and not same(was, now, compared=False):
            yield (
                f"{name}={now}: {estimator} compares with the recorded scores of greedy responses, whose text is not "
                f"recorded, so the reward must stay as recorded ({was}); leave it, or choose another estimator"
            )


def _check_supports(config: Config, recorded: Config, none: bool) -> None:
    """Check that tokens that were sampled from a part of the vocabulary are recorded with it.

    Args:
        config: settings of the replay.
        recorded: settings of the recorded run.
        none: True if the checked rows have no such part.

    Raises:
        ConfigError: they are not, and the replay compares their log-probs with others.
    """
    restricted = [f"rollout.{key}" for key, used in recorded.rollout.restrictions().items() if used]
    correction = rollout_correction(config)
    readers = {
        "actor.old_log_probs=engine": config.actor.old_log_probs == "engine",
        "algorithm.use_kl_in_reward=true": config.algorithm.use_kl_in_reward,
        "algorithm.teacher_coef": config.algorithm.teacher_coef > 0,
        f"algorithm.adv_estimator={config.algorithm.adv_estimator}": uses_policy_scores(config),
        "algorithm.rollout_correction": correction.rollout_is != "none" or correction.rollout_rs is not None,
    }
    if restricted and none and (reads := [key for key, used in readers.items() if used]):
        raise ConfigError(
            f"{config.data.recorded_run} was recorded with {' and '.join(restricted)} by a version that did not write "
            f"the tokens that could be sampled, so its log-probs cannot be compared as {' and '.join(reads)} needs; "
            "record the run again, or leave that out"
        )


def _check_routes(config: Config, rows: pa.Table) -> None:
    """Raise ConfigError if the experts of recorded tokens are of another model than `model.path`."""
    model, rows = read_config(config.model.path), rows.filter(rows["routes"].is_valid())
    if not model or not len(rows):
        return
    routes = flat(rows, "routes")[0]
    width = len(routes) // (prompt_tokens(rows) + len(flat(rows, "response_ids")[0]))
    experts = next((model[name] for name in EXPERTS if name in model), 0)
    most = model.get("num_hidden_layers", 0) * model.get("num_experts_per_tok", 0)
    if width > most or routes.max() >= experts:
        raise ConfigError(
            f"{config.data.recorded_run} holds {width} experts for each token, up to number {routes.max()}, and "
            f"model.path={config.model.path} has {most} of {experts}; replay with a model of the recorded one's sizes"
        )


def _check_tokens(config: Config, rows: list[dict]) -> None:
    """Raise ConfigError if the tokenizer of the model decodes recorded tokens to another text than was recorded."""
    from pipeline.models.tokenizer import load_tokenizer

    episodes = uses_agent(config)
    answers = [_last_answer(row) if episodes else row["response_ids"] for row in rows]
    texts = load_tokenizer(config.model).batch_decode(answers, skip_special_tokens=True)
    for row, text in zip(rows, texts, strict=True):
        if not episodes:
            text = begun_text(row["prompt"]) + text
        # The recorded text of an episode's turn does not contain tool calls and reasoning.
        if any(word not in text for word in row["response"].split()) if episodes else text != row["response"]:
            raise ConfigError(
                f"{config.model.tokenizer_path or config.model.path} has another tokenizer than the one that "
                f"{config.data.recorded_run} was recorded with: it reads the tokens of a response as {text!r:.80}, but "
                f"{row['response']!r:.80} was recorded; train a model with the tokenizer of the recording (model.path, "
                "model.tokenizer_path)"
            )


def _check_images(config: Config, rows: list[dict]) -> None:
    """Raise ConfigError if the processor of the model makes other pixels of recorded images than the recorded run."""
    from pipeline.models.processor import load_vision

    vision = load_vision(config.model)
    if any([vision.hash(image) for image in row["images"]] != row["image_hash"] for row in rows):
        raise ConfigError(
            f"the processor of model.path={config.model.path} has other settings than the one that "
            f"{config.data.recorded_run} was recorded with; leave model.min_pixels and model.max_pixels as they were, "
            "and train a model with the processor of the recording"
        )


def _last_answer(row: dict) -> list[int]:
    """Return the tokens of the policy's last turn in an episode; empty without a turn."""
    end = len(row["response_ids"])
    for span in reversed(row["spans"]):
        if span["kind"] == ANSWER:
            return row["response_ids"][end - span["tokens"] : end]
        end -= span["tokens"]
    return []
