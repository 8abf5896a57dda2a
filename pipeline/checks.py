"""Settings that are each valid and together impossible, found before anything is started.

Every problem of a config is reported at once, as one sentence that names the keys, shows the arithmetic and says what
to change. Only settings and local files are looked at: no model is loaded and no torch, Ray or vLLM is imported. What
depends on the machine or the cluster is checked in `plan.check_resources`.
"""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

from pipeline import check_algorithm, check_data, check_devices, check_groups, check_reward, kl, replay
from pipeline.config import Config, ConfigError
from pipeline.rollout.sampling import stop_problem
from pipeline.schema import keys, value_of
from pipeline.stages import scorers, uses_critic, uses_reference
from pipeline.storage import check_scheme
from pipeline.train.config import PLACED

LEARNERS = ("actor", "critic")
SCORERS = ("scoring.reward_model", "scoring.reference", "scoring.value", "scoring.policy")
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")

CHOICES = {
    "data.truncation": ("error", "left", "right", "middle"),
    "model.dtype": ("float32", "bfloat16"),
    "rollout.dtype": ("float32", "bfloat16", "float16"),
    "rollout.update": ("between_chunks", "in_flight"),
    "rollout.update_kv": ("recompute", "keep"),
    "rollout.oversample_policy": ("drop", "cancel", "carry"),
    **{f"{scorer}.dtype": (None, "float32", "bfloat16", "float16") for scorer in SCORERS},
    "stream.order": ("auto", "kept", "first_come"),
    "algorithm.kl_penalty": tuple(kl.NAMES),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.filter_groups.surplus": ("discard", "carry"),
    "algorithm.on_stale": ("drop", "correct"),
    **{f"{learner}.fsdp.param_dtype": (None, "float32", "bfloat16") for learner in LEARNERS},
    **{f"{learner}.fsdp.reduce_dtype": ("float32", "bfloat16") for learner in LEARNERS},
    **{f"{learner}.optim.lr_scheduler_type": ("constant", "cosine", "linear") for learner in LEARNERS},
    "actor.loss_agg_mode": AGG_MODES,
    "critic.loss_agg_mode": (None, *AGG_MODES),
    "actor.kl_loss_type": tuple(f"{name}{suffix}" for suffix in ("", "+") for name in kl.NAMES),
    "actor.old_log_probs": ("recompute", "engine"),
    "trainer.best_metric_mode": ("max", "min"),
    "trainer.weight_transport": ("object_store", "delta", "nixl", "ipc"),
}
"""Keys that take one of a few values."""

AT_LEAST = {
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "data.shuffle_window_rows": 1,
    "data.max_bad_rows": 0,
    "rollout.n": 1,
    "rollout.val_kwargs.n": 1,
    "rollout.val_kwargs.temperature": 0,
    "rollout.chunk_prompts": 1,
    "rollout.min_tokens": 0,
    "rollout.partial_tokens": 0,
    "rollout.tensor_parallel_size": 1,
    "rollout.num_engines": 1,
    "rollout.scale_down_s": 0,
    "rollout.chunks_in_flight": 0,
    "rollout.num_cpus": 0,
    "rollout.num_gpus": 0,
    "rollout.num_threads": 0,
    "rollout.cpu_kvcache_space_gb": 1,
    "rollout.max_num_seqs": 1,
    "reward.num_cpus": 0,
    "reward.max_processes": 1,
    "reward.repetition_penalty.ngram": 1,
    **{f"{scorer}.num_workers": 1 for scorer in SCORERS},
    **{f"{scorer}.{name}": 0 for scorer in SCORERS for name in ("num_cpus", "num_gpus", "num_threads")},
    "algorithm.filter_groups.max_num_gen_batches": 1,
    "algorithm.kl_ctrl.kl_coef": 0,
    "algorithm.kl_ctrl.horizon": 1,
    "algorithm.max_staleness": 0,
    "actor.policy_loss.ppo_kl_coef": 0,
    "actor.entropy_coeff": 0,
    "actor.kl_loss_coef": 0,
    "actor.ppo_epochs": 1,
    "actor.logits_chunk_tokens": 1,
    "critic.warmup": 0,
    **{f"{learner}.optim.{name}": 0 for learner in LEARNERS for name in ("lr", "weight_decay")},
    **{f"{learner}.optim.lr_warmup_steps": -1 for learner in LEARNERS},
    "trainer.total_epochs": 1,
    "trainer.num_workers": 1,
    "trainer.cpus_per_worker": 0,
    "trainer.num_threads": 0,
    "trainer.max_ckpt_to_keep": 1,
    "trainer.max_failures": -1,
    "trainer.max_nonfinite_steps": 0,
    "trainer.log_samples": 0,
    "trainer.weight_bucket_mb": 1,
}
"""Smallest value of a key."""

POSITIVE = (
    "rollout.temperature",
    "rollout.scale_up_s",
    "reward.timeout_s",
    "algorithm.f_norm",
    "algorithm.kl_ctrl.target_kl",
    "actor.policy_loss.tau_pos",
    "actor.policy_loss.tau_neg",
    "actor.policy_loss.clip_cov_ratio",
    "actor.policy_loss.kl_cov_ratio",
    "critic.cliprange_value",
    *(f"{learner}.{name}" for learner in LEARNERS for name in ("optim.eps", "grad_clip")),
    "trainer.deadlines.engine_start",
    "trainer.deadlines.admission",
    "trainer.deadlines.chunk",
    "trainer.deadlines.rows",
    "trainer.deadlines.publish",
    "trainer.deadlines.checkpoint",
    "trainer.deadlines.train_start",
    "trainer.deadlines.collective",
    "trainer.deadlines.store",
)
"""Keys whose value must be above 0."""

MAY_BE_INFINITE = (
    "actor.clip_ratio_c",
    "critic.cliprange_value",
    *(f"{learner}.grad_clip" for learner in LEARNERS),
    "trainer.max_log_prob_gap",
)
"""Bounds that `.inf` takes away."""

SHARES = (
    "reward.max_error_rate",
    "algorithm.gamma",
    "algorithm.lam",
    "actor.policy_loss.clip_cov_ratio",
    "actor.policy_loss.kl_cov_ratio",
    *(f"{learner}.optim.{name}" for learner in LEARNERS for name in ("lr_warmup_steps_ratio", "min_lr_ratio")),
    "rollout.gpu_memory_utilization",
    "rollout.oversample",
)
"""Keys whose value lies between 0 and 1."""

AT_LEAST_1_OR_NULL = (
    "rollout.min_engines",
    "rollout.max_engines",
    "trainer.total_training_steps",
    "trainer.ray_num_cpus",
    "actor.ppo_mini_batch_size",
    "critic.ppo_mini_batch_size",
    "critic.ppo_epochs",
    "reward.rate_limit.max_concurrent",
    "reward.rate_limit.max_per_minute",
)
"""Keys that are null or at least 1."""

POSITIVE_OR_NULL = (
    "trainer.object_store_gb",
    "trainer.max_log_prob_gap",
    "actor.loss_scale_factor",
    "actor.policy_loss.dro_beta",
)
"""Keys that are null or above 0."""

LOGGERS = {"console": "rich", "mlflow": "mlflow", "wandb": "wandb", "tensorboard": "tensorboard"}
"""Tracker: the Python package it needs."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check(config: Config) -> None:
    """Refuse a config that cannot be run.

    Raises:
        ConfigError: one sentence per problem found.
    """
    found = list(_problems(config))
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError(f"{len(found)} settings cannot be run:\n" + "\n".join(f"- {problem}" for problem in found))


def _problems(config: Config) -> Iterator[str]:
    single, known = list(_single_values(config)), check_algorithm.knows_estimator(config)
    yield from single
    yield from _model(config)
    yield from check_data.problems(config)
    yield from check_algorithm.problems(config)
    yield from check_groups.problems(config)
    yield from check_reward.problems(config)
    yield from replay.problems(config)
    yield from _trainer(config)
    if known:
        yield from _further_models(config)
    if known and not single:
        # The arithmetic divides by values that were found to be positive above.
        yield from _batches(config)
        yield from _lengths(config)
        yield from check_devices.problems(config)


def _single_values(config: Config) -> Iterator[str]:
    for key, choices in CHOICES.items():
        value = value_of(config, key)
        if value not in choices:
            known = ", ".join("null" if choice is None else choice for choice in choices)
            yield f"{key}={value} is not known; it must be one of {known}"
    for key, least in AT_LEAST.items():
        if not value_of(config, key) >= least:
            yield f"{key}={value_of(config, key)} is too small; the smallest value is {least}"
    for key in keys(Config):
        value = value_of(config, key)
        if isinstance(value, float) and not math.isfinite(value) and not (value > 0 and key in MAY_BE_INFINITE):
            yield f"{key}={value} must be a finite number"
    for key in POSITIVE:
        if not value_of(config, key) > 0:
            yield f"{key}={value_of(config, key)} must be above 0"
    for key in SHARES:
        if not 0 <= value_of(config, key) <= 1:
            yield f"{key}={value_of(config, key)} must lie between 0 and 1"
    for key in ("rollout.temperature", "rollout.val_kwargs.temperature"):
        if value_of(config, key) > 2:
            yield f"{key}={value_of(config, key)} must be at most 2, the highest that vLLM samples at"
    for key in ("rollout.top_p", "rollout.val_kwargs.top_p"):
        if not 0 < value_of(config, key) <= 1:
            yield f"{key}={value_of(config, key)} must be above 0 and at most 1; 1 keeps all tokens"
    for key in ("rollout.top_k", "rollout.val_kwargs.top_k"):
        if value_of(config, key) != -1 and value_of(config, key) < 1:
            yield f"{key}={value_of(config, key)} must be at least 1, or -1 for all tokens"
    for key in ("data.train_max_samples", "data.val_max_samples", "trainer.test_freq", "trainer.save_freq"):
        if value_of(config, key) != -1 and value_of(config, key) < 1:
            yield f"{key}={value_of(config, key)} must be at least 1, or -1 (see docs/configuration.md)"
    for key in AT_LEAST_1_OR_NULL:
        if value_of(config, key) is not None and value_of(config, key) < 1:
            yield f"{key}={value_of(config, key)} must be at least 1, or null"
    for key in POSITIVE_OR_NULL:
        if value_of(config, key) is not None and not value_of(config, key) > 0:
            yield f"{key}={value_of(config, key)} must be above 0, or null"
    for key in (f"{learner}.optim.betas" for learner in LEARNERS):
        betas = value_of(config, key)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            yield f"{key}={list(betas)} must be two numbers from 0 up to but not including 1"


def _model(config: Config) -> Iterator[str]:
    path = config.model.path
    if not path:
        yield "model.path is not set; give the folder or the hub name of a Hugging Face model"
        return
    yield from _model_folder("model.path", path)
    tokenizer = Path(config.model.tokenizer_path or path)
    if tokenizer.is_dir() and not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        key = "model.tokenizer_path" if config.model.tokenizer_path else "model.path"
        yield (
            f"{key}={tokenizer} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); save one there with "
            "tokenizer.save_pretrained, or set model.tokenizer_path"
        )


def _further_models(config: Config) -> Iterator[str]:
    if config.critic.path and uses_critic(config):
        yield from _model_folder("critic.path", config.critic.path)
    if config.reward.model.path:
        yield from _model_folder("reward.model.path", config.reward.model.path)
    if config.scoring.reference.path and uses_reference(config):
        yield from _model_folder("scoring.reference.path", config.scoring.reference.path)


def _model_folder(key: str, path: str) -> Iterator[str]:
    folder = Path(path)
    if not folder.exists():
        # A hub name is `owner/name`; anything else, or a first part that is a folder here, was meant as a folder.
        if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1 or folder.parts[0] == "models":
            yield f"{key}={path}: there is no such folder"
    elif not folder.is_dir():
        yield f"{key}={path} is a file; give the folder that holds config.json"
    elif not (folder / "config.json").is_file():
        yield f"{key}={path} holds no config.json, so it is not a Hugging Face model folder"


def _trainer(config: Config) -> Iterator[str]:
    trainer, deadlines = config.trainer, config.trainer.deadlines
    for name in trainer.logger:
        if name not in LOGGERS:
            yield f"trainer.logger: {name} is not known; it may hold {', '.join(LOGGERS)}"
        elif importlib.util.find_spec(LOGGERS[name]) is None:
            yield f"trainer.logger={name} needs the Python package {LOGGERS[name]}: pip install {LOGGERS[name]}"
    for stage in trainer.placement:
        if stage not in PLACED:
            yield f"trainer.placement.{stage}: there is no such stage; there are: {', '.join(PLACED)}"
    name = trainer.experiment_name
    if not name or name in (".", "..") or "/" in name:
        yield f"trainer.experiment_name={name!r} names the run's folder; it may not be empty or hold a slash"
    if trainer.best_metric is not None and (trainer.save_freq < 1 or trainer.test_freq < 1):
        yield (
            f"trainer.best_metric={trainer.best_metric} needs versions that are both validated and saved; set "
            f"trainer.test_freq={trainer.test_freq} and trainer.save_freq={trainer.save_freq} to numbers of "
            "iterations, one a multiple of the other"
        )
    if deadlines.rows < deadlines.engine_start + deadlines.chunk:
        yield (
            f"trainer.deadlines.rows={deadlines.rows:g} is shorter than trainer.deadlines.engine_start + "
            f"trainer.deadlines.chunk = {deadlines.engine_start:g} + {deadlines.chunk:g} = "
            f"{deadlines.engine_start + deadlines.chunk:g} seconds, which the first rows may take; raise it"
        )
    if deadlines.collective <= max(deadlines.rows, deadlines.checkpoint):
        yield (
            f"trainer.deadlines.collective={deadlines.collective:g} must be longer than trainer.deadlines.rows="
            f"{deadlines.rows:g} and trainer.deadlines.checkpoint={deadlines.checkpoint:g}, which one train worker may "
            "take while the others wait for it; raise it"
        )
    if trainer.storage_path is not None:
        try:
            check_scheme(trainer.storage_path)
        except ValueError as error:
            yield f"trainer.storage_path: {error}"


def _batches(config: Config) -> Iterator[str]:
    batch, chunk, workers = config.data.train_batch_size, config.rollout.chunk_prompts, config.trainer.num_workers
    if batch % chunk:
        yield (
            f"data.train_batch_size={batch} is not a whole number of chunks: {batch} = {batch // chunk} x "
            f"rollout.chunk_prompts={chunk} + {batch % chunk}; {_neighbours(batch, chunk)}"
        )
    elif batch // chunk % workers:
        yield (
            f"an iteration has data.train_batch_size / rollout.chunk_prompts = {batch} / {chunk} = {batch // chunk} "
            f"chunks, which trainer.num_workers={workers} cannot share evenly; {_neighbours(batch, chunk * workers)}, "
            "or change rollout.chunk_prompts"
        )
    mini_batches = {"actor": config.actor.ppo_mini_batch_size}
    if uses_critic(config):
        mini_batches["critic"] = config.critic.ppo_mini_batch_size
    for learner, mini in mini_batches.items():
        if mini is None:
            continue
        if batch % mini:
            yield (
                f"{learner}.ppo_mini_batch_size={mini} does not divide data.train_batch_size={batch}: "
                f"{batch} = {batch // mini} x {mini} + {batch % mini}"
            )
        if mini % (chunk * workers):
            yield (
                f"{learner}.ppo_mini_batch_size={mini} must be a multiple of rollout.chunk_prompts x "
                f"trainer.num_workers = {chunk} x {workers} = {chunk * workers}, so that every worker gets whole chunks"
            )


def _neighbours(batch: int, step: int) -> str:
    low, high = batch // step * step, (batch // step + 1) * step
    return f"set data.train_batch_size to {f'{low} or ' if low else ''}{high}"


def _lengths(config: Config) -> Iterator[str]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    budgets: dict[str, int | None] = {"actor.ppo_max_token_len_per_gpu": config.actor.ppo_max_token_len_per_gpu}
    if uses_critic(config):
        budgets["critic.ppo_max_token_len_per_gpu"] = config.critic.ppo_max_token_len_per_gpu
    budgets |= {f"scoring.{name}.max_token_len": pool.max_token_len for name, pool in scorers(config).items()}
    for key, budget in budgets.items():
        if budget is not None and prompt + response > budget:
            yield (
                f"the longest row has data.max_prompt_length + data.max_response_length = {prompt} + {response} = "
                f"{prompt + response} tokens, more than {key}={budget}; raise it or shorten rows"
            )
    if config.rollout.min_tokens > response:
        yield (
            f"rollout.min_tokens={config.rollout.min_tokens} is above data.max_response_length={response}; lower the "
            "one or raise the other"
        )
    if problem := stop_problem(config.rollout.stop):
        yield f"rollout.stop {problem}; it must be a list of texts that end a response"
    if config.rollout.max_num_batched_tokens < config.rollout.max_num_seqs:
        yield (
            f"rollout.max_num_batched_tokens={config.rollout.max_num_batched_tokens} is below "
            f"rollout.max_num_seqs={config.rollout.max_num_seqs}, so a step could not decode one token of each sequence"
        )
