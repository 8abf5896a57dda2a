"""Derive facts from the settings: which optional stages and models a run has, and the values that null stands for.

An optional stage exists if its output is read: the advantage estimator declares its inputs (`needs`), and settings
switch on the KL and the critic. Stream, train loop, plan and checks all use these functions, so they agree. An unknown
`algorithm.adv_estimator` raises `ValueError`. Importing this module does not load torch.
"""

from dataclasses import asdict, dataclass, replace

from pipeline.catalogue import PolicyLoss, get_adv_estimator, get_policy_loss
from pipeline.config import Config
from pipeline.config.algorithm import RolloutCorrectionConfig
from pipeline.config.bounds import sentences
from pipeline.config.learner import ActorConfig, CriticConfig, FSDPConfig
from pipeline.config.model import LoraConfig, ModelConfig
from pipeline.config.scoring import TRAIN_WORKERS, ScorerConfig
from pipeline.config.teacher import TeacherConfig

MOST_PROMPTS = 16
"""Maximum number of prompts in a chunk if `rollout.chunk_prompts` is null."""


def uses_engines(config: Config) -> bool:
    """Return True if engines generate responses. A replay reads recorded responses instead."""
    return config.data.recorded_run is None


def uses_agent(config: Config) -> bool:
    """Return True if rows are multi-turn episodes."""
    return config.agent.used


def uses_images(config: Config) -> bool:
    """Return True if prompts may have images."""
    return config.model.vision != "none"


def uses_turn_rewards(config: Config) -> bool:
    """Return True if rewards that an environment or a program gives for single turns are part of the score."""
    return any(agent.scored_by != "function" for agent in config.agent.declared().values())


def most_contexts(config: Config) -> int:
    """Return the maximum number of token sequences in a row; 1 without episodes."""
    return max(agent.most_contexts for agent in config.agent.declared().values()) if uses_agent(config) else 1


def uses_critic(config: Config) -> bool:
    """Return True if a critic is trained, and the stage `value` computes its values."""
    return _needs(config, "values") if config.critic.enable is None else config.critic.enable


def reads_reference(config: Config) -> bool:
    """Return True if log-probs of a reference policy are needed: for a KL in the reward or the loss, or a loss of
    pairs."""
    return config.algorithm.use_kl_in_reward or config.actor.use_kl_loss or uses_pairs(config)


def uses_reference(config: Config) -> bool:
    """Return True if the stage `reference` computes log-probs of the reference policy in replicas."""
    return reads_reference(config) and not _in_train_workers(config)


def trains_beside_reference(config: Config) -> bool:
    """Return True if the train workers compute the log-probs of the reference policy."""
    return reads_reference(config) and _in_train_workers(config)


def reference_is_base(config: Config) -> bool:
    """Return True if the train workers use the policy with its adapters switched off as the reference."""
    return trains_beside_reference(config) and _has_base(config)


def shards_reference(config: Config) -> bool:
    """Return True if the train workers hold the reference as a second model, sharded over them."""
    return trains_beside_reference(config) and not _has_base(config)


def _in_train_workers(config: Config) -> bool:
    placement = config.scoring.reference.placement
    if placement is not None:
        return placement == TRAIN_WORKERS
    # A KL in the reward is needed before rows reach the train workers.
    return _has_base(config) and not config.algorithm.use_kl_in_reward


def _has_base(config: Config) -> bool:
    return config.model.lora.rank > 0 and config.scoring.reference.path is None


def reads_teacher(config: Config) -> bool:
    """Return True if the advantages or the loss need a teacher."""
    return config.algorithm.teacher_coef > 0 or uses_distillation(config)


def uses_distillation(config: Config) -> bool:
    """Return True if the loss compares the policy with the teacher's most likely tokens."""
    return config.actor.distill_coef > 0


def teachers(config: Config) -> dict[str, dict[str, TeacherConfig]]:
    """Return the pools of teachers, by the name of their stage: the teachers of each pool by name.

    A pool has one teacher, or the teachers that are adapters on a common base. The stage of a single teacher is
    `teacher`, and the teacher's name is empty; other stages are `teacher.NAME`, after their first teacher. A teacher in
    the train workers is left out.
    """
    pools: dict[str, dict[str, TeacherConfig]] = {}
    if not reads_teacher(config) or shards_teacher(config):
        return pools
    stage_of: dict[object, str] = {}
    for name, one in config.teacher.declared().items():
        stage = f"teacher.{name}" if name else "teacher"
        alike = asdict(replace(one, adapter=None, sources=[], prompt=None, named={}))
        base = str(alike) if one.adapter else stage
        pools.setdefault(stage_of.setdefault(base, stage), {})[name or ""] = one
    return pools


def shards_teacher(config: Config) -> bool:
    """Return True if the train workers hold the teacher, sharded over them."""
    return reads_teacher(config) and not config.teacher.named and config.teacher.placement == TRAIN_WORKERS


def scorer_key(name: str) -> str:
    """Return the section with the settings of the pool of replicas `name` (a key of `scorers`)."""
    stage, _, teacher = name.partition(".")
    return f"teacher.named.{teacher}" if teacher else name if stage == "teacher" else f"scoring.{name}"


def uses_pairs(config: Config) -> bool:
    """Return True if the policy loss compares the best and the worst response of each group."""
    return policy_loss(config).of_pairs


def uses_reward_model(config: Config) -> bool:
    """Return True if a reward model scores responses, in a stage before the reward stage."""
    return config.reward.model.path is not None


def uses_policy_scores(config: Config) -> bool:
    """Return True if the stage `policy` runs a forward pass, to compute sums of squared probabilities per token."""
    return _needs(config, "sum_pi_squared")


def uses_filter(config: Config) -> bool:
    """Return True if groups with equal rewards are removed and replaced (dynamic sampling). Never in a replay."""
    return config.algorithm.filter_groups.enable and uses_engines(config)


def uses_baselines(config: Config) -> bool:
    """Return True if a greedy response to each training prompt is generated and scored, as a baseline of its group."""
    return _needs(config, "baselines")


def reward_parts(config: Config) -> dict[str, list[str]]:
    """Return the names of the parts of the reward that the run needs, by the setting that names them."""
    algorithm = config.algorithm
    return {
        "algorithm.gdpo_reward_keys": algorithm.gdpo_reward_keys if _needs(config, "parts") else [],
        "algorithm.filter_groups.metric": [algorithm.filter_groups.metric] if uses_filter(config) else [],
    }


def scorers(config: Config) -> dict[str, ScorerConfig]:
    """Return the pools of model replicas that the run has, by name, in the order of the stream."""
    pools: dict[str, tuple[bool, ScorerConfig]] = {
        "reward_model": (uses_reward_model(config), config.scoring.reward_model),
        "reference": (uses_reference(config), config.scoring.reference),
        **{name: (True, next(iter(pool.values()))) for name, pool in teachers(config).items()},
        "value": (uses_critic(config), config.scoring.value),
        "policy": (uses_policy_scores(config), config.scoring.policy),
    }
    return {name: pool for name, (used, pool) in pools.items() if used}


def replicas(config: Config) -> dict[str, ScorerConfig]:
    """Return the pools of `scorers` that hold a model: all but teachers on a server."""
    return {name: pool for name, pool in scorers(config).items() if not getattr(pool, "url", None)}


def scoring_model(
    model: ModelConfig, scorer: ScorerConfig, fsdp: FSDPConfig, path: str | None = None, gpu: bool | None = None
) -> ModelConfig:
    """Return the settings of a model for scoring rows: no adapters (weights arrive merged), no gradient checkpointing.

    Args:
        model: the section `model`.
        scorer: settings of the pool; its `dtype` is used, or the trainer's if that is null.
        fsdp: the section `fsdp` of the learner.
        path: another model than `model.path`; None: the same.
        gpu: True if the model is on a GPU; None takes `scorer.num_gpus > 0`.
    """
    return frozen_model(model, scorer.dtype, fsdp, path, scorer.num_gpus > 0 if gpu is None else gpu)


def frozen_model(model: ModelConfig, dtype: str | None, fsdp: FSDPConfig, path: str | None, gpu: bool) -> ModelConfig:
    """Return the settings of a frozen model; arguments are as in `scoring_model`, with `dtype` of the pool."""
    return replace(
        model,
        path=path or model.path,
        dtype=dtype or fsdp.compute_dtype(model.dtype, gpu),
        enable_gradient_checkpointing=False,
        lora=LoraConfig(),
        activation_offload=False,
    )


def _needs(config: Config, what: str) -> bool:
    return what in get_adv_estimator(config.algorithm.adv_estimator).needs


def policy_loss(config: Config) -> PolicyLoss:
    """Return the policy loss with its properties. For an unknown name, which `check_algorithm` reports, they have
    defaults."""
    name = config.actor.policy_loss.loss_mode
    try:
        return get_policy_loss(name)
    except ValueError:
        return PolicyLoss(name, name)


def rollout_correction(config: Config) -> RolloutCorrectionConfig:
    """Return the settings of off-policy correction, with a null `rollout_is` replaced by `token` or `none`."""
    settings = config.algorithm.rollout_correction
    if settings.rollout_is is not None:
        return settings
    none = config.algorithm.max_staleness == 0 or weighs_itself(config) or uses_pairs(config)
    return replace(settings, rollout_is="none" if none else "token")


def chunk_prompts(config: Config) -> int:
    """Return the number of prompts in a chunk, with a null `rollout.chunk_prompts` replaced by a number that fits.

    If no number fits, this is 1.
    """
    rollout, workers = config.rollout, max(1, config.trainer.num_workers)
    return rollout.chunk_prompts or whole_chunk(config, workers, MOST_PROMPTS, rollout.num_engines) or 1


def whole_chunk(config: Config, workers: int, most: int, engines: int = 1) -> int | None:
    """Return the largest number of prompts per chunk with which every worker gets whole chunks of each mini-batch.

    If possible, a worker gets at least two chunks of an iteration. None if the batch cannot be shared evenly.

    Args:
        config: the settings.
        workers: number of train workers.
        most: maximum number of prompts per chunk.
        engines: number of engines; if possible, each gets a chunk.
    """
    batch = config.data.train_batch_size
    minis = [config.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size if uses_critic(config) else None]
    sizes = [batch, *(mini for mini in minis if mini)]
    most = min(most, max(1, batch // max(2 * workers, engines)))
    whole = (count for count in range(most, 0, -1) if not any(size % (count * workers) for size in sizes))
    return next(whole, None)


def streams_gradients(config: Config) -> bool:
    """Return True if gradients of the first chunks of an iteration are computed while others are still generated."""
    return config.trainer.stream_gradients is not False and why_not_streamed(config) is None


def why_not_streamed(config: Config) -> str | None:
    """Return a sentence on the setting that makes training wait for the complete iteration; None if none does."""
    prompts = chunk_prompts(config) * config.trainer.num_workers
    chunks = config.data.train_batch_size // max(1, prompts)
    reasons = {
        "{algorithm.adv_estimator} needs the rewards of the whole iteration for every advantage": (
            get_adv_estimator(config.algorithm.adv_estimator).scope == "batch"
        ),
        "{actor.policy_loss.loss_mode} compares every token with all others of its mini-batch": (
            policy_loss(config).token_mask_fn is not None
        ),
        "{algorithm.rollout_correction.rollout_is_batch_normalize} divides weights by their mean over the iteration": (
            config.algorithm.rollout_correction.rollout_is_batch_normalize
        ),
        "{rollout.sleep} has engines and train workers share GPUs, which compute in turn": config.rollout.sleep,
        f"an iteration has {chunks} chunk for each of {{trainer.num_workers}}; a smaller rollout.chunk_prompts gives "
        "more": chunks < 2,
    }
    return next(sentences(config, reasons), None)


def needs_whole_rows(config: Config, part: ActorConfig | CriticConfig) -> bool:
    """Return True if the loss of a token depends on other tokens of its row, so all sequences of an episode must be in
    one forward pass.

    Args:
        config: the settings.
        part: the section `actor` or `critic`.
    """
    actor = config.actor
    if (part.loss_agg_mode or actor.loss_agg_mode) == "seq-mean-token-mean":
        return True
    if isinstance(part, CriticConfig):
        return False
    correction = rollout_correction(config)
    corrects = correction.rollout_is != "none" or correction.rollout_rs is not None
    return not policy_loss(config).per_token or (corrects and actor.old_log_probs == "engine")


def weighs_itself(config: Config) -> bool:
    """Return True if the ratio in the loss is current policy / engine's policy, which corrects for staleness itself."""
    return config.actor.old_log_probs == "engine" and policy_loss(config).ratio != "none"


@dataclass(frozen=True)
class UpdateShape:
    """Settings of the update of actor or critic, with null values of the critic replaced by the actor's."""

    epochs: int
    """Number of passes over the rows of an iteration."""
    mini_batches: int
    """Number of mini-batches per iteration."""
    max_tokens: int
    """Maximum number of tokens in one forward pass; sequence-parallel ranks share them equally."""
    agg_mode: str
    """Aggregation of token losses, one of `losses.AGG_MODES`."""
    scale_factor: float
    """Divisor for the aggregation `seq-mean-token-sum-norm`."""
    max_nonfinite_steps: int
    """Maximum number of consecutive optimiser steps with a gradient that is not finite."""
    whole_rows: bool
    """True if all sequences of a row must be in one micro-batch."""
    longest: int | None = None
    """Maximum number of tokens in a row of this run; None: the model's own limit."""

    @classmethod
    def of(cls, config: Config, part: ActorConfig | CriticConfig) -> "UpdateShape":
        actor = config.actor
        size = part.ppo_mini_batch_size or actor.ppo_mini_batch_size or config.data.train_batch_size
        return cls(
            epochs=part.ppo_epochs or actor.ppo_epochs,
            mini_batches=config.data.train_batch_size // size,
            max_tokens=(part.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu) * actor.parallel.sequence,
            agg_mode=part.loss_agg_mode or actor.loss_agg_mode,
            scale_factor=actor.loss_scale_factor or float(config.data.max_response_length),
            max_nonfinite_steps=config.trainer.max_nonfinite_steps,
            whole_rows=needs_whole_rows(config, part),
            longest=config.data.longest_row,
        )

    @property
    def steps(self) -> int:
        """Number of optimiser steps per iteration."""
        return self.epochs * self.mini_batches
