"""Which settings of a training run an evaluation reads, and what they amount to.

The settings are those of training, so that both see the same prompts, samples and rewards. Everything that an
evaluation does not read is put back to its default (`used`): it then cannot matter, and no key of the trainer has to
make sense for a model to be evaluated.
"""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import Config, ConfigError, load_config, load_yaml
from pipeline.evaluate.majority import MOST_RESPONSES
from pipeline.plan import Plan, plan
from pipeline.run_folder import CONFIG_FILE, reached
from pipeline.schema import keys, value_of

RESULT = (
    "data.val_files",
    "data.prompt_key",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.filter_overlong_prompts",
    "data.truncation",
    "data.val_max_samples",
    "data.apply_chat_template_kwargs",
    "model.path",
    "model.tokenizer_path",
    "model.trust_remote_code",
    "rollout.val_kwargs.",
    "rollout.stop",
    "rollout.min_tokens",
    "rollout.ignore_eos",
    "rollout.chunk_prompts",
    "rollout.dtype",
    "rollout.seed_per_request",
    "rollout.engine_kwargs",
    "reward.custom_reward_function.",
    "reward.functions",
    "reward.model.",
    "reward.rule_kwargs",
    "reward.sandbox.",
    "trainer.seed",
)
"""Settings that responses and scores follow from; a name that ends in a dot stands for its section."""

LAYOUT = (
    "data.max_bad_rows",
    "model.dtype",
    "model.attn_implementation",
    "rollout.num_engines",
    "rollout.chunks_in_flight",
    "rollout.num_cpus",
    "rollout.num_gpus",
    "rollout.tensor_parallel_size",
    "rollout.num_threads",
    "rollout.gpu_memory_utilization",
    "rollout.cpu_kvcache_space_gb",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.enable_prefix_caching",
    "rollout.enforce_eager",
    "reward.timeout_s",
    "reward.max_processes",
    "reward.num_cpus",
    "reward.max_error_rate",
    "reward.rate_limit.",
    "scoring.reward_model.",
    "actor.fsdp.param_dtype",
    "trainer.project_name",
    "trainer.ray_num_cpus",
    "trainer.object_store_gb",
    "trainer.logger",
    "trainer.deadlines.",
    "trainer.env_vars",
)
"""Settings that say how the work is done and what is reported."""


def used(config: Config) -> Config:
    """A config with what an evaluation reads of `config`, and everything else at its default."""
    own = Config()
    for key in keys(Config):
        if _among(key, (*RESULT, *LAYOUT)):
            *sections, last = key.split(".")
            setattr(value_of(own, ".".join(sections)), last, copy.deepcopy(value_of(config, key)))
    own.rollout.n = own.rollout.val_kwargs.n
    own.data.train_batch_size = own.rollout.chunk_prompts
    # In a run weights come from the trainer; here the engine reads them itself.
    own.rollout.engine_kwargs.setdefault("load_format", "auto")
    return own


def result_settings(config: Config) -> dict[str, object]:
    """The settings that responses and scores follow from, by name."""
    return {key: value_of(config, key) for key in keys(Config) if _among(key, RESULT)}


def of_run(run_dir: Path, overrides: Sequence[str], config_dir: str | None = None) -> tuple[Config, int]:
    """The settings of a run with `overrides` on top, which evaluate its last model.

    Returns:
        the settings, and the iteration that the model has reached (0 where `overrides` name another model).

    Raises:
        ConfigError: the folder holds no run, or a run that has not saved a model yet, or an override does not fit.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(
            f"--run {run_dir} holds no {CONFIG_FILE}, so it is not a run; give a folder such as runs/NAME"
        )
    stored, model = load_yaml(run_dir / CONFIG_FILE, Config), str(run_dir / "model")
    stored.model.path = model
    config = load_config(overrides, config_dir=config_dir, base=stored)
    if config.model.path != model:
        return config, 0
    if not (run_dir / "model" / "config.json").is_file():
        raise ConfigError(
            f"{run_dir} has no model yet: {model} is written when the run ends or is interrupted; finish it, or name a "
            "model with model.path"
        )
    return config, reached(run_dir, stored)


def checked(config: Config) -> Plan:
    """What the settings amount to, as the plan of a run without its trainer.

    Args:
        config: what `used` returned.

    Raises:
        ConfigError: settings are missing or cannot be evaluated with.
    """
    sampling = config.rollout.val_kwargs
    if not config.data.val_files:
        raise ConfigError("data.val_files is not set; give the prompt files to evaluate on: data.val_files=FILES")
    if sampling.n > MOST_RESPONSES:
        raise ConfigError(f"rollout.val_kwargs.n={sampling.n} is too large; the largest value is {MOST_RESPONSES}")
    if sampling.n > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"rollout.val_kwargs.n={sampling.n} asks for several responses and rollout.val_kwargs.temperature=0 makes "
            "them all the same; set rollout.val_kwargs.temperature=1, or n=1"
        )
    asked = copy.deepcopy(config)
    # What the checks of a run want of its training part.
    asked.data.train_files, asked.rollout.n = config.data.val_files, max(2, sampling.n)
    resolved = plan(asked)
    return dataclasses.replace(
        resolved, config=config, stages=tuple(stage for stage in resolved.stages if stage.name != "train")
    )


def chosen_ks(text: str | None, n: int) -> tuple[int, ...]:
    """For which k pass@k and maj@k are worked out: those of `--k`, else the powers of two up to `n`, and `n`.

    Raises:
        ConfigError: `text` is no list of numbers from 1 to `n`.
    """
    if text is None:
        return tuple(sorted({2**power for power in range(n.bit_length())} | {n}))
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--k {text} is not a list of whole numbers such as 1,4,8") from None
    if ks[0] < 1 or ks[-1] > n:
        raise ConfigError(
            f"--k {text}: every k must lie between 1 and rollout.val_kwargs.n={n}, the responses to each prompt"
        )
    return tuple(ks)


def in_flight(config: Config) -> int:
    """Chunks one engine works on at a time: twice what fills it, so that it stays full while chunks end."""
    rollout = config.rollout
    return rollout.in_flight(2 * rollout.in_flight(1) * rollout.num_engines)


def _among(key: str, names: Sequence[str]) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)
