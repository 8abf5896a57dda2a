"""Whether a recording can be trained on with these settings, found before anything is started."""

from pathlib import Path

from pipeline.config import Config, ConfigError
from pipeline.derived import reward_parts, uses_baselines
from pipeline.plan.check_replay import mismatches, recorded_config
from pipeline.prompts.chat import load_tokenizer
from pipeline.prompts.recording import Recording
from pipeline.reward.dry import check_sources, dry_call

CHECKED_GROUPS = 256
"""Groups that are tried before anything starts, from the first on."""


def check_recording(config: Config) -> int:
    """Looks at every file of `data.recorded_run` and tries the reward on its prompts; the number of its groups.

    Args:
        config: settings of the replay.

    Raises:
        ConfigError: the settings do not fit the recording.
        ValueError, FileNotFoundError: files are missing, damaged or foreign, or the reward cannot be used.
    """
    data = config.data
    assert data.recorded_run is not None
    folder = Path(data.recorded_run)
    recorded = recorded_config(folder)
    if found := list(mismatches(config, recorded)):
        raise ConfigError(
            found[0] if len(found) == 1 else "the settings do not fit:\n" + "\n".join(f"- {one}" for one in found)
        )
    recording = Recording(data.recorded_run, data.recorded_iterations)
    if recording.n != config.rollout.n:
        raise ConfigError(
            f"{folder}/trajectories holds groups of {recording.n} rows, and by its config.yaml the run sampled "
            f"rollout.n={config.rollout.n}; the files are those of another run, or were changed"
        )
    baselines = uses_baselines(config)
    sources = recording.check(baselines)
    groups = range(min(CHECKED_GROUPS, recording.groups))
    _check_tokens(config, recording, groups)
    check_sources(sources, config.reward)
    dry_call([recording.prompts(groups)], config.reward, reward_parts(config))
    return recording.groups


def _check_tokens(config: Config, recording: Recording, groups: range) -> None:
    """Tokens mean the same to the model that is trained as to the one that made them."""
    rows = recording.responses(groups).select(["response_ids", "response"]).to_pylist()
    texts = load_tokenizer(config.model).batch_decode([row["response_ids"] for row in rows], skip_special_tokens=True)
    for row, text in zip(rows, texts, strict=True):
        if text != row["response"]:
            raise ConfigError(
                f"{config.model.tokenizer_path or config.model.path} has another tokenizer than the one that "
                f"{recording.run_dir} was recorded with: it reads the tokens of a response as {text!r:.80} where "
                f"{row['response']!r:.80} was recorded; train a model with the tokenizer of the recording (model.path, "
                "model.tokenizer_path)"
            )
