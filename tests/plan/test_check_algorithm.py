"""Algorithms that cannot be are refused with their keys, and nothing else is."""

import pytest

from pipeline.catalogue import ESTIMATORS
from pipeline.config import CONFIG_DIR, load_config
from pipeline.plan.checks import check
from pipeline.plan.placement import check_resources
from pipeline.plan.plan import plan
from tests.plan.test_checks import good, refusal

IS = "algorithm.rollout_correction.rollout_is"
RS = "algorithm.rollout_correction.rollout_rs"
GAE = "algorithm.adv_estimator=gae"
GDPO = "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys"
BYPASS = "actor.old_log_probs=engine"
LOSS = "actor.policy_loss.loss_mode"
KL = "algorithm.use_kl_in_reward=true"
OFFLOADED = "actor.use_kl_loss=true trainer.use_gpu=true scoring.reference.offload=true"
SUMS = "actor.loss_agg_mode=seq-mean-token-sum"
PAIRS = f"{LOSS}=online_dpo {SUMS} algorithm.adv_estimator=online_dpo"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("rollout.n=1", "set rollout.n to 2 or more"),
        ("algorithm.adv_estimator=grpoo", "'grpoo' is unknown. Did you mean 'grpo'?"),
        ("algorithm.adv_estimator=nowhere:f", "module 'nowhere' cannot be imported"),
        ("algorithm.adv_estimator=os:getcwd", "called with data and config"),
        ("algorithm.adv_estimator=pipeline.losses.ppo:vanilla", "registered as another kind of function"),
        ("algorithm.adv_estimator_kwargs.limit=3", "no built-in estimator reads it"),
        ("algorithm.turn_gamma=0.9", "algorithm.turn_gamma=0.9 discounts from turn to turn, and rows have one"),
        (f"{GAE} critic.enable=false", "reads values and critic.enable=false"),
        ("critic.warmup=5", "critic.warmup=5 trains a critic first"),
        (f"{GAE} critic.ppo_mini_batch_size=48", "critic.ppo_mini_batch_size=48 does not divide"),
        (f"{GAE} critic.ppo_mini_batch_size=16 trainer.num_workers=2", "trainer.num_workers = 16 x 2"),
        (f"{GAE} critic.ppo_max_token_len_per_gpu=1000", "1024 tokens, more than critic.ppo_max_token_len_per_gpu"),
        (
            "actor.parallel.sequence=2 trainer.num_workers=2 actor.ppo_max_token_len_per_gpu=511",
            "more than actor.ppo_max_token_len_per_gpu=511 x actor.parallel.sequence=2; raise it or shorten rows",
        ),
        (f"{GAE} critic.path=./nowhere", "critic.path=./nowhere: there is no folder"),
        (f"{GAE} critic.optim.betas=[1,0.9]", "critic.optim.betas=[1.0, 0.9] must be at least 0 and below 1"),
        (f"{GDPO}=[]", "needs algorithm.gdpo_reward_keys"),
        (f"{GDPO}=[acc,format] algorithm.gdpo_reward_weights=[1]", "gdpo_reward_weights=[1.0] must have one weight"),
        (f"{GDPO}=[acc] algorithm.gdpo_reward_weights=[inf]", "must be finite numbers"),
        (f"{GDPO}=[acc] algorithm.gdpo_reward_weights=[0]", "not all of them 0"),
        (f"{GDPO}=[acc,acc]", "names a part twice"),
        (f"{GDPO}=[acc] {KL}", "not its sum"),
        (f"{LOSS}=vanila", "'vanila' is unknown. Did you mean 'vanilla'?"),
        (f"{LOSS}=nowhere:f", "module 'nowhere' cannot be imported"),
        (f"{LOSS}=os:getcwd", "called with data and config"),
        (f"{LOSS}=pipeline.advantage.outcome:rloo", "registered as another kind of function"),
        (f"{LOSS}=dro", "needs actor.policy_loss.dro_beta"),
        (f"{LOSS}=pipeline.losses.smooth:dro", "needs actor.policy_loss.dro_beta"),
        (f"{LOSS}=online_dpo {SUMS}", "needs algorithm.adv_estimator=online_dpo"),
        ("algorithm.adv_estimator=online_dpo", "loss_mode=vanilla is no loss of pairs"),
        (f"{PAIRS} actor.loss_agg_mode=token-mean", "loss_agg_mode=token-mean would weigh pairs by their"),
        (f"{PAIRS} {IS}=token", "would weigh or reject one response of a pair alone"),
        ("actor.policy_loss.kwargs.width=0.3", "no built-in loss reads it"),
        ("actor.policy_loss.clip_cov_lb=5", "clip_cov_lb=5 must be below actor.policy_loss.clip_cov_ub=5"),
        ("actor.clip_ratio=1.5", "actor.clip_ratio=1.5 must be at most 1 with actor.policy_loss.loss_mode=vanilla"),
        ("actor.clip_ratio_low=1.2", "1 - 1.2 = -0.2"),
        ("actor.clip_ratio_low=0", "actor.clip_ratio_low=0 must be above 0"),
        ("actor.clip_ratio_c=1.0", "actor.clip_ratio_c=1 must be above 1"),
        ("actor.kl_loss_type=full", "actor.kl_loss_type=full must be one of"),
        (f"{BYPASS} rollout.top_p=0.9", "with rollout.top_p=0.9 and rollout.top_k=-1: the engine's log-probs"),
        (f"{BYPASS} rollout.top_k=50", "renormalised"),
        (f"{BYPASS} rollout.min_tokens=4", "with rollout.min_tokens=4: the engine's log-probs"),
        (f"{KL} rollout.top_p=0.9", "even equal policies would have a KL"),
        (f"{KL} rollout.min_tokens=4", "even equal policies would have a KL"),
        ("algorithm.adv_estimator=optimal_token_baseline rollout.top_k=20", "over the whole vocabulary"),
        ("algorithm.kl_ctrl.type=adaptive", "algorithm.use_kl_in_reward=false; set that to true"),
        (f"algorithm.kl_ctrl.type=adaptive {KL} algorithm.kl_ctrl.kl_coef=0", "0 stays 0"),
        ("actor.use_kl_loss=true scoring.reference.max_token_len=1000", "scoring.reference.max_token_len=1000"),
        ("actor.use_kl_loss=true scoring.reference.path=./nowhere", "scoring.reference.path=./nowhere"),
        ("scoring.reference.num_gpus=2", "scoring.reference.num_gpus=2 must be"),
        (
            "scoring.reference.where=train_workers algorithm.use_kl_in_reward=true actor.use_kl_loss=true",
            "where=train_workers with algorithm.use_kl_in_reward=true: a KL in the reward is needed before rows reach",
        ),
        (OFFLOADED, "set scoring.reference.where=train_workers too"),
        (f"{OFFLOADED} scoring.reference.where=replicas", "replicas hold it whole"),
        (f"{OFFLOADED} model.lora.rank=4", "with model.lora.rank=4: the reference is the policy without its adapters"),
        (
            "actor.use_kl_loss=true scoring.reference.where=train_workers scoring.reference.offload=true",
            "scoring.reference.offload=true leaves weights in host memory beside a GPU, and trainer.use_gpu=false",
        ),
        (f"{IS}=row", f"{IS}=row is not known"),
        (f"{IS}=token {IS}_threshold=2.0_0.5", "'2.0_0.5' are upside down"),
        (f"{IS}=token {IS}_threshold='0.52'", "rollout_is_threshold=0.52 would cap the weight of every token"),
        (f"{IS}=token {IS}_threshold='2.0_5.0'", "rollout_is_threshold keeps ratios from 2 to 5, without 1"),
        (f"{RS}=token_k1", f"{RS}_threshold=null gives 0 bounds"),
        (f"{RS}=token_k1 {RS}_threshold='0.1_0.9'", "rollout_rs_threshold of token_k1 keeps ratios from 0.1 to 0.9"),
        (f"{IS}_batch_normalize=true", "has no weights to normalise"),
        (f"{BYPASS} {IS}=token", "which would count twice"),
        (f"{BYPASS} {IS}=token {LOSS}=pipeline.losses.ppo:vanilla", "which would count twice"),
        (f"{BYPASS} {IS}=token {LOSS}=reinforce {IS}_batch_normalize=true", "is not known before the forward pass"),
        ("trainer.stream_gradients=true data.train_batch_size=16", "an iteration has 1 chunk for each of"),
    ],
)
def test_refused_algorithms(overrides, words):
    sentence = refusal(*overrides.split())
    assert words in sentence and "\n" not in sentence


@pytest.mark.parametrize(
    ("key", "name"), [("algorithm.adv_estimator", "median_b"), ("actor.policy_loss.loss_mode", "soft_c")]
)
def test_names_that_only_this_process_knows(key, name, tmp_path, monkeypatch):
    """Importing a module for one function registers the other here, and nowhere else."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"own_{name}.py").write_text(
        "from pipeline.advantage.estimators import register_adv_est\n"
        "from pipeline.losses import register_policy_loss\n"
        f"@{'register_adv_est' if name == 'median_b' else 'register_policy_loss'}({name!r})\n"
        "def function(data, config):\n    raise NotImplementedError\n"
    )
    check(good(f"{key}=own_{name}:{name}"))  # by the registered name
    check(good(f"{key}=own_{name}:function"))
    assert f"import: own_{name}:{name}" in refusal(f"{key}={name}")


NEED_NO_GROUP = ["gae", "reinforce_plus_plus", "remax"]
BUILT_IN = [name for name, estimator in ESTIMATORS.items() if estimator.built_in]


@pytest.mark.parametrize(
    "name", [*(name for name in BUILT_IN if name not in NEED_NO_GROUP), "pipeline.advantage.outcome:rloo"]
)
def test_estimators_that_compare_within_a_group_need_one(name):
    sentence = refusal(f"algorithm.adv_estimator={name}", "rollout.n=1", "algorithm.gdpo_reward_keys=[acc]")
    assert "set rollout.n to 2 or more" in sentence


@pytest.mark.parametrize("name", NEED_NO_GROUP)
def test_other_estimators_take_a_single_response(name):
    check(good(f"algorithm.adv_estimator={name}", "rollout.n=1"))


@pytest.mark.parametrize(
    "overrides",
    [
        # Keys that do nothing in a setting are no mistake, as long as nothing else depends on them.
        "algorithm.lam=0.5 critic.ppo_mini_batch_size=48 scoring.value.max_token_len=10",
        "critic.enable=true",
        BYPASS,
        f"{LOSS}=gspo actor.clip_ratio_low=3e-4 actor.clip_ratio_high=4e-4",
        f"{LOSS}=geo_mean actor.clip_ratio_low=1.5",
        f"{LOSS}=cispo actor.clip_ratio_low=1",
        f"{LOSS}=dro actor.policy_loss.dro_beta=0.05",
        f"actor.kl_loss_type=low_var_kl+ actor.use_kl_loss=true {KL}",
        f"algorithm.kl_ctrl.type=adaptive {KL}",
        f"{BYPASS} {IS}=sequence {LOSS}=reinforce",
        f"{BYPASS} {RS}=seq_mean_k1 {RS}_threshold='0.5_2.0'",
        f"{IS}=token {IS}_batch_normalize=true",
    ],
)
def test_not_refused(overrides):
    check(good(*overrides.split()))


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("algorithm/*.yaml")), ids=lambda path: path.stem)
def test_every_algorithm_runs_the_demo(path, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    config = load_config([f"algorithm={path.stem}", "experiment=countdown_cpu", f"model.path={tmp_path}"])
    check_resources(plan(config).stages, config.trainer.ray_num_cpus)
