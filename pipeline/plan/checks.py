"""Settings that are each valid and together impossible, found before anything is started.

Every problem of a config is reported at once, as one sentence that names the keys, shows the arithmetic and says what
to change. Only settings and local files are looked at: no model is loaded and no torch, Ray or vLLM is imported. What
depends on the machine or the cluster is checked in `plan.check_resources`.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import Config, ConfigError
from pipeline.config.bounds import violations
from pipeline.config.paths import model_folder
from pipeline.config.trainer import PLACED
from pipeline.derived import scorers, uses_critic, uses_reference
from pipeline.plan import check_algorithm, check_data, check_devices, check_groups, check_replay, check_reward
from pipeline.sampling import stop_problem
from pipeline.storage.filesystem import check_scheme

LOGGERS = {"console": "rich", "mlflow": "mlflow", "wandb": "wandb", "tensorboard": "tensorboard"}
"""Tracker: the Python package it needs."""

TOWERS = ("vision_config", "audio_config")
"""Entries of `config.json` of models that read images or sound."""

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
    single, known = list(violations(config)), check_algorithm.knows_estimator(config)
    yield from single
    yield from _model(config)
    yield from check_data.problems(config)
    yield from check_algorithm.problems(config)
    yield from check_groups.problems(config)
    yield from check_reward.problems(config)
    yield from check_replay.problems(config)
    yield from _trainer(config)
    if known:
        yield from _further_models(config)
    if known and not single:
        # The arithmetic divides by values that were found to be positive above.
        yield from _batches(config)
        yield from _lengths(config)
        yield from check_devices.problems(config)


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
    try:
        folder = model_folder(path, key)
    except ValueError as error:
        yield str(error)
        return
    if folder is not None:
        yield from _text_only(key, folder)


def _text_only(key: str, folder: Path) -> Iterator[str]:
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        yield f"{key}={folder}: config.json is not valid JSON: {error}"
        return
    for part in TOWERS:
        if settings.get(part):
            yield (
                f"{key}={folder} has {part} in its config.json: it reads more than text, and only text can be trained; "
                "give a text model"
            )


def _trainer(config: Config) -> Iterator[str]:
    trainer, deadlines = config.trainer, config.trainer.deadlines
    for learner in ("actor", "critic"):
        betas = getattr(config, learner).optim.betas
        if len(betas) != 2:
            yield f"{learner}.optim.betas={list(betas)} must be two numbers"
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
