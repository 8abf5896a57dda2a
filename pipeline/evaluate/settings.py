"""The settings of a training run that an evaluation reads.

An evaluation uses the same settings as training, so its prompts, samples and rewards are the same. Every setting that
an evaluation does not read is reset to its default (`used`), so that settings of the trainer cannot make an evaluation
fail.
"""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import Config, ConfigError, load_config, load_yaml
from pipeline.config.model import LoraConfig
from pipeline.config.schema import keys, value_of
from pipeline.derived import MOST_PROMPTS, chunk_prompts
from pipeline.plan.checks import check
from pipeline.plan.plan import Plan
from pipeline.plan.plan import plan as make_plan
from pipeline.storage.resume import CONFIG_FILE, reached
from pipeline.track.passk import MAX_RESPONSES

RESULT = (
    *(f"data.{key}" for key in ("val_files", "val_max_samples", "prompt_key", "apply_chat_template_kwargs")),
    *(f"data.{key}" for key in ("max_prompt_length", "max_response_length", "filter_overlong_prompts", "truncation")),
    *(f"data.{key}" for key in ("image_key", "max_image_bytes")),
    *(f"model.{key}" for key in ("path", "tokenizer_path", "trust_remote_code", "vision", "min_pixels", "max_pixels")),
    *(f"rollout.{key}" for key in ("val_kwargs.", "stop", "min_tokens", "ignore_eos", "chunk_prompts")),
    *(f"rollout.{key}" for key in ("name", "dtype", "seed_per_request", "engine_kwargs")),
    *(f"reward.{key}" for key in ("custom_reward_function.", "functions", "model.", "rule_kwargs", "sandbox.")),
    *("agent.", "trainer.seed"),
)
"""Settings that change responses or scores. A name that ends in a dot stands for all settings of its section."""

LAYOUT = (
    "data.max_bad_rows",
    *(f"model.{key}" for key in ("dtype", "attn_implementation")),
    *(f"rollout.{key}" for key in ("num_engines", "chunks_in_flight", "num_cpus", "num_gpus", "num_threads")),
    *(f"rollout.{key}" for key in ("tensor_parallel_size", "gpu_memory_utilization", "cpu_kvcache_space_gb")),
    *(f"rollout.{key}" for key in ("max_num_seqs", "max_num_batched_tokens", "engine_python")),
    *(f"rollout.{key}" for key in ("enable_prefix_caching", "enforce_eager")),
    *(f"reward.{key}" for key in ("timeout_s", "max_processes", "worker_memory_mb", "num_cpus")),
    *(f"reward.{key}" for key in ("max_error_rate", "rate_limit.")),
    *("scoring.reward_model.", "actor.fsdp.param_dtype"),
    *(f"trainer.{key}" for key in ("project_name", "logger", "ray_num_cpus", "object_store_gb")),
    *(f"trainer.{key}" for key in ("deadlines.", "env_vars")),
)
"""Settings of resources and reports, which change no response and no score."""


def used(config: Config) -> Config:
    """Return a config with the settings of `config` that an evaluation reads, and all others at their defaults."""
    result = Config()
    for key in keys(Config):
        if _among(key, (*RESULT, *LAYOUT)):
            section, _, name = key.rpartition(".")
            setattr(value_of(result, section), name, copy.deepcopy(value_of(config, key)))
    result.rollout.n = result.rollout.val_kwargs.n
    result.rollout.chunk_prompts = result.rollout.chunk_prompts or MOST_PROMPTS
    result.data.train_batch_size = result.rollout.chunk_prompts
    if result.rollout.name in ("vllm", "sglang"):
        # In a run weights come from the trainer; here the engine reads them itself, which `hf` always does.
        result.rollout.engine_kwargs.setdefault("load_format", "auto")
    return result


def result_settings(config: Config) -> dict[str, object]:
    """Return the settings that change responses or scores, by full name."""
    return {key: value_of(config, key) for key in keys(Config) if _among(key, RESULT)}


def of_run(run_dir: Path, overrides: Sequence[str], config_dir: str | None = None) -> tuple[Config, int]:
    """Load the settings of a run and apply `overrides`, to evaluate the run's last model.

    Args:
        run_dir: folder of the run.
        overrides: settings as on the command line, KEY=VALUE.
        config_dir: folder of configuration files.

    Returns:
        The settings, and the iteration that the model has reached (0 if `overrides` name another model).

    Raises:
        ConfigError: the folder holds no run, or a run that has not saved a model yet, or an override does not fit.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(
            f"--run {run_dir} holds no {CONFIG_FILE}, so it is not a run; give a folder such as runs/NAME"
        )
    stored, model = load_yaml(run_dir / CONFIG_FILE, Config), run_dir / "model"
    # The run's saved model has its adapter merged.
    stored.model.path, stored.model.lora = str(model), LoraConfig()
    config = load_config(overrides, config_dir=config_dir, base=stored)
    if config.model.path != str(model):
        return config, 0
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"{run_dir} has no model yet: {model} is written when the run ends or is interrupted; finish it, or name a "
            "model with model.path"
        )
    return config, reached(run_dir, stored)


def checked(config: Config) -> Plan:
    """Check the result of `used`, and make the plan of a run from it, without the trainer's stage.

    Raises:
        ConfigError: settings are missing or do not allow an evaluation.
    """
    sampling = config.rollout.val_kwargs
    if not config.data.val_files:
        raise ConfigError("data.val_files is not set; give the prompt files to evaluate on: data.val_files=FILES")
    if sampling.n > MAX_RESPONSES:
        raise ConfigError(f"rollout.val_kwargs.n={sampling.n} is too large; the largest value is {MAX_RESPONSES}")
    if sampling.n > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"rollout.val_kwargs.n={sampling.n} needs several responses, but rollout.val_kwargs.temperature=0 makes "
            "them equal; set rollout.val_kwargs.temperature=1, or n=1"
        )
    of_a_run = copy.deepcopy(config)
    # The checks of a run require training prompts and several samples.
    of_a_run.data.train_files, of_a_run.rollout.n = config.data.val_files, max(2, sampling.n)
    check(of_a_run)
    plan = make_plan(of_a_run)
    return dataclasses.replace(plan, config=config, stages=tuple(s for s in plan.stages if s.name != "train"))


def chosen_ks(text: str | None, n: int) -> tuple[int, ...]:
    """Return the k of pass@k and maj@k: the numbers in `--k`, else the powers of two up to `n`, and `n`.

    Raises:
        ConfigError: `text` is not a list of numbers from 1 to `n`.
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
    """Return the number of chunks that one engine works on at a time: twice a full load, so that the engine stays full
    while chunks end."""
    rollout, prompts = config.rollout, chunk_prompts(config)
    return rollout.in_flight(2 * rollout.in_flight(1, prompts) * rollout.num_engines, prompts)


def _among(key: str, names: Sequence[str]) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)
