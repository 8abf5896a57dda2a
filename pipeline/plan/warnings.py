"""What is allowed and probably not meant: sentences that `--dry-run` and the start of a run show below the plan."""

from collections.abc import Iterator
from fnmatch import fnmatch

from pipeline.advantage.estimators import get_adv_estimator
from pipeline.config import Config
from pipeline.config.schema import keys, value_of
from pipeline.derived import rollout_correction, scorers, uses_critic, uses_engines, uses_reference, uses_reward_model
from pipeline.plan import asynchrony, check_replay
from pipeline.plan.check_algorithm import POLICY_LOSSES, built_in, loss_mode
from pipeline.plan.memory import Memory, shown

_LIKE_GRPO = ("grpo", "grpo_passk", "gdpo")
_READ_BY_LOSS = {
    "dro_beta": ("dro",),
    "tau_*": ("sapo",),
    "clip_cov_*": ("clip_cov",),
    "kl_cov_ratio": ("kl_cov",),
    "ppo_kl_coef": ("kl_cov",),
}
"""Keys of `actor.policy_loss`: the built-in losses that read them."""
_READ_BY_ESTIMATOR = {
    "lam": ("gae",),
    "gamma": ("gae", "reinforce_plus_plus", "remax"),
    "f_norm": ("gpg",),
    "norm_adv_by_std_in_grpo": _LIKE_GRPO,
    "gdpo_reward_*": ("gdpo",),
    "handle_zero_tail": ("optimal_token_baseline", "tir_optimal_token_baseline"),
}
"""Keys of `algorithm`: the built-in estimators that read them."""


def notes(config: Config, chunks: int, memory: Memory | None) -> Iterator[str]:
    """One sentence each, for a config that can be run.

    Args:
        config: the run's configuration.
        chunks: chunks of an iteration.
        memory: what the run needs, where the model's shape is known.
    """
    yield from check_replay.notes(config)
    if uses_engines(config):
        yield from _pools(config, chunks, memory)
    yield from _algorithm(config)
    yield from asynchrony.notes(config)
    if unread := list(_unread(config)):
        yield f"set, and read by nothing in this run: {', '.join(unread)}"


def _pools(config: Config, chunks: int, memory: Memory | None) -> Iterator[str]:
    rollout = config.rollout
    if rollout.num_engines > chunks:
        yield (
            f"an iteration has {chunks} chunks for rollout.num_engines={rollout.num_engines}: "
            f"{rollout.num_engines - chunks} engines stay idle; a smaller rollout.chunk_prompts spreads the work"
        )
    if rollout.chunks_in_flight == 0 and chunks % rollout.num_engines:
        yield (
            f"{chunks} chunks do not divide evenly among rollout.num_engines={rollout.num_engines}; "
            "some engines have one chunk more to do"
        )
    if rollout.update == "in_flight" and config.algorithm.max_staleness == 0:
        yield (
            "rollout.update=in_flight with algorithm.max_staleness=0: no response runs while weights change, so it "
            "changes nothing; raise max_staleness"
        )
    if memory and rollout.num_gpus == 0 and memory.engine_kv_needed > rollout.cpu_kvcache_space_gb << 30:
        yield (
            f"rollout.cpu_kvcache_space_gb={rollout.cpu_kvcache_space_gb} holds fewer than rollout.max_num_seqs="
            f"{rollout.max_num_seqs} sequences of full length ({shown(memory.engine_kv_needed)} needed); "
            "the engine queues the rest"
        )
    if config.data.sampler not in ("uniform", "weighted") and config.trainer.total_training_steps is None:
        yield (
            f"data.sampler={config.data.sampler} may pass over prompts, so that trainer.total_epochs="
            f"{config.trainer.total_epochs} can end sooner"
        )
    for name, pool in scorers(config).items():
        if rollout.num_gpus > 0 and pool.num_gpus == 0:
            yield (
                f"scoring.{name}.num_gpus=0: engines run on GPUs and the {name} replicas on {pool.num_cpus:g} CPUs "
                "each, which the run will wait for"
            )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, actor = config.algorithm, config.actor
    estimator, mode = get_adv_estimator(algorithm.adv_estimator), loss_mode(config)
    if uses_critic(config) and "values" not in estimator.needs:
        yield (
            f"critic.enable=true trains a critic that algorithm.adv_estimator={estimator.name} does not read; "
            "it learns what that estimator gives as returns"
        )
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        yield (
            f"actor.kl_loss_type={actor.kl_loss_type} has a gradient that is 0 on average; "
            f"{actor.kl_loss_type}+ has the same value and the gradient of the KL"
        )
    if algorithm.use_kl_in_reward and estimator.name in ("grpo", "grpo_passk") and algorithm.norm_adv_by_std_in_grpo:
        yield (
            f"algorithm.adv_estimator={estimator.name} divides by the group's spread: where all scores of a group are "
            "equal, the KL in the reward alone makes it, however small; actor.use_kl_loss=true has no such effect"
        )
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield "the KL to the reference is in the reward and in the loss: it holds the policy twice"
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "actor.kl_loss_coef=0: the KL of actor.use_kl_loss=true is measured and does not train"
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        yield "algorithm.kl_ctrl.kl_coef=0: the KL of algorithm.use_kl_in_reward=true is measured and takes nothing off"
    if mode == "gspo" and max(actor.clip_low, actor.clip_high) > 0.01:
        yield (
            f"actor.policy_loss.loss_mode=gspo clips the ratio of the response, which hardly ever leaves 1 - "
            f"{actor.clip_low:g} to 1 + {actor.clip_high:g}; its paper has 3e-4 and 4e-4 (algorithm=gspo)"
        )
    if mode in ("dppo_tv", "dppo_kl") and actor.clip_ratio_c < 10:
        yield (
            f"actor.clip_ratio_c={actor.clip_ratio_c:g} truncates the weights of actor.policy_loss.loss_mode={mode}; "
            "its paper hardly does (algorithm=dppo)"
        )


def _unread(config: Config) -> Iterator[str]:
    """Keys with another value than their default that have no effect beside the others."""
    algorithm, actor, mode = config.algorithm, config.actor, loss_mode(config)
    estimator = get_adv_estimator(algorithm.adv_estimator)
    normed = "seq-mean-token-sum-norm"
    unread = {
        "actor.kl_loss_*": not actor.use_kl_loss,
        "algorithm.kl_penalty": not algorithm.use_kl_in_reward,
        "algorithm.kl_ctrl.*": not algorithm.use_kl_in_reward,
        "algorithm.filter_groups.*": not algorithm.filter_groups.enable,
        "algorithm.rollout_correction.rollout_is_threshold": rollout_correction(config).rollout_is == "none",
        "actor.loss_scale_factor": normed not in (actor.loss_agg_mode, config.critic.loss_agg_mode),
        "critic.*": not uses_critic(config),
        **dict.fromkeys(check_replay.UNREAD, not uses_engines(config)),
        "scoring.reference.path": not uses_reference(config),
        "reward.model.weight": not uses_reward_model(config),
    }
    if mode in POLICY_LOSSES:
        unread |= {f"actor.policy_loss.{key}": mode not in by for key, by in _READ_BY_LOSS.items()}
    if built_in(estimator.function):
        unread |= {f"algorithm.{key}": estimator.name not in by for key, by in _READ_BY_ESTIMATOR.items()}
    patterns = [pattern for pattern, applies in unread.items() if applies]
    for name, key in keys(Config).items():
        if value_of(config, name) != key.default and any(fnmatch(name, pattern) for pattern in patterns):
            yield f"{name}={value_of(config, name)}"
