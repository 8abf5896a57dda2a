"""Algorithms that cannot be are refused with their keys, and nothing else is."""

import pytest

from pipeline.catalogue import ESTIMATORS, POLICY_LOSSES
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


@pytest.fixture(autouse=True)
def as_they_come(monkeypatch):
    """Without the entries that other tests have registered in this process."""
    for known in (ESTIMATORS, POLICY_LOSSES):
        for name in [name for name, entry in known.items() if not entry.built_in]:
            monkeypatch.delitem(known, name)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("rollout.n=1", "rollout.n"),
        ("algorithm.adv_estimator=grpoo", "algorithm.adv_estimator"),
        ("algorithm.adv_estimator=nowhere:f", "algorithm.adv_estimator"),
        ("algorithm.adv_estimator=os:getcwd", "algorithm.adv_estimator"),
        ("algorithm.adv_estimator=pipeline.losses.ppo:vanilla", "algorithm.adv_estimator"),
        ("algorithm.adv_estimator_kwargs.limit=3", "algorithm.adv_estimator_kwargs"),
        ("algorithm.turn_gamma=0.9", "algorithm.turn_gamma"),
        (f"{GAE} critic.enable=false", "algorithm.adv_estimator critic.enable"),
        ("critic.warmup=5", "critic.warmup"),
        (f"{GAE} critic.ppo_mini_batch_size=48", "critic.ppo_mini_batch_size"),
        (
            f"{GAE} critic.ppo_mini_batch_size=16 trainer.num_workers=2 rollout.chunk_prompts=16",
            "critic.ppo_mini_batch_size trainer.num_workers",
        ),
        (f"{GAE} critic.ppo_max_token_len_per_gpu=1000", "data.max_prompt_length critic.ppo_max_token_len_per_gpu"),
        (
            "actor.parallel.sequence=2 trainer.num_workers=2 actor.ppo_max_token_len_per_gpu=511",
            "data.max_prompt_length actor.ppo_max_token_len_per_gpu actor.parallel.sequence",
        ),
        (f"{GAE} critic.path=./nowhere", "critic.path"),
        (f"{GAE} critic.optim.betas=[1,0.9]", "critic.optim.betas"),
        (f"{GDPO}=[]", "algorithm.adv_estimator algorithm.gdpo_reward_keys"),
        (
            f"{GDPO}=[acc,format] algorithm.gdpo_reward_weights=[1]",
            "algorithm.gdpo_reward_weights algorithm.gdpo_reward_keys",
        ),
        (f"{GDPO}=[acc] algorithm.gdpo_reward_weights=[inf]", "algorithm.gdpo_reward_weights"),
        (f"{GDPO}=[acc] algorithm.gdpo_reward_weights=[0]", "algorithm.gdpo_reward_weights"),
        (f"{GDPO}=[acc,acc]", "algorithm.gdpo_reward_keys"),
        (f"{GDPO}=[acc] {KL}", "algorithm.use_kl_in_reward algorithm.adv_estimator"),
        (f"{LOSS}=vanila", "actor.policy_loss.loss_mode"),
        (f"{LOSS}=nowhere:f", "actor.policy_loss.loss_mode"),
        (f"{LOSS}=os:getcwd", "actor.policy_loss.loss_mode"),
        (f"{LOSS}=pipeline.advantage.outcome:rloo", "actor.policy_loss.loss_mode"),
        (f"{LOSS}=dro", "actor.policy_loss.loss_mode"),
        (f"{LOSS}=pipeline.losses.smooth:dro", "actor.policy_loss.loss_mode"),
        (f"{LOSS}=online_dpo {SUMS}", "actor.policy_loss.loss_mode"),
        ("algorithm.adv_estimator=online_dpo", "algorithm.adv_estimator"),
        (f"{PAIRS} actor.loss_agg_mode=token-mean", "actor.policy_loss.loss_mode actor.loss_agg_mode"),
        (f"{PAIRS} {IS}=token", "algorithm.rollout_correction actor.policy_loss.loss_mode"),
        ("actor.policy_loss.kwargs.width=0.3", "actor.policy_loss.kwargs"),
        ("actor.policy_loss.clip_cov_lb=5", "actor.policy_loss.clip_cov_lb"),
        ("actor.clip_ratio=1.5", "actor.clip_ratio"),
        ("actor.clip_ratio_low=1.2", "actor.clip_ratio_low"),
        ("actor.clip_ratio_low=0", "actor.clip_ratio_low"),
        ("actor.clip_ratio_c=1.0", "actor.clip_ratio_c"),
        ("actor.kl_loss_type=full", "actor.kl_loss_type"),
        ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.type"),
        (
            f"algorithm.kl_ctrl.type=adaptive {KL} algorithm.kl_ctrl.kl_coef=0",
            "algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.type",
        ),
        (
            "actor.use_kl_loss=true scoring.reference.max_token_len=1000",
            "data.max_prompt_length scoring.reference.max_token_len",
        ),
        ("actor.use_kl_loss=true scoring.reference.path=./nowhere", "scoring.reference.path"),
        ("scoring.reference.num_gpus=2", "scoring.reference.num_gpus"),
        (
            "scoring.reference.placement=train_workers algorithm.use_kl_in_reward=true actor.use_kl_loss=true",
            "scoring.reference.placement algorithm.use_kl_in_reward actor.use_kl_loss",
        ),
        (OFFLOADED, "scoring.reference.offload"),
        (f"{OFFLOADED} scoring.reference.placement=replicas", "scoring.reference.offload scoring.reference.placement"),
        (f"{OFFLOADED} model.lora.rank=4", "scoring.reference.offload model.lora.rank"),
        (
            "actor.use_kl_loss=true scoring.reference.placement=train_workers scoring.reference.offload=true",
            "scoring.reference.offload",
        ),
        (f"{IS}=row", "algorithm.rollout_correction.rollout_is"),
        (f"{IS}=token {IS}_threshold=2.0_0.5", "algorithm.rollout_correction.rollout_is_threshold"),
        (f"{IS}=token {IS}_threshold='0.52'", "algorithm.rollout_correction.rollout_is_threshold"),
        (f"{IS}=token {IS}_threshold='2.0_5.0'", "algorithm.rollout_correction.rollout_is_threshold"),
        (f"{RS}=token_k1", "algorithm.rollout_correction.rollout_rs_threshold algorithm.rollout_correction.rollout_rs"),
        (f"{RS}=token_k1 {RS}_threshold='0.1_0.9'", "algorithm.rollout_correction.rollout_rs_threshold"),
        (f"{IS}_batch_normalize=true", "algorithm.rollout_correction.rollout_is_batch_normalize"),
        (f"{BYPASS} {IS}=token", "algorithm.rollout_correction.rollout_is actor.old_log_probs"),
        (
            f"{BYPASS} {IS}=token {LOSS}=pipeline.losses.ppo:vanilla",
            "algorithm.rollout_correction.rollout_is actor.old_log_probs actor.policy_loss.loss_mode",
        ),
        (
            f"{BYPASS} {IS}=token {LOSS}=reinforce {IS}_batch_normalize=true",
            "algorithm.rollout_correction.rollout_is_batch_normalize actor.old_log_probs",
        ),
        ("trainer.stream_gradients=true data.train_batch_size=16 rollout.chunk_prompts=16", "trainer.stream_gradients"),
    ],
)
def test_refused_algorithms(overrides, keys, named):
    sentence = refusal(*overrides.split())
    assert "\n" not in sentence
    named(sentence, keys)


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
    assert f"own_{name}:{name}" in refusal(f"{key}={name}")


NEED_NO_GROUP = ["gae", "reinforce_plus_plus", "remax", "zero"]
BUILT_IN = [name for name, estimator in ESTIMATORS.items() if estimator.built_in]


@pytest.mark.parametrize(
    "name", [*(name for name in BUILT_IN if name not in NEED_NO_GROUP), "pipeline.advantage.outcome:rloo"]
)
def test_estimators_that_compare_within_a_group_need_one(name):
    sentence = refusal(f"algorithm.adv_estimator={name}", "rollout.n=1", "algorithm.gdpo_reward_keys=[acc]")
    assert "set rollout.n to 2 or more" in sentence


@pytest.mark.parametrize("name", NEED_NO_GROUP)
def test_other_estimators_take_a_single_response(name):
    taught = ["algorithm.teacher_coef=1", f"teacher.path={good().model.path}"] * (name == "zero")
    check(good(f"algorithm.adv_estimator={name}", "rollout.n=1", *taught))


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


TAUGHT = "algorithm.teacher_coef=1"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (TAUGHT, "algorithm.teacher_coef teacher.path"),
        ("actor.distill_coef=1", "actor.distill_coef teacher.path"),
        ("algorithm.adv_estimator=zero", "algorithm.adv_estimator"),
        (f"{TAUGHT} teacher.path=./nowhere", "teacher.path"),
        (f"{TAUGHT} teacher.url=http://x/v1 rollout.top_k=5", "teacher.url rollout.top_k"),
        (f"{TAUGHT} teacher.url=http://x/v1 teacher.placement=train_workers", "teacher.placement teacher.url"),
        (f"{TAUGHT} teacher.url=http://x/v1 teacher.api_key_env=NOT_SET_HERE", "teacher.api_key_env"),
        (f"{TAUGHT} teacher.named.a.path=x teacher.named.b.path=y teacher.named.b.sources=[a]", "teacher.named"),
        (f"{TAUGHT} teacher.named.a.sources=[a]", "teacher.named.a"),
        (f"{TAUGHT} teacher.path=x teacher.adapter=y teacher.placement=train_workers", "teacher.adapter"),
        (f"{TAUGHT} teacher.path=x teacher.prompt=Well", "teacher.prompt"),
        (f"{TAUGHT} teacher.path=x teacher.sources=[a]", "teacher.sources"),
        (f"{TAUGHT} teacher.path=x teacher.by=reward", "teacher.by"),
        (f"{TAUGHT} teacher.path=x teacher.offload=true", "teacher.offload"),
        (f"{PAIRS} {TAUGHT} teacher.path=x", "algorithm.teacher_coef actor.policy_loss.loss_mode"),
        (f"algorithm.adv_estimator=zero {TAUGHT} teacher.path=x {KL}", "algorithm.use_kl_in_reward"),
    ],
)
def test_refused_teachers(overrides: str, keys: str) -> None:
    sentence = refusal(*overrides.split())
    assert all(key in sentence for key in keys.split()), sentence


@pytest.mark.parametrize("restriction", ["top_p=0.9", "top_k=50", "min_p=0.05", "min_tokens=4"])
@pytest.mark.parametrize("reader", [BYPASS, KL, "algorithm.adv_estimator=optimal_token_baseline"])
def test_tokens_of_a_part_of_the_vocabulary_go_with_every_algorithm(restriction: str, reader: str) -> None:
    check(good(*reader.split(), f"rollout.{restriction}"))
