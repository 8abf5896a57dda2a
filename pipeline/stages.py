"""Which optional stages and models a run has: those that something reads, and no others.

The advantage estimator says what it reads beyond rewards (`needs`), and keys ask for the KL and the critic. Stream,
train loop, plan and checks ask here, so that they agree. An unknown `algorithm.adv_estimator` is a `ValueError`.
"""

from pipeline.advantage.estimators import get_adv_estimator
from pipeline.config import Config
from pipeline.scoring.config import ScorerConfig


def uses_engines(config: Config) -> bool:
    """Whether engines generate responses; a replay has those of the run that was recorded."""
    return config.data.recorded_run is None


def uses_critic(config: Config) -> bool:
    """Whether a critic is trained, and the stage `value` evaluates it."""
    return _needs(config, "values") if config.critic.enable is None else config.critic.enable


def uses_reference(config: Config) -> bool:
    """Whether the stage `reference` scores rows, for a KL in the reward or in the loss."""
    return config.algorithm.use_kl_in_reward or config.actor.use_kl_loss


def uses_reward_model(config: Config) -> bool:
    """Whether the stage `reward_model` scores responses before the reward stage."""
    return config.reward.model.path is not None


def uses_policy_scores(config: Config) -> bool:
    """Whether the stage `policy` goes over rows once more, for the sum of squared probabilities."""
    return _needs(config, "sum_pi_squared")


def uses_filter(config: Config) -> bool:
    """Whether groups that agree are left out and replaced; a replay has the groups that were trained on."""
    return config.algorithm.filter_groups.enable and uses_engines(config)


def begun_prompts(config: Config) -> int:
    """Training prompts that a chunk begins with; a replay has those that were trained."""
    return config.rollout.begun_prompts if uses_engines(config) else config.rollout.chunk_prompts


def uses_baselines(config: Config) -> bool:
    """Whether a greedy response to each training prompt is generated and scored beside its group."""
    return _needs(config, "baselines")


def reward_parts(config: Config) -> list[str]:
    """Parts of the reward that the estimator reads one by one."""
    return config.algorithm.gdpo_reward_keys if _needs(config, "parts") else []


def scorers(config: Config) -> dict[str, ScorerConfig]:
    """The pools of model replicas that the run has, by name, in the order of the stream."""
    pools = {
        "reward_model": (uses_reward_model(config), config.scoring.reward_model),
        "reference": (uses_reference(config), config.scoring.reference),
        "value": (uses_critic(config), config.scoring.value),
        "policy": (uses_policy_scores(config), config.scoring.policy),
    }
    return {name: pool for name, (used, pool) in pools.items() if used}


def _needs(config: Config, what: str) -> bool:
    return what in get_adv_estimator(config.algorithm.adv_estimator).needs
