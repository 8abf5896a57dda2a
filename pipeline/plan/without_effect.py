"""Find settings without effect, for notes of the plan.

`unread` lists keys that the run does not read. `idle` has sentences on values that are read but change nothing.
"""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatch

from pipeline.catalogue import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss, get_adv_estimator
from pipeline.config import Config
from pipeline.config.bounds import as_argument
from pipeline.config.schema import keys, value_of
from pipeline.derived import (
    UpdateShape,
    policy_loss,
    reads_reference,
    reads_teacher,
    reference_is_base,
    rollout_correction,
    shards_teacher,
    trains_beside_reference,
    uses_agent,
    uses_critic,
    uses_distillation,
    uses_engines,
    uses_images,
    uses_policy_scores,
    uses_reward_model,
)
from pipeline.replay import checks as replay
from pipeline.reward.functions import functions

_OF_ENVIRONMENT = ("agent.observation_role", "agent.same_seed_in_group")
"""Keys that have an effect only if the run has an environment."""
_NOT_OF_PROGRAM = (
    "agent.observation_role",
    "agent.max_parallel_calls",
    "agent.on_malformed",
    "agent.step_timeout_s",
)
"""Keys without effect if a program or a command runs the episodes."""


def idle(config: Config, iterations: int | None) -> dict[str, object]:
    """Return sentences on values that change nothing, each with a true value if it applies (see `bounds.sentences`).

    Args:
        config: settings of the run.
        iterations: number of iterations of the run; None if unknown.
    """
    trainer, sampling, rollout = config.trainer, config.rollout.val_kwargs, config.rollout
    greedy, validates = sampling.temperature == 0 or sampling.top_k == 1, bool(config.data.val_files)
    alike = "all {n} responses to a prompt are the same"
    table: dict[str, object] = {
        f"{{rollout.val_kwargs.n}}: greedy ({{rollout.val_kwargs.temperature}}, {{rollout.val_kwargs.top_k}}), "
        f"{alike.format(n=sampling.n)}; set n to 1, or temperature to 1 and top_k to -1 "
        "(rows that ask for other sampling are not meant)": (validates and greedy and sampling.n > 1),
        f"{{rollout.n}} with {{rollout.top_k}}: {alike.format(n=rollout.n)}, so groups have no advantage": (
            uses_engines(config) and rollout.top_k == 1 and rollout.n > 1
        ),
    }
    if iterations is not None:
        table |= {
            f"{{trainer.test_freq}} is above the {iterations} iterations of the run: only its first and last policy "
            "are validated": validates and trainer.test_freq > iterations,
            f"{{trainer.save_freq}} is above the {iterations} iterations of the run: the only checkpoint is its last": (
                trainer.save_freq > iterations
            ),
        }
        learners = {"actor": (config.actor, iterations - config.critic.warmup * uses_critic(config))}
        if uses_critic(config):
            learners["critic"] = config.critic, iterations  # type: ignore[assignment]
        for name, (learner, trained) in learners.items():
            steps = UpdateShape.of(config, learner).steps * trained
            warmup = learner.optim.warmup(steps)
            optim, key = learner.optim, f"{name}.optim"
            reached = optim.lr * min(1.0, steps / max(1, warmup))
            table[
                f"{key}: a warm-up of {warmup} optimiser steps in a run of {steps}: the learning rate only rises, to "
                f"{reached:g} of {{{key}.lr}}; lower {key}.lr_warmup_steps, or train longer"
            ] = warmup >= steps
            table[f"{{{key}.lr_scheduler_type}} with {{{key}.min_lr_ratio}}: the learning rate stays at its peak"] = (
                optim.min_lr_ratio == 1 and optim.lr_scheduler_type != "constant"
            )
    return table


def unread(config: Config) -> Iterator[str]:
    """Yield `key=value` for each setting that differs from its default but is not read with the other settings."""
    algorithm, actor = config.algorithm, config.actor
    sampling = config.rollout.val_kwargs
    normed = "seq-mean-token-sum-norm"
    nothing_read = {
        "actor.kl_loss_*": not actor.use_kl_loss,
        "algorithm.kl_penalty": not algorithm.use_kl_in_reward,
        "algorithm.kl_ctrl.*": not algorithm.use_kl_in_reward,
        "algorithm.filter_groups.*": not algorithm.filter_groups.enable,
        "algorithm.rollout_correction.rollout_is_threshold": rollout_correction(config).rollout_is == "none",
        "actor.loss_scale_factor": normed not in (actor.loss_agg_mode, config.critic.loss_agg_mode),
        "critic.*": not uses_critic(config),
        **dict.fromkeys(replay.UNREAD, not uses_engines(config)),
        "scoring.reference.*": not reads_reference(config),
        "scoring.reference.num_*": trains_beside_reference(config),
        "scoring.reference.max_token_len": trains_beside_reference(config),
        "scoring.reference.dtype": reference_is_base(config),
        "reward.model.weight": not uses_reward_model(config),
        "scoring.reward_model.*": not uses_reward_model(config),
        "teacher.*": not reads_teacher(config),
        "teacher.num_*": shards_teacher(config),
        "teacher.max_token_len": shards_teacher(config),
        **dict.fromkeys(
            ("teacher.served_model", "teacher.api_key_env", "teacher.timeout_s"),
            not any(teacher.url for teacher in config.teacher.declared().values()),
        ),
        "teacher.by": not config.teacher.named,
        "actor.distill_top_k": not uses_distillation(config),
        "actor.distill_beta": not uses_distillation(config),
        "scoring.value.*": not uses_critic(config),
        "scoring.policy.*": not uses_policy_scores(config),
        "reward.rule_kwargs": all(function.path is not None for function in functions(config.reward)),
        "reward.overlong_buffer.*": not config.reward.overlong_buffer.enable,
        "reward.repetition_penalty.ngram": not config.reward.repetition_penalty.factor,
        "reward.custom_reward_function.*": config.reward.custom_reward_function.path is None,
        "algorithm.kl_ctrl.target_kl": algorithm.kl_ctrl.type == "fixed",
        "algorithm.kl_ctrl.horizon": algorithm.kl_ctrl.type == "fixed",
        "algorithm.rollout_correction.rollout_is_batch_normalize": rollout_correction(config).rollout_is == "none",
        "actor.clip_ratio": actor.clip_ratio_low is not None and actor.clip_ratio_high is not None,
        "actor.optim.min_lr_ratio": actor.optim.lr_scheduler_type == "constant",
        "actor.optim.lr_warmup_steps_ratio": actor.optim.lr_warmup_steps >= 0,
        "critic.optim.min_lr_ratio": config.critic.optim.lr_scheduler_type == "constant",
        "critic.optim.lr_warmup_steps_ratio": config.critic.optim.lr_warmup_steps >= 0,
        "model.lora.alpha": not config.model.lora.rank,
        "model.lora.target_modules": not config.model.lora.rank,
        "rollout.val_kwargs.*": not config.data.val_files,
        "data.val_max_samples": not config.data.val_files,
        "data.shuffle_window_rows": not config.data.shuffle,
        **dict.fromkeys(
            ("data.image_key", "data.max_image_bytes", "model.*_pixels"),
            not uses_images(config),
        ),
        "data.truncation": config.data.filter_overlong_prompts,
        "rollout.val_kwargs.top_*": sampling.temperature == 0,
        "rollout.enforce_eager": config.rollout.name == "hf",
        "rollout.engine_python": config.rollout.name != "sglang",
        "rollout.update_kv": config.rollout.weight_update == "between_chunks",
        "rollout.cpu_kvcache_space_gb": config.rollout.num_gpus > 0,
        "rollout.gpu_memory_utilization": config.rollout.num_gpus == 0,
        "trainer.gpus_per_worker": not config.trainer.use_gpu,
        "trainer.best_metric_mode": config.trainer.best_metric is None,
        "trainer.val_before_train": not config.data.val_files,
        "trainer.log_traces": "mlflow" not in config.trainer.logger,
        "trainer.total_epochs": config.trainer.total_training_steps is not None,
        "agent.*": not uses_agent(config),
    }
    patterns = [pattern for pattern, applies in nothing_read.items() if applies]
    patterns += (f"actor.policy_loss.{key}" for key in _not_read(policy_loss(config), POLICY_LOSSES.values()))
    patterns += (
        f"algorithm.{key}" for key in _not_read(get_adv_estimator(algorithm.adv_estimator), ESTIMATORS.values())
    )
    agents = config.agent.declared().values()
    if all(agent.driven for agent in agents):
        patterns += _NOT_OF_PROGRAM
    elif all(agent.environment is None and not agent.driven for agent in agents):
        patterns += _OF_ENVIRONMENT
    patterns += ("agent.max_contexts",) if not any(agent.driven for agent in agents) else ()
    for name, key in keys(Config).items():
        if value_of(config, name) != key.default and any(fnmatch(name, pattern) for pattern in patterns):
            yield f"{name}={as_argument(value_of(config, name))}"


def _not_read(chosen: PolicyLoss | Estimator, others: Iterable[PolicyLoss | Estimator]) -> set[str]:
    """Return the keys that algorithms in `others` read and `chosen` does not.

    Empty for a user's algorithm that does not list its keys.
    """
    if not (chosen.built_in or chosen.reads):
        return set()
    return {key for other in others for key in other.reads} - set(chosen.reads)
