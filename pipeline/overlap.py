"""What a run does at the same time: generation ahead of training, and training ahead of the end of an iteration.

Two ways, which do not exclude each other:

- **ahead** (`algorithm.max_staleness`): engines generate later iterations while one is trained on. Rows are then older
  than the policy that trains on them, and weights correct for it.
- **early** (`trainer.early`): the trainer accumulates gradients over the first chunks of an iteration while the rest
  are generated. Nothing becomes older by it.

Here stands what the settings that leave it open amount to; no torch is imported.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from pipeline.advantage.config import RolloutCorrectionConfig
from pipeline.advantage.estimators import get_adv_estimator
from pipeline.config import Config
from pipeline.stages import uses_critic, uses_engines, uses_policy_scores

WITHOUT_RATIO = ("gpg", "reinforce", "dro")
"""Built-in losses that do not weigh tokens by a probability ratio."""

SELECTING = ("clip_cov", "kl_cov")
"""Built-in losses that compare a token with all others of its mini-batch."""


def ahead(config: Config) -> int:
    """Versions that admission lets engines be ahead: one fewer than rows may be old where groups are carried over."""
    rollout = config.rollout
    carries = rollout.oversample > 0 and rollout.oversample_policy == "carry" and uses_engines(config)
    return config.algorithm.max_staleness - carries


def first_come(config: Config) -> bool:
    """Whether a chunk gives the groups of its engine that are complete first, not those of its own prompts."""
    if config.stream.order != "auto":
        return config.stream.order == "first_come" and uses_engines(config)
    return ahead(config) > 0 and uses_engines(config) and chosen_otherwise(config) is None


def chosen_otherwise(config: Config) -> str | None:
    """The setting, other than `stream.order`, that decides which groups an iteration has; None without one."""
    if config.rollout.oversample:
        return f"rollout.oversample={config.rollout.oversample:g}"
    return "algorithm.filter_groups.enable=true" if config.algorithm.filter_groups.enable else None


def rollout_correction(config: Config) -> RolloutCorrectionConfig:
    """The off-policy correction in force: with `rollout_is` as one of `token`, `sequence` and `none`."""
    settings = config.algorithm.rollout_correction
    if settings.rollout_is is not None:
        return settings
    none = config.algorithm.max_staleness == 0 or _weighs_itself(config)
    return replace(settings, rollout_is="none" if none else "token")


def trains_early(config: Config) -> bool:
    """Whether the first chunks of an iteration train while the others are still generated."""
    return config.trainer.early is not False and why_not_early(config) is None


def why_not_early(config: Config) -> str | None:
    """What keeps training from beginning before an iteration is complete; None where it can."""
    prompts = config.rollout.chunk_prompts * config.trainer.num_workers
    chunks = config.data.train_batch_size // max(1, prompts)
    estimator = config.algorithm.adv_estimator
    if get_adv_estimator(estimator).scope == "batch":
        return f"algorithm.adv_estimator={estimator} needs the rewards of the whole iteration for every advantage"
    if _selects(config):
        return (
            f"actor.policy_loss.loss_mode={config.actor.policy_loss.loss_mode} compares every token with all others of "
            "its mini-batch"
        )
    if config.algorithm.rollout_correction.rollout_is_batch_normalize:
        return (
            "algorithm.rollout_correction.rollout_is_batch_normalize=true divides every weight by the mean over the "
            "iteration"
        )
    if config.rollout.sleep:
        return "rollout.sleep=true has engines and train workers share GPUs, which compute in turn"
    if chunks < 2:
        return (
            f"an iteration has {chunks} chunk for each of trainer.num_workers={config.trainer.num_workers}; a smaller "
            "rollout.chunk_prompts gives more"
        )
    return None


def _selects(config: Config) -> bool:
    mode = config.actor.policy_loss.loss_mode
    if ":" not in mode:
        return mode in SELECTING
    # A function of the user's own: torch is loaded for these alone.
    from pipeline.train.losses import get_policy_loss

    try:
        return get_policy_loss(mode).select is not None
    except ValueError:
        # It leads nowhere, which `check_algorithm` says.
        return False


def lines(config: Config) -> Iterator[str]:
    """The plan's words on it."""
    staleness, most = config.algorithm.max_staleness, ahead(config)
    if most:
        iterations = f"{most} iteration{'s' * (most > 1)}"
        yield f"engines generate up to {iterations} ahead of training (algorithm.max_staleness={staleness})"
    elif staleness:
        yield "engines begin an iteration when the one before is trained, and carry groups over into it"
    if first_come(config):
        yield "chunks give the groups of their engine that are complete first (stream.order)"
    if staleness:
        yield _correction(config)
    else:
        yield "strictly on-policy (algorithm.max_staleness=0): engines wait for every update"
    if config.trainer.early is False:
        yield "training begins when an iteration is complete (trainer.early=false)"
    elif reason := why_not_early(config):
        yield f"training begins when an iteration is complete: {reason}"
    else:
        yield "training begins with the first chunks of an iteration (trainer.early)"


def _correction(config: Config) -> str:
    settings = rollout_correction(config)
    bypass = config.actor.old_log_probs == "engine"
    loss = "ratio to the engine's policy (bypass)" if bypass else "ratio to the recomputed old policy (decoupled)"
    own = " by default" if config.algorithm.rollout_correction.rollout_is is None else ""
    weights = "no weights" if settings.rollout_is == "none" else f"{settings.rollout_is} weights"
    capped = "" if settings.rollout_is == "none" else f" held by {settings.rollout_is_threshold}"
    return f"off-policy correction: {weights}{own}{capped}, {loss}"


def notes(config: Config) -> Iterator[str]:
    """What is allowed with rows that are older than the policy they train, and probably not meant."""
    algorithm, actor, rollout = config.algorithm, config.actor, config.rollout
    staleness = algorithm.max_staleness
    settings = rollout_correction(config)
    corrects = settings.rollout_is != "none" or settings.rollout_rs is not None or _weighs_itself(config)
    named = f"algorithm.max_staleness={staleness}"
    if algorithm.on_stale == "correct" and not corrects:
        yield "algorithm.on_stale=correct: nothing corrects, so rows past the bound train as if they were new"
    if not staleness:
        return
    if not corrects:
        yield (
            f"{named} without a correction: rows train as if the current policy had generated them; "
            "algorithm.rollout_correction.rollout_is=null weighs them (truncated importance sampling)"
        )
    if staleness > 1 and actor.old_log_probs == "engine" and _weighs_itself(config):
        yield (
            f"actor.old_log_probs=engine with {named}: the clip range lies around a policy up to {staleness} versions "
            "old, and holds the new one near it; recompute clips around the newest (decoupled loss)"
        )
    if settings.rollout_is != "none" and (rollout.top_p < 1 or rollout.top_k > 0):
        yield (
            f"rollout.top_p={rollout.top_p:g} and rollout.top_k={rollout.top_k} with {named}: the engine's log-probs "
            "are renormalised over the tokens it keeps, the trainer's are not, so weights are below 1 also where the "
            "policies agree"
        )
    if uses_critic(config):
        yield (
            f"{named}: the critic's values are of a version up to {staleness} older than the critic that trains on "
            "them (training/value_staleness); lower critic.optim.lr if its loss swings"
        )
    if uses_policy_scores(config):
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} with {named}: it weighs the engine's probabilities "
            f"against sums of a policy up to {staleness} versions newer (training/pi_staleness)"
        )
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive":
        rows = config.data.train_batch_size * rollout.n
        most = largest_gain(staleness)
        if rows >= most * algorithm.kl_ctrl.horizon:
            yield (
                f"algorithm.kl_ctrl.horizon={algorithm.kl_ctrl.horizon} with {rows} rows an iteration and {named}: a "
                f"new coefficient takes effect {staleness + 1} iterations later, so the KL may swing; set the horizon "
                f"to {round(2 * rows / most)} or more"
            )


def largest_gain(delay: int) -> float:
    """The gain K at which x[k + 1] = x[k] - K x[k - delay] swings for ever; below it x dies away."""
    return 2 * math.sin(math.pi / (4 * delay + 2))


def _weighs_itself(config: Config) -> bool:
    """Whether the loss's own ratio is that of the current policy to the engine's."""
    return config.actor.old_log_probs == "engine" and config.actor.policy_loss.loss_mode not in WITHOUT_RATIO
