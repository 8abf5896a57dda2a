"""Algorithms that cannot be are refused with their keys, and nothing else is."""

from typing import Any

import pytest

from pipeline.advantage import registry as estimators
from pipeline.config import CONFIG_DIR, load_config
from pipeline.plan.check_algorithm import COMPARE_IN_GROUP, NEED_NO_GROUP, POLICY_LOSSES
from pipeline.plan.checks import check
from pipeline.plan.placement import check_resources
from pipeline.plan.plan import plan
from tests.plan.test_checks import good, refusal

CORRECTION = "algorithm.rollout_correction"
GAE = ["algorithm.adv_estimator=gae"]
BYPASS = ["actor.old_log_probs=engine"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.adv_estimator=grpoo"], "'grpoo' is unknown. Did you mean 'grpo'?"),
        (["algorithm.adv_estimator=nowhere:f"], "module 'nowhere' cannot be imported"),
        ([*GAE, "critic.enable=false"], "algorithm.adv_estimator=gae reads values and critic.enable=false"),
        (["critic.warmup=5"], "critic.warmup=5 holds the policy back"),
        ([*GAE, "critic.warmup=-1"], "critic.warmup=-1 must be at least"),
        ([*GAE, "critic.ppo_mini_batch_size=48"], "critic.ppo_mini_batch_size=48 does not divide"),
        (
            [*GAE, "critic.ppo_mini_batch_size=16", "trainer.num_workers=2"],
            "critic.ppo_mini_batch_size=16 must be a multiple of rollout.chunk_prompts x trainer.num_workers = 16 x 2",
        ),
        ([*GAE, "critic.ppo_epochs=0"], "critic.ppo_epochs=0 must be at least 1, or null"),
        (
            [*GAE, "critic.ppo_max_token_len_per_gpu=1000"],
            "512 + 512 = 1024 tokens, more than critic.ppo_max_token_len_per_gpu=1000",
        ),
        ([*GAE, "critic.path=./nowhere"], "critic.path=./nowhere: there is no folder"),
        ([*GAE, "critic.cliprange_value=0"], "critic.cliprange_value=0.0 must be above 0"),
        ([*GAE, "critic.optim.betas=[1,0.9]"], "critic.optim.betas=[1.0, 0.9] must be at least 0 and below 1"),
        ([*GAE, "critic.loss_agg_mode=mean"], "critic.loss_agg_mode=mean must be one of"),
        ([*GAE, "algorithm.lam=1.5"], "algorithm.lam=1.5 must be at least 0 and at most 1"),
        (["algorithm.gamma=-0.1"], "algorithm.gamma=-0.1 must be at least 0 and at most 1"),
        (["algorithm.f_norm=0"], "algorithm.f_norm=0.0 must be above 0"),
        (["algorithm.adv_estimator=gdpo"], "needs algorithm.gdpo_reward_keys"),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[acc,format]",
                "algorithm.gdpo_reward_weights=[1]",
            ],
            "has length 1 and algorithm.gdpo_reward_keys=['acc', 'format'] has length 2",
        ),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[acc]",
                "algorithm.gdpo_reward_weights=[inf]",
            ],
            "algorithm.gdpo_reward_weights=[inf] must be finite",
        ),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc]", "algorithm.use_kl_in_reward=true"],
            "reads the parts of the reward and not its sum",
        ),
        (["actor.policy_loss.loss_mode=vanila"], "'vanila' is unknown. Did you mean 'vanilla'?"),
        (["actor.policy_loss.loss_mode=nowhere:f"], "module 'nowhere' cannot be imported"),
        (["actor.policy_loss.loss_mode=dro"], "needs actor.policy_loss.dro_beta"),
        (
            ["actor.policy_loss.loss_mode=dro", "actor.policy_loss.dro_beta=0"],
            "actor.policy_loss.dro_beta=0.0 must be above 0",
        ),
        (["actor.policy_loss.clip_cov_lb=5"], "actor.policy_loss.clip_cov_lb=5 must be below"),
        (["actor.policy_loss.tau_neg=0"], "actor.policy_loss.tau_neg=0.0 must be above 0"),
        (["actor.clip_ratio_low=1.2"], "1 - 1.2 = -0.2"),
        (["actor.kl_loss_type=full"], "actor.kl_loss_type=full must be one of"),
        (["algorithm.kl_penalty=kl+"], "algorithm.kl_penalty=kl+ must be one of"),
        (["actor.kl_loss_coef=-1"], "actor.kl_loss_coef=-1.0 must be at least"),
        (["algorithm.use_kl_in_reward=true", "rollout.top_p=0.9"], "even equal policies would have a KL"),
        (["algorithm.adv_estimator=optimal_token_baseline", "rollout.top_k=20"], "sums over the whole vocabulary"),
        (["actor.policy_loss.kl_cov_ratio=0"], "actor.policy_loss.kl_cov_ratio=0.0 must be above 0"),
        (["actor.policy_loss.clip_cov_ratio=0"], "actor.policy_loss.clip_cov_ratio=0.0 must be above 0"),
        (["algorithm.use_kl_in_reward=true", "rollout.top_k=50"], "even equal policies would have a KL"),
        (["algorithm.kl_ctrl.type=adaptive"], "algorithm.use_kl_in_reward=false; set that to true"),
        (
            ["algorithm.kl_ctrl.type=adaptive", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0"],
            "0 stays 0",
        ),
        (["algorithm.kl_ctrl.target_kl=0"], "algorithm.kl_ctrl.target_kl=0.0 must be above 0"),
        (["algorithm.kl_ctrl.horizon=0"], "algorithm.kl_ctrl.horizon=0 must be at least"),
        (["actor.use_kl_loss=true", "scoring.reference.max_token_len=1000"], "scoring.reference.max_token_len=1000"),
        (["actor.use_kl_loss=true", "scoring.reference.path=./nowhere"], "scoring.reference.path=./nowhere"),
        (["actor.use_kl_loss=true", "scoring.reference.num_gpus=2"], "scoring.reference.num_gpus=2: a replica uses"),
        (["scoring.value.num_workers=0"], "scoring.value.num_workers=0 must be at least"),
        ([f"{CORRECTION}.rollout_is=row"], f"{CORRECTION}.rollout_is=row is not known"),
        ([f"{CORRECTION}.rollout_rs=token_k1"], f"{CORRECTION}.rollout_rs_threshold=null gives 0 bounds"),
        (
            [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold='2.0_0.5'"],
            "'2.0_0.5' are upside down",
        ),
        (
            [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold='0.52'"],
            "rollout_is_threshold=0.52 would cap the weight of every token",
        ),
        (
            [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold='2.0_5.0'"],
            "rollout_is_threshold keeps ratios from 2 to 5, without 1",
        ),
        (
            [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold='0.1_0.9'"],
            "rollout_rs_threshold of token_k1 keeps ratios from 0.1 to 0.9, without 1",
        ),
        (
            [
                "actor.policy_loss.loss_mode=pipeline.losses.ppo:vanilla",
                *BYPASS,
                f"{CORRECTION}.rollout_is=token",
            ],
            "which would count twice",
        ),
        (["actor.policy_loss.loss_mode=pipeline.losses.smooth:dro"], "needs actor.policy_loss.dro_beta"),
        (["actor.policy_loss.loss_mode=os:getcwd"], "called with data and config"),
        (["algorithm.adv_estimator=os:getcwd"], "called with data and config"),
        (["actor.policy_loss.loss_mode=pipeline.advantage.outcome:rloo"], "registered as another kind of function"),
        (["algorithm.adv_estimator=pipeline.losses.ppo:vanilla"], "registered as another kind of function"),
        (["actor.policy_loss.kwargs.width=0.3"], "no built-in loss reads it, and vanilla is one"),
        (["algorithm.adv_estimator_kwargs.limit=3"], "no built-in estimator reads it, and grpo is one"),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc,acc]"],
            "names a part twice",
        ),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc]", "algorithm.gdpo_reward_weights=[0]"],
            "not all of them 0",
        ),
        (["actor.optim.lr=inf"], "actor.optim.lr=inf must be a finite number"),
        (["actor.entropy_coeff=inf"], "actor.entropy_coeff=inf must be a finite number"),
        ([f"{CORRECTION}.rollout_is_batch_normalize=true"], "has no weights to normalise"),
        ([*BYPASS, f"{CORRECTION}.rollout_is=token"], "which would count twice"),
        (
            [
                *BYPASS,
                f"{CORRECTION}.rollout_is=token",
                f"{CORRECTION}.rollout_is_batch_normalize=true",
                "actor.policy_loss.loss_mode=reinforce",
            ],
            "is not known before the forward pass",
        ),
    ],
)
def test_refused_algorithms(overrides, words):
    sentence = refusal(*overrides)
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
    assert f"give the import path, by which every worker finds it: own_{name}:{name}" in refusal(f"{key}={name}")


@pytest.mark.parametrize("name", [*COMPARE_IN_GROUP, "pipeline.advantage.outcome:rloo"])
def test_estimators_that_compare_within_a_group_need_one(name):
    sentence = refusal(f"algorithm.adv_estimator={name}", "rollout.n=1", "algorithm.gdpo_reward_keys=[acc]")
    assert "groups of one" in sentence and "set rollout.n to 2 or more" in sentence


@pytest.mark.parametrize("name", NEED_NO_GROUP)
def test_other_estimators_take_a_single_response(name):
    check(good(f"algorithm.adv_estimator={name}", "rollout.n=1"))


@pytest.mark.parametrize(
    "overrides",
    [
        # Keys that do nothing in a setting are no mistake, as long as nothing else depends on them.
        ["algorithm.lam=0.5", "critic.ppo_mini_batch_size=48", "scoring.value.max_token_len=10"],
        ["critic.enable=true"],
        BYPASS,
        ["actor.policy_loss.loss_mode=gspo", "actor.clip_ratio_low=3e-4", "actor.clip_ratio_high=4e-4"],
        ["actor.policy_loss.loss_mode=geo_mean", "actor.clip_ratio_low=1.5"],
        ["actor.policy_loss.loss_mode=cispo", "actor.clip_ratio_low=1"],
        ["actor.policy_loss.loss_mode=dro", "actor.policy_loss.dro_beta=0.05"],
        ["actor.kl_loss_type=low_var_kl+", "actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"],
        ["algorithm.kl_ctrl.type=adaptive", "algorithm.use_kl_in_reward=true"],
        [*BYPASS, f"{CORRECTION}.rollout_is=sequence", "actor.policy_loss.loss_mode=reinforce"],
        [*BYPASS, f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold='0.5_2.0'"],
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_batch_normalize=true"],
    ],
)
def test_not_refused(overrides):
    check(good(*overrides))


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("algorithm/*.yaml")), ids=lambda path: path.stem)
def test_every_algorithm_runs_the_demo(path, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    config = load_config([f"algorithm={path.stem}", "experiment=countdown_cpu", f"model.path={tmp_path}"])
    check_resources(plan(config).stages, config.trainer.ray_num_cpus)


def test_names_in_the_checks_are_those_of_the_code():
    from pipeline import losses

    def built_in(package: str, registered: dict[str, Any]) -> set[str]:
        return {name for name, entry in registered.items() if entry.function.__module__.startswith(package)}

    assert set(POLICY_LOSSES) == built_in("pipeline.", losses.registry._POLICY_LOSSES)
    assert {*COMPARE_IN_GROUP, *NEED_NO_GROUP} == built_in("pipeline.", estimators._ESTIMATORS)
