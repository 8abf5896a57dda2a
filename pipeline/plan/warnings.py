"""Warn about settings that are allowed but probably a mistake. `--dry-run` and the start of a run show the warnings."""

import math
from collections.abc import Iterator

from pipeline.catalogue import get_adv_estimator
from pipeline.config import Config
from pipeline.config.bounds import sentences
from pipeline.derived import (
    policy_loss,
    reads_reference,
    replicas,
    rollout_correction,
    scorer_key,
    uses_agent,
    uses_critic,
    uses_engines,
    uses_pairs,
    uses_policy_scores,
    weighs_itself,
)
from pipeline.plan.gpus import PER_NODE
from pipeline.plan.host import SLOW_PRODUCTS, slow_products
from pipeline.plan.memory import Memory, shown
from pipeline.plan.pipelining import bubbles
from pipeline.plan.without_effect import idle, unread
from pipeline.replay import checks as replay


def notes(
    config: Config, chunks: int, memory: Memory | None, episodes: int = 0, iterations: int | None = None
) -> Iterator[str]:
    """Yield one sentence per warning for a config that can be run.

    Args:
        config: settings of the run.
        chunks: number of chunks per iteration.
        memory: memory of the run; None if the size of the model is unknown.
        episodes: maximum number of episodes that one engine runs at the same time.
        iterations: number of iterations of the run; None if unknown.
    """
    yield from replay.notes(config)
    if uses_engines(config):
        yield from sentences(config, _pools(config, chunks, memory))
    most = max(agent.max_episodes for agent in config.agent.declared().values())
    if episodes > most:
        yield (
            f"one engine gets up to {episodes:,} episodes at a time and runs {most:,} of them (agent.max_episodes), "
            "each in a process; the others wait; with a lower rollout.chunks_in_flight, other engines would get them"
        )
    yield from sentences(config, _processor(config))
    yield from sentences(config, _algorithm(config))
    yield from sentences(config, _groups(config))
    yield from bubbles(config)
    if config.algorithm.max_staleness:
        yield from sentences(config, _stale(config))
    yield from sentences(config, idle(config, iterations))
    if found := list(unread(config)):
        yield f"set, but not read in this run: {', '.join(found)}"


def _processor(config: Config) -> dict[str, object]:
    learners = {"actor": config.actor.fsdp} | ({"critic": config.critic.fsdp} if uses_critic(config) else {})
    return {
        f"{{model.dtype}} and {{{name}.fsdp.param_dtype}}: {SLOW_PRODUCTS}{name}.fsdp.param_dtype=float32": (
            slow_products(config.model.dtype, fsdp, config.trainer.use_gpu)
        )
        for name, fsdp in learners.items()
    }


def _pools(config: Config, chunks: int, memory: Memory | None) -> dict[str, object]:
    rollout, idle = config.rollout, config.rollout.num_engines - chunks
    cached = memory.engine_kv_needed if memory else 0
    computed = config.actor.fsdp.compute_dtype(config.model.dtype, config.trainer.use_gpu)
    table: dict[str, object] = {
        f"an iteration has {chunks} chunks for {{rollout.num_engines}}: {idle} engines stay idle; a smaller "
        "rollout.chunk_prompts spreads the work": idle > 0,
        f"{chunks} chunks do not divide evenly among {{rollout.num_engines}}; some engines have one chunk more to do": (
            rollout.chunks_in_flight == 0 and chunks % rollout.num_engines
        ),
        "{rollout.weight_update} with {algorithm.max_staleness}: no response runs while weights change, so it has no "
        "effect; raise max_staleness": rollout.weight_update == "in_flight" and config.algorithm.max_staleness == 0,
        f"{{rollout.cpu_kvcache_space_gb}} holds fewer than {{rollout.max_num_seqs}} sequences of full length "
        f"({shown(cached)} needed); the engine queues the rest": (
            rollout.num_gpus == 0 and cached > rollout.cpu_kvcache_space_gb << 30
        ),
        "{rollout.dtype} with {rollout.num_gpus} and a trainer in float32: their log-probs then differ by about 0.03 "
        "nats on average; rollout.dtype=float32 reduces this to 1e-5": (
            rollout.num_gpus == 0 and rollout.dtype == "bfloat16" and computed == "float32"
        ),
        "{data.sampler} may leave out prompts, so that {trainer.total_epochs} can end sooner": (
            config.data.sampler not in ("uniform", "weighted") and config.trainer.total_training_steps is None
        ),
    }
    for name, pool in replicas(config).items():
        sentence = (
            f"{scorer_key(name)}.num_gpus=0: engines run on GPUs and the {name} replicas on {pool.num_cpus:g} CPUs"
        )
        table[f"{sentence} each, which the run will wait for"] = rollout.num_gpus > 0 and pool.num_gpus == 0
    return table


def _groups(config: Config) -> dict[str, object]:
    """Return sentences on parallel ranks that communicate in each layer, with true values if they apply."""
    parallel, workers = config.actor.parallel, config.trainer.num_workers
    ranks = parallel.tensor * parallel.sequence
    return {
        f"{{actor.parallel.tensor}} and {{actor.parallel.sequence}}: groups of {ranks} neighbouring ranks exchange in "
        f"each layer, and on nodes of {PER_NODE} GPUs some lie on two nodes, whose link is slow; choose a divisor of "
        f"{PER_NODE}": config.trainer.use_gpu and workers > PER_NODE and PER_NODE % ranks
    }


def _algorithm(config: Config) -> dict[str, object]:
    algorithm, actor = config.algorithm, config.actor
    estimator, loss = get_adv_estimator(algorithm.adv_estimator), policy_loss(config)
    kl_loss, kl_in_reward, kl_type = actor.use_kl_loss, algorithm.use_kl_in_reward, actor.kl_loss_type
    # Estimators that read the parts of the reward ignore the KL in the reward.
    divides = "norm_adv_by_std_in_grpo" in estimator.reads and "parts" not in estimator.needs
    by_spread = divides and algorithm.norm_adv_by_std_in_grpo
    return {
        f"{{critic.enable}} trains a critic that algorithm.adv_estimator={estimator.name} does not read; it learns the "
        "estimator's returns": uses_critic(config) and "values" not in estimator.needs,
        f"{{actor.kl_loss_type}} has a gradient that is 0 on average; {kl_type}+ has the same value and the gradient "
        "of the KL": kl_loss and kl_type in ("kl", "k1") and not actor.kl_loss_ratio,
        f"algorithm.adv_estimator={estimator.name} divides by the group's standard deviation: if all scores of a group "
        "are equal, a small KL in the reward decides alone; use actor.use_kl_loss=true instead": (
            kl_in_reward and by_spread
        ),
        "the KL to the reference is in the reward and in the loss, so it counts twice": kl_loss and kl_in_reward,
        "the reference is model.path without {model.lora.path}, from which training starts; to compare with the start, "
        "merge the adapter (jobs.export) and name that model in scoring.reference.path": (
            bool(config.model.lora.path) and config.scoring.reference.path is None and reads_reference(config)
        ),
        "{actor.kl_loss_coef}: the KL of actor.use_kl_loss=true is measured but does not train": (
            kl_loss and actor.kl_loss_coef == 0
        ),
        "{algorithm.kl_ctrl.kl_coef}: the KL of algorithm.use_kl_in_reward=true is measured but not subtracted": (
            kl_in_reward and algorithm.kl_ctrl.kl_coef == 0
        ),
        f"{{actor.policy_loss.loss_mode}} clips the ratio of the response, which seldom leaves 1 - {actor.clip_low:g} "
        f"to 1 + {actor.clip_high:g}; GSPO's paper has 3e-4 and 4e-4 (algorithm=gspo)": (
            loss.ratio == "sequence" and loss.clips and max(actor.clip_low, actor.clip_high) > 0.01
        ),
        "{algorithm.adv_estimator} compares tokens at the same position, but replies of different lengths shift "
        "answers; tir_optimal_token_baseline counts positions in answers only": (
            uses_agent(config) and estimator.compares == "places"
        ),
        "{algorithm.adv_estimator} compares turns, but rows have one turn: it equals grpo here": (
            estimator.compares == "turns" and not uses_agent(config)
        ),
        "{actor.clip_ratio_c} truncates the weights of {actor.policy_loss.loss_mode}; DPPO's paper hardly does "
        "(algorithm=dppo)": loss.truncates and actor.clip_ratio_c < 10,
    }


def _stale(config: Config) -> dict[str, object]:
    """Return sentences on training with rows of older policy versions, with true values if they apply."""
    algorithm, rollout, staleness = config.algorithm, config.rollout, config.algorithm.max_staleness
    settings, own_ratio = rollout_correction(config), weighs_itself(config)
    corrects = settings.rollout_is != "none" or settings.rollout_rs is not None or own_ratio
    rows = config.data.train_batch_size * rollout.n
    gain = largest_gain(staleness)
    return {
        "{algorithm.max_staleness} without a correction: rows train as if the current policy had generated them; "
        "algorithm.rollout_correction.rollout_is=null weighs them (truncated importance sampling)": (
            not corrects and not uses_pairs(config)
        ),
        f"{{actor.old_log_probs}} with {{algorithm.max_staleness}}: the clip range lies around a policy up to "
        f"{staleness} versions old, and holds the new one near it; recompute clips around the newest": (
            staleness > 1 and config.actor.old_log_probs == "engine" and own_ratio
        ),
        f"{{algorithm.max_staleness}}: the critic's values are of a version up to {staleness} older than the critic "
        "that trains on them (training/value_staleness); lower critic.optim.lr if its loss swings": uses_critic(config),
        f"{{algorithm.adv_estimator}} with {{algorithm.max_staleness}}: it weighs the engine's probabilities against "
        f"sums of a policy up to {staleness} versions newer (training/pi_staleness)": uses_policy_scores(config),
        f"{{algorithm.kl_ctrl.horizon}} with {rows} rows an iteration and {{algorithm.max_staleness}}: a new "
        f"coefficient takes effect {staleness + 1} iterations later, so the KL may swing; set the horizon to "
        f"{round(2 * rows / gain)} or more": (
            algorithm.use_kl_in_reward
            and algorithm.kl_ctrl.type == "adaptive"
            and rows >= gain * algorithm.kl_ctrl.horizon
        ),
    }


def largest_gain(delay: int) -> float:
    """Return the gain K at which x[k + 1] = x[k] - K x[k - delay] oscillates forever. With smaller gains x decays."""
    return 2 * math.sin(math.pi / (4 * delay + 2))
