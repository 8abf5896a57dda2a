"""What is allowed and probably not meant is noted, and nothing else."""

import pytest

from pipeline.plan.plan import plan
from pipeline.plan.warnings import largest_gain, notes
from tests.plan.test_checks import good

STALE = "algorithm.max_staleness"
BYPASS = "actor.old_log_probs=engine"
NO_WEIGHTS = "algorithm.rollout_correction.rollout_is=none"
KL = "algorithm.use_kl_in_reward=true"
ADAPTIVE = f"{KL} algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=512"
ON_GPUS = "trainer.use_gpu=true rollout.num_gpus=1"
ONE = "rollout.chunk_prompts=1"
UNREAD = "set, and read by nothing in this run: "
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


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("critic.enable=true", "critic.enable=true trains a critic that algorithm.adv_estimator=grpo does not read"),
        ("actor.use_kl_loss=true actor.kl_loss_type=k1", "k1+ has the same value and the gradient of the KL"),
        ("actor.use_kl_loss=true actor.kl_loss_coef=0", "is measured and does not train"),
        (KL, "divides by the group's spread"),
        (f"actor.use_kl_loss=true {KL}", "it holds the policy twice"),
        (f"{KL} algorithm.kl_ctrl.kl_coef=0", "is measured and not subtracted"),
        ("actor.kl_loss_coef=0.5", f"{UNREAD}actor.kl_loss_coef=0.5"),
        ("critic.optim.lr=1e-3 actor.loss_scale_factor=8", f"{UNREAD}actor.loss_scale_factor=8, critic.optim.lr=0.001"),
        ("algorithm.lam=0.5", f"{UNREAD}algorithm.lam=0.5"),
        ("actor.policy_loss.dro_beta=0.5", f"{UNREAD}actor.policy_loss.dro_beta=0.5"),
        ("scoring.reference.path=other/model", f"{UNREAD}scoring.reference.path=other/model"),
        ("scoring.reference.where=train_workers", f"{UNREAD}scoring.reference.where=train_workers"),
        (
            "actor.use_kl_loss=true scoring.reference.where=train_workers scoring.reference.num_workers=2 "
            "scoring.reference.max_token_len=20000 scoring.reference.dtype=bfloat16",
            f"{UNREAD}scoring.reference.num_workers=2, scoring.reference.max_token_len=20000",
        ),
        (
            "actor.use_kl_loss=true model.lora.rank=4 scoring.reference.dtype=bfloat16",
            f"{UNREAD}scoring.reference.dtype=bfloat16",
        ),
        ("actor.policy_loss.loss_mode=gspo", "GSPO's paper has 3e-4 and 4e-4"),
        ("actor.policy_loss.loss_mode=dppo_tv", "actor.clip_ratio_c=3 truncates the weights"),
        ("actor.use_kl_loss=true rollout.num_gpus=1", "the reference replicas on 1 CPUs each"),
        (
            "agent.tools=[a:b] algorithm.adv_estimator=optimal_token_baseline",
            "replies of different lengths move",
        ),
        ("algorithm.adv_estimator=turn_grpo", "algorithm.adv_estimator=turn_grpo compares turns, and rows have one"),
        ("agent.tools=[a:b] algorithm.turn_gamma=0.5", f"{UNREAD}algorithm.turn_gamma=0.5"),
        ("rollout.num_engines=65", "rollout.num_engines=65: 1 engines stay idle"),
        ("rollout.num_engines=3", "64 chunks do not divide evenly"),
        ("rollout.update=in_flight", "rollout.update=in_flight with algorithm.max_staleness=0"),
        ("data.sampler=solve_rate", "data.sampler=solve_rate may leave out prompts"),
        (f"{ON_GPUS} trainer.num_workers=16 actor.parallel.tensor=16", "groups of 16 neighbouring ranks exchange"),
        (
            f"{ON_GPUS} trainer.num_workers=12 actor.parallel.tensor=3 data.train_batch_size=48 {ONE}",
            "actor.parallel.tensor=3 and actor.parallel.sequence=1: groups of 3 neighbouring ranks exchange",
        ),
        (f"{VALIDATES} rollout.val_kwargs.n=4", "rollout.val_kwargs.n=4: greedy (rollout.val_kwargs.temperature=0"),
        (
            f"{VALIDATES} rollout.val_kwargs.n=4 rollout.val_kwargs.temperature=1 rollout.val_kwargs.top_k=1",
            "all 4 responses to a prompt are the same",
        ),
        ("rollout.top_k=1", "so groups have no advantage"),
        (f"{TEN} actor.optim.lr_warmup_steps=20", "actor.optim: a warm-up of 20 optimiser steps in a run of 10: the"),
        (f"{TEN} actor.optim.lr_warmup_steps_ratio=1", "only rises, to 1e-06 of actor.optim.lr=1e-06"),
        (
            f"{TEN} algorithm.adv_estimator=gae critic.optim.lr_warmup_steps=11 critic.warmup=2",
            "critic.optim: a warm-up of 11 optimiser steps in a run of 10",
        ),
        (f"{TEN} actor.optim.lr_scheduler_type=cosine actor.optim.min_lr_ratio=1", "stays at its peak"),
        (f"{TEN} {VALIDATES} trainer.test_freq=11", "trainer.test_freq=11 is above the 10 iterations of the run"),
        (f"{TEN} trainer.save_freq=11", "trainer.save_freq=11 is above the 10 iterations of the run"),
        *((words, f"{UNREAD}{words.split()[0]}") for words in ALONE),
        (f"{VALIDATES} rollout.val_kwargs.top_p=0.5", f"{UNREAD}rollout.val_kwargs.top_p=0.5"),
        (f"{KL} algorithm.kl_ctrl.horizon=5", f"{UNREAD}algorithm.kl_ctrl.horizon=5"),
        (f"{TEN} trainer.total_epochs=3", f"{UNREAD}trainer.total_epochs=3"),
        (f"{STALE}=1 {NO_WEIGHTS}", "without a correction: rows train as if"),
        (f"{STALE}=1 {NO_WEIGHTS} {BYPASS} actor.policy_loss.loss_mode=gpg", "without a correction"),
        (f"{STALE}=2 {BYPASS}", "the clip range lies around a policy up to 2 versions old"),
        (f"{STALE}=1 rollout.top_p=0.9", "weights are below 1 even where the policies agree"),
        (f"{STALE}=1 algorithm.adv_estimator=gae", "the critic's values are of a version up to 1 older"),
        (f"{STALE}=3 algorithm.adv_estimator=optimal_token_baseline", "sums of a policy up to 3 versions newer"),
        (f"{STALE}=1 {ADAPTIVE}", "takes effect 2 iterations later, so the KL may swing; set the horizon to 16384"),
    ],
)
def test_what_is_probably_not_meant_is_noted(overrides, words):
    notes = plan(good(*overrides.split())).notes
    assert len([note for note in notes if words in note]) == 1, notes


def test_an_estimator_of_turns_fits_episodes():
    notes = plan(
        good("agent.environment=a:Game", "algorithm.adv_estimator=turn_grpo", "algorithm.turn_gamma=0.5")
    ).notes
    assert not [note for note in notes if "algorithm." in note]


@pytest.mark.parametrize(
    "overrides",
    [
        *("", f"{STALE}=1", f"{STALE}=4", f"{STALE}=1 {BYPASS}"),
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


def test_a_reference_without_the_adapter_that_training_starts_from_is_noted():
    start = ["actor.use_kl_loss=true", "model.lora.rank=4", "model.lora.path=adapter"]
    words = "the reference is model.path without model.lora.path=adapter"
    assert any(words in note for note in notes(good(*start), 64, None))
    for other in ("model.lora.path=null", "actor.use_kl_loss=false", "scoring.reference.path=merged"):
        assert not any(words in note for note in notes(good(*start, other), 64, None))
