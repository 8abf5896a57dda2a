"""What is allowed and probably not meant is noted, and nothing else."""

import pytest

from pipeline.config import Config
from pipeline.plan import host
from pipeline.plan.plan import plan
from pipeline.plan.warnings import largest_gain, notes
from tests.plan import test_checks

STALE = "algorithm.max_staleness"
BYPASS = "actor.old_log_probs=engine"
NO_WEIGHTS = "algorithm.rollout_correction.rollout_is=none"
KL = "algorithm.use_kl_in_reward=true"
ADAPTIVE = f"{KL} algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=512"
ON_GPUS = "trainer.use_gpu=true rollout.num_gpus=1"
ONE = "rollout.chunk_prompts=1"
UNREAD = "set, but not read in this run: "
TEN = "trainer.total_training_steps=10"
VALIDATES = "data.val_files=val.parquet"
ALONE = (
    *(
        "model.lora.alpha=4",
        "actor.optim.min_lr_ratio=0.5",
        "rollout.val_kwargs.n=4 data.val_files=null",
        "reward.overlong_buffer.len=4",
    ),
    *("scoring.reward_model.num_cpus=2", "scoring.value.num_cpus=2", "scoring.policy.num_cpus=2"),
    *("data.val_max_samples=5 data.val_files=null", "data.shuffle_window_rows=9 data.shuffle=false"),
    *("reward.repetition_penalty.ngram=3", "reward.custom_reward_function.name=f", "trainer.gpus_per_worker=0.5"),
    "rollout.update_kv=keep",
    *(
        "rollout.gpu_memory_utilization=0.7",
        "trainer.best_metric_mode=min",
        "trainer.val_before_train=false data.val_files=null",
    ),
)
"""Settings that do nothing unless another one is set."""


def good(*overrides: str) -> Config:
    return test_checks.good("rollout.dtype=float32", *overrides)


@pytest.fixture(autouse=True)
def processor(monkeypatch):
    """A processor with instructions for bfloat16, whatever this one has."""
    monkeypatch.setattr(host, "multiplies_bfloat16", lambda: True)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("critic.enable=true", "critic.enable"),
        ("actor.use_kl_loss=true actor.kl_loss_type=k1", "actor.kl_loss_type"),
        ("actor.use_kl_loss=true actor.kl_loss_coef=0", "actor.kl_loss_coef actor.use_kl_loss"),
        (KL, "algorithm.adv_estimator"),
        (f"actor.use_kl_loss=true {KL}", "algorithm.adv_estimator actor.use_kl_loss | the reward and"),
        (
            f"{KL} algorithm.kl_ctrl.kl_coef=0",
            "algorithm.adv_estimator | algorithm.kl_ctrl.kl_coef algorithm.use_kl_in_reward",
        ),
        ("actor.policy_loss.loss_mode=gspo", "actor.policy_loss.loss_mode"),
        ("actor.policy_loss.loss_mode=dppo_tv", "actor.clip_ratio_c actor.policy_loss.loss_mode"),
        ("actor.use_kl_loss=true rollout.num_gpus=1", "scoring.reference.num_gpus"),
        (
            "agent.tools=[a:b] algorithm.adv_estimator=optimal_token_baseline",
            "agent.max_episodes | algorithm.adv_estimator",
        ),
        ("algorithm.adv_estimator=turn_grpo", "algorithm.adv_estimator"),
        ("rollout.num_engines=65 rollout.chunk_prompts=16", "rollout.num_engines | rollout.num_engines"),
        ("rollout.num_engines=3", "rollout.num_engines"),
        ("rollout.weight_update=in_flight", "rollout.weight_update"),
        ("rollout.dtype=bfloat16", "rollout.dtype rollout.num_gpus"),
        ("data.sampler=solve_rate", "data.sampler"),
        (f"{ON_GPUS} trainer.num_workers=16 actor.parallel.tensor=16", "actor.parallel.tensor"),
        (
            f"{ON_GPUS} trainer.num_workers=12 actor.parallel.tensor=3 data.train_batch_size=48 {ONE}",
            "actor.parallel.tensor",
        ),
        (f"{VALIDATES} rollout.val_kwargs.n=4", "rollout.val_kwargs.n"),
        (
            f"{VALIDATES} rollout.val_kwargs.n=4 rollout.val_kwargs.temperature=1 rollout.val_kwargs.top_k=1",
            "rollout.val_kwargs.n rollout.val_kwargs.temperature rollout.val_kwargs.top_k",
        ),
        ("rollout.top_k=1", "rollout.n rollout.top_k"),
        (f"{TEN} actor.optim.lr_warmup_steps=20", "actor.optim actor.optim.lr_warmup_steps"),
        (f"{TEN} actor.optim.lr_warmup_steps_ratio=1", "actor.optim"),
        (
            f"{TEN} algorithm.adv_estimator=gae critic.optim.lr_warmup_steps=11 critic.warmup=2",
            "critic.optim critic.optim.lr_warmup_steps",
        ),
        (
            f"{TEN} actor.optim.lr_scheduler_type=cosine actor.optim.min_lr_ratio=1",
            "actor.optim.lr_scheduler_type actor.optim.min_lr_ratio",
        ),
        (f"{TEN} {VALIDATES} trainer.test_freq=11", "trainer.test_freq"),
        (f"{TEN} trainer.save_freq=11", "trainer.save_freq"),
        (f"{STALE}=1 {NO_WEIGHTS}", "algorithm.max_staleness algorithm.rollout_correction.rollout_is"),
        (
            f"{STALE}=1 {NO_WEIGHTS} {BYPASS} actor.policy_loss.loss_mode=gpg",
            "algorithm.max_staleness algorithm.rollout_correction.rollout_is",
        ),
        (f"{STALE}=2 {BYPASS}", "actor.old_log_probs algorithm.max_staleness"),
        (f"{STALE}=1 algorithm.adv_estimator=gae", "algorithm.max_staleness"),
        (
            f"{STALE}=3 algorithm.adv_estimator=optimal_token_baseline",
            "algorithm.adv_estimator algorithm.max_staleness",
        ),
        (f"{STALE}=1 {ADAPTIVE}", "algorithm.adv_estimator | algorithm.kl_ctrl.horizon algorithm.max_staleness"),
    ],
)
def test_what_is_probably_not_meant_is_noted(overrides, keys, named):
    for note, its_keys in zip(plan(good(*overrides.split())).notes, keys.split(" | "), strict=True):
        named(note, its_keys)


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        ("actor.kl_loss_coef=0.5", "actor.kl_loss_coef=0.5"),
        ("critic.optim.lr=1e-3 actor.loss_scale_factor=8", "actor.loss_scale_factor=8, critic.optim.lr=0.001"),
        ("algorithm.lam=0.5", "algorithm.lam=0.5"),
        ("actor.policy_loss.dro_beta=0.5", "actor.policy_loss.dro_beta=0.5"),
        ("scoring.reference.path=other/model", "scoring.reference.path=other/model"),
        ("scoring.reference.placement=train_workers", "scoring.reference.placement=train_workers"),
        (
            "actor.use_kl_loss=true scoring.reference.placement=train_workers scoring.reference.num_workers=2 "
            "scoring.reference.max_token_len=20000 scoring.reference.dtype=bfloat16",
            "scoring.reference.num_workers=2, scoring.reference.max_token_len=20000",
        ),
        (
            "actor.use_kl_loss=true model.lora.rank=4 scoring.reference.dtype=bfloat16",
            "scoring.reference.dtype=bfloat16",
        ),
        ("agent.tools=[a:b] algorithm.turn_gamma=0.5", "algorithm.turn_gamma=0.5"),
        *((words, words.split()[0]) for words in ALONE),
        (f"{VALIDATES} rollout.val_kwargs.top_p=0.5", "rollout.val_kwargs.top_p=0.5"),
        (f"{KL} algorithm.kl_ctrl.horizon=5", "algorithm.kl_ctrl.horizon=5"),
        (f"{TEN} trainer.total_epochs=3", "trainer.total_epochs=3"),
        ("rollout.engine_python=other/bin/python", "rollout.engine_python=other/bin/python"),
        ("rollout.name=hf rollout.enforce_eager=true", "rollout.enforce_eager=true"),
    ],
)
def test_settings_that_nothing_reads_are_listed(overrides, unread):
    found = [note for note in plan(good(*overrides.split())).notes if note.startswith(UNREAD)]
    assert len(found) == 1 and found[0].removeprefix(UNREAD).startswith(unread)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("actor.fsdp.param_dtype=bfloat16 rollout.dtype=bfloat16", "model.dtype actor.fsdp.param_dtype"),
        (
            "algorithm.adv_estimator=gae model.dtype=bfloat16 rollout.dtype=bfloat16",
            "model.dtype actor.fsdp.param_dtype | model.dtype critic.fsdp.param_dtype",
        ),
        (f"{ON_GPUS} model.dtype=bfloat16", ""),
    ],
)
def test_a_processor_that_is_slow_in_bfloat16(overrides, keys, named, monkeypatch):
    monkeypatch.setattr(host, "multiplies_bfloat16", lambda: False)
    found = [note for note in plan(good(*overrides.split())).notes if "avx512_bf16" in note]
    for note, its_keys in zip(found, keys.split(" | ") if keys else [], strict=True):
        named(note, its_keys)


def test_an_estimator_of_turns_fits_episodes():
    notes = plan(
        good("agent.environment=a:Game", "algorithm.adv_estimator=turn_grpo", "algorithm.turn_gamma=0.5")
    ).notes
    assert not [note for note in notes if "algorithm." in note]


@pytest.mark.parametrize(
    "overrides",
    [
        *("", f"{STALE}=1", f"{STALE}=4", f"{STALE}=1 {BYPASS}"),
        "rollout.dtype=bfloat16 model.dtype=bfloat16",
        "rollout.dtype=bfloat16 actor.fsdp.param_dtype=bfloat16",
        "rollout.dtype=bfloat16 rollout.num_gpus=1",
        f"{ON_GPUS} trainer.num_workers=16 actor.parallel.tensor=2 actor.parallel.sequence=4",
        f"{ON_GPUS} trainer.num_workers=6 actor.parallel.tensor=3 data.train_batch_size=48 {ONE}",
        "trainer.num_workers=16 actor.parallel.tensor=16",
    ],
)
def test_sound_settings_get_no_note(overrides):
    assert not plan(good(*overrides.split())).notes


@pytest.mark.parametrize("delay", range(5))
def test_the_largest_gain_separates_what_dies_away_from_what_grows(delay):
    for share, dies in ((0.97, True), (1.03, False)):
        x = [1.0] * (delay + 1)
        for _ in range(2000):
            x.append(x[-1] - share * largest_gain(delay) * x[-1 - delay])
        assert (max(map(abs, x[-50:])) < 1e-3) is dies


def test_a_reference_without_the_adapter_that_training_starts_from_is_noted(named):
    start = ["actor.use_kl_loss=true", "model.lora.rank=4", "model.lora.path=adapter"]
    (note,) = notes(good(*start), 64, None)
    named(note, "model.lora.path=adapter")
    for other in ("model.lora.path=null", "actor.use_kl_loss=false", "scoring.reference.path=merged"):
        assert note not in notes(good(*start, other), 64, None)
