"""What a run does at the same time: generation ahead of training, and training ahead of the end of an iteration.

Two ways, which do not exclude each other:

- **ahead** (`algorithm.max_staleness`): engines generate later iterations while one is trained on. Rows are then older
  than the policy that trains on them, and weights correct for it.
- **streamed gradients** (`trainer.stream_gradients`): the trainer accumulates gradients over the first chunks of an
  iteration while the rest are generated. Nothing becomes older by it.
"""

import math
from collections.abc import Iterator

from pipeline.config import Config
from pipeline.derived import (
    rollout_correction,
    uses_critic,
    uses_policy_scores,
    weighs_itself,
    why_not_streamed,
)


def lines(config: Config) -> Iterator[str]:
    """The plan's words on it."""
    staleness = config.algorithm.max_staleness
    if staleness:
        iterations = f"{staleness} iteration{'s' * (staleness > 1)}"
        yield f"engines generate up to {iterations} ahead of training (algorithm.max_staleness={staleness})"
        yield _correction(config)
    else:
        yield "strictly on-policy (algorithm.max_staleness=0): engines wait for every update"
    if config.trainer.stream_gradients is False:
        yield "training begins when an iteration is complete (trainer.stream_gradients=false)"
    elif reason := why_not_streamed(config):
        yield f"training begins when an iteration is complete: {reason}"
    else:
        yield "training begins with the first chunks of an iteration (trainer.stream_gradients)"


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
    corrects = settings.rollout_is != "none" or settings.rollout_rs is not None or weighs_itself(config)
    named = f"algorithm.max_staleness={staleness}"
    if not staleness:
        return
    if not corrects:
        yield (
            f"{named} without a correction: rows train as if the current policy had generated them; "
            "algorithm.rollout_correction.rollout_is=null weighs them (truncated importance sampling)"
        )
    if staleness > 1 and actor.old_log_probs == "engine" and weighs_itself(config):
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
