"""Check that settings of estimator, loss, KL, critic and off-policy correction fit together. Part of `checks.check`."""

import math
from collections.abc import Iterator, Mapping

from pipeline.catalogue import ESTIMATORS, POLICY_LOSSES, Estimator, get_adv_estimator, get_policy_loss
from pipeline.config import Config
from pipeline.config.bounds import sentences
from pipeline.config.scoring import TRAIN_WORKERS
from pipeline.derived import (
    policy_loss,
    reads_reference,
    reference_is_base,
    rollout_correction,
    uses_agent,
    uses_critic,
    uses_policy_scores,
    uses_reference,
    why_not_streamed,
)
from pipeline.registry import Entry
from pipeline.train.correction import parse


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence per problem with the algorithm's settings. An unknown estimator is left to the caller."""
    try:
        estimator = get_adv_estimator(config.algorithm.adv_estimator)
    except ValueError:
        pass
    else:
        yield from _own("algorithm.adv_estimator", config.algorithm.adv_estimator, estimator, POLICY_LOSSES)
        yield from sentences(config, _estimator(config, estimator))
    name = config.actor.policy_loss.loss_mode
    try:
        yield from _own("actor.policy_loss.loss_mode", name, get_policy_loss(name), ESTIMATORS)
    except ValueError as error:
        yield str(error)
    yield from sentences(config, _loss(config))
    yield from sentences(config, _reference(config))
    try:
        yield from sentences(config, _correction(config))
    except ValueError as error:
        yield str(error)


def _own(key: str, name: str, entry: Entry, others: Mapping[str, Entry]) -> Iterator[str]:
    """Yield one sentence per problem with the name of an estimator or a loss.

    Args:
        key: the setting.
        name: value of the setting.
        entry: the function of this name.
        others: functions of the other kind (losses if `entry` is an estimator), for the error that they are confused.
    """
    if ":" not in name:
        if not entry.built_in:
            module = entry.path.partition(":")[0]
            yield (
                f"{key}={name} is registered in this process only; give its import path, so every worker can import "
                f"it: {module}:{name}"
            )
    elif not entry.built_in and any(other.owns(entry.function) for other in others.values()):
        yield f"{key}={name} is registered as another kind of function; see `slipstream docs algorithms` for both"


def _estimator(config: Config, estimator: Estimator) -> dict[str, object]:
    algorithm, critic, name = config.algorithm, config.critic, estimator.name
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    gdpo = "gdpo_reward_keys" in estimator.reads
    alone = [each.name for each in ESTIMATORS.values() if each.built_in and each.compares is None]
    why = why_not_streamed(config)
    return {
        f"{{rollout.n}} leaves algorithm.adv_estimator={name} no other response to compare with; set rollout.n to 2 or "
        f"more, or take an estimator that needs no group ({', '.join(alone)})": (
            estimator.compares and config.rollout.n == 1
        ),
        "{algorithm.adv_estimator_kwargs}: no built-in estimator reads it; leave it out, or name one of your own": (
            algorithm.adv_estimator_kwargs and estimator.built_in
        ),
        "{algorithm.turn_gamma} discounts from turn to turn, but rows have one turn; set it to 1": (
            algorithm.turn_gamma != 1 and not uses_agent(config)
        ),
        f"{{trainer.stream_gradients}} is not possible here: {why}; set it to null": (
            config.trainer.stream_gradients and why
        ),
        "{trainer.max_log_prob_gap} with {algorithm.max_staleness}: rows of older versions differ from the trainer, "
        "which has learnt since; set trainer.max_log_prob_gap=null": (
            algorithm.max_staleness > 0 and config.trainer.max_log_prob_gap is not None
        ),
        "{algorithm.adv_estimator} needs algorithm.gdpo_reward_keys, parts that the reward function returns, such as "
        "[acc,format]": gdpo and not keys,
        "{algorithm.gdpo_reward_weights} must have one weight for each of {algorithm.gdpo_reward_keys}, or be null": (
            gdpo and weights is not None and len(weights) != len(keys)
        ),
        "{algorithm.gdpo_reward_weights} must be finite numbers, not all of them 0": (
            gdpo and weights is not None and not (all(map(math.isfinite, weights)) and any(weights))
        ),
        "{algorithm.gdpo_reward_keys} names a part twice; give it a larger weight instead": (
            gdpo and len(set(keys)) < len(keys)
        ),
        "{algorithm.use_kl_in_reward} does nothing with {algorithm.adv_estimator}, which reads the parts of the "
        "reward, not its sum; use actor.use_kl_loss=true instead": gdpo and algorithm.use_kl_in_reward,
        f"algorithm.adv_estimator={name} reads values, but {{critic.enable}}; set critic.enable=null, or take an "
        "estimator without values (grpo, rloo, reinforce_plus_plus)": (
            critic.enable is False and "values" in estimator.needs
        ),
        f"{{critic.warmup}} trains a critic first, but algorithm.adv_estimator={name} has none; set critic.warmup=0": (
            critic.warmup > 0 and not uses_critic(config)
        ),
        "{model.lora.weight_sync} with {algorithm.adv_estimator}, whose replicas of the policy read whole weights; set "
        "the first to merged": config.model.lora.alone and uses_policy_scores(config),
    }


def _loss(config: Config) -> dict[str, object]:
    actor, algorithm, loss = config.actor, config.algorithm, policy_loss(config)
    options, pairs = actor.policy_loss, loss.of_pairs
    correction = algorithm.rollout_correction
    try:
        estimator = get_adv_estimator(algorithm.adv_estimator)
    except ValueError:
        estimator = Estimator(algorithm.adv_estimator, algorithm.adv_estimator)
    corrects = correction.rollout_rs is not None or correction.rollout_is not in (None, "none")
    low = "clip_ratio" if actor.clip_ratio_low is None else "clip_ratio_low"
    return {
        "{actor.policy_loss.kwargs}: no built-in loss reads it; leave it out, or name a loss of your own": (
            options.kwargs and loss.built_in
        ),
        "{actor.policy_loss.loss_mode} needs actor.policy_loss.dro_beta, a number above 0, such as 0.05": (
            "dro_beta" in loss.reads and options.dro_beta is None
        ),
        "{actor.policy_loss.loss_mode} needs algorithm.adv_estimator=online_dpo, which marks the best and the worst "
        "response of each group; {algorithm.adv_estimator} does not (algorithm=online_dpo sets both)": (
            pairs and estimator.built_in and not estimator.marks_pairs
        ),
        "{algorithm.adv_estimator} marks pairs, and {actor.policy_loss.loss_mode} is not a loss of pairs; set it to "
        "online_dpo (algorithm=online_dpo sets both)": estimator.marks_pairs and not pairs,
        "{actor.policy_loss.loss_mode} is a mean over pairs of sums over tokens, and {actor.loss_agg_mode} would weigh "
        "pairs by their length; set it to seq-mean-token-sum": pairs and actor.loss_agg_mode != "seq-mean-token-sum",
        "algorithm.rollout_correction with {actor.policy_loss.loss_mode}: it would weigh or reject one response of a "
        "pair without the other; set rollout_is=null and rollout_rs=null": pairs and corrects,
        f"{{actor.{low}}} must be at most 1 with {{actor.policy_loss.loss_mode}}: the lower bound would be 1 - "
        f"{actor.clip_low:g} = {1 - actor.clip_low:g}; 1 leaves the ratio without a lower bound": (
            actor.clip_low > 1 and loss.clips
        ),
    }


def _reference(config: Config) -> dict[str, object]:
    reference, offload = config.scoring.reference, "{scoring.reference.offload}"
    offloads = reference.offload and reads_reference(config)
    return {
        "{scoring.reference.placement} with {algorithm.use_kl_in_reward}: a KL in the reward is needed before rows "
        "reach the train workers; set it to replicas, or use actor.use_kl_loss=true instead": (
            reference.placement == TRAIN_WORKERS and config.algorithm.use_kl_in_reward
        ),
        f"{offload} is for a reference sharded over the train workers, but replicas hold it whole; set "
        "scoring.reference.placement=train_workers too, or leave it out": offloads and uses_reference(config),
        f"{offload} with {{model.lora.rank}}: the reference is the policy without its adapters, whose weights "
        "actor.fsdp.offload=all moves; leave it out": offloads and reference_is_base(config),
        f"{offload} moves weights from a GPU to host memory, but {{trainer.use_gpu}}; leave it out": (
            offloads and not config.trainer.use_gpu
        ),
    }


def _correction(config: Config) -> dict[str, object]:
    settings = rollout_correction(config)
    correction = parse(settings)
    bypass = config.actor.old_log_probs == "engine" and settings.rollout_is != "none"
    prefix, high = "algorithm.rollout_correction", correction.high
    weighs = correction.level is not None
    table: dict[str, object] = {
        f"{prefix}.rollout_is={settings.rollout_is} with {{actor.old_log_probs}} and {{actor.policy_loss.loss_mode}}: "
        "the loss's own ratio, current policy / engine's, is that weight already, which would count twice; set "
        "rollout_is=none, actor.old_log_probs=recompute, or a loss without a ratio (loss_mode=reinforce)": (
            bypass and policy_loss(config).ratio not in ("none", None)
        ),
        f"{{{prefix}.rollout_is_batch_normalize}} with {{actor.old_log_probs}}: the mean of the weights is not known "
        "before the forward pass that gives them; set one of them to its default": (
            bypass and settings.rollout_is_batch_normalize
        ),
        f"{prefix}.rollout_is_threshold={high:g} would cap the weight of every token, even if the policies agree and "
        "it is 1; give 1 or more, or two bounds (in YAML they need quotes: 0.5_2 is the number 0.52 there)": (
            weighs and correction.low is None and high < 1
        ),
    }
    bounds = [(f"rollout_rs_threshold of {r.name}", r.low, r.high) for r in correction.rules if r.kind == "k1"]
    if weighs and correction.low is not None:
        bounds.append(("rollout_is_threshold", correction.low, high))
    for name, low, most in bounds:
        sentence = f"{prefix}.{name} keeps ratios from {low:g} to {most:g}, without 1, the ratio of equal policies"
        table[f"{sentence}; put the lower bound below 1 and the upper one above"] = not low <= 1 <= most
    return table
