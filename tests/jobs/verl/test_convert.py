"""What becomes of verl's settings beyond their names."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from jobs.verl.convert import convert
from jobs.verl.keys import RENAMED, RULED
from jobs.verl.script import Argument
from jobs.verl.settings import Settings
from jobs.verl.state import Conversion
from pipeline.advantage.config import RolloutCorrectionConfig
from pipeline.config import Config
from pipeline.train.correction import correct, parse

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"


def converted(*arguments: str) -> Conversion:
    given_keys = Settings()
    given_keys.add([Argument(argument, 1, "run.sh") for argument in arguments])
    return convert(given_keys.settings)


def values(*arguments: str) -> dict[str, Any]:
    return converted(*arguments).values


def notes(*arguments: str) -> str:
    return "\n".join(converted(*arguments).notes)


def left(*arguments: str) -> dict[str, str]:
    return {entry.key: entry.reason for entry in converted(*arguments).left}


def test_verl_defaults_that_differ_are_written_and_no_others() -> None:
    result = converted("data.train_files=a.parquet")
    assert result.defaults == {
        "model.enable_gradient_checkpointing",
        "rollout.n",
        "algorithm.adv_estimator",
        "actor.ppo_mini_batch_size",
        "actor.fsdp.param_dtype",
        "critic.fsdp.param_dtype",
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.total_epochs",
        "trainer.logger",
    }
    expected = {
        "data.train_files": "a.parquet",
        "model.enable_gradient_checkpointing": True,
        "rollout.n": 1,
        "algorithm.adv_estimator": "gae",
        "actor.ppo_mini_batch_size": 256,
        "actor.fsdp.param_dtype": "bfloat16",
        "critic.fsdp.param_dtype": "bfloat16",
        "trainer.project_name": "verl_examples",
        "trainer.experiment_name": "gsm8k",
        "trainer.total_epochs": 30,
        "trainer.logger": ["console", "wandb"],
    }
    assert {ours: result.values[ours] for ours in expected} == expected


def test_a_given_key_replaces_the_default_and_null_means_not_given() -> None:
    found = converted(f"{ROLLOUT}.n=4", "trainer.total_epochs=2", "trainer.total_epochs=3", "data.seed=null")
    assert (found.values["rollout.n"], found.values["trainer.total_epochs"]) == (4, 3)
    assert not found.defaults & {"rollout.n", "trainer.total_epochs"} and "trainer.seed" not in found.values


def test_a_value_that_is_not_known_is_neither_verls_default_nor_a_guess() -> None:
    given_keys = Settings()
    given_keys.add([Argument(f"{ROLLOUT}.n=$N", 7, "run.sh", ("`$N` in line 7 is not assigned in run.sh",))])
    result = convert(given_keys.settings)
    assert "rollout.n" not in result.values
    (entry,) = result.left
    assert entry.reason == "its value needs the shell: `$N` in line 7 is not assigned in run.sh; give rollout.n"


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (f"{ROLLOUT}.n=many", "its value does not fit rollout.n: expected a whole number"),
        ("trainer.val_before_train=maybe", "expected true or false"),
        (f"{ACTOR}.optim.lr=[1,2]", "expected a number"),
        ("data.train_batch_size=64,128", "several values for a sweep"),
        ("~data.seed", "takes a key of verl away"),
        ("data.max_prompt_length='${data.max_response_length}'", "refers to another key of verl's"),
        ("data.max_prompt_length=${oc.env:LENGTH}", "expected a whole number"),
        ("data.train_files=a=b", "Hydra cannot read the value"),
        ("trainer.no_such=1", "not a key of verl that is known here"),
    ],
)
def test_values_that_cannot_be_taken(argument: str, reason: str) -> None:
    (found,) = left(argument).values()
    assert reason in found


def test_values_are_read_with_hydras_grammar() -> None:
    found = values(
        "+data.shuffle=False",
        "++data.val_files=['a.parquet', \"b.parquet\"]",
        f"{ROLLOUT}.val_kwargs={{n: 8, temperature: 0.6}}",
        "data.train_files='~/data/x.parquet'",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        f"+{ROLLOUT}.engine_kwargs.vllm.compilation_config.level=3",
        f"+{ROLLOUT}.engine_kwargs.vllm.swap_space=4",
        "trainer.experiment_name=12",
    )
    assert found["data.shuffle"] is False
    assert found["data.val_files"] == ["a.parquet", "b.parquet"]
    assert (found["rollout.val_kwargs.n"], found["rollout.val_kwargs.temperature"]) == (8, 0.6)
    assert found["data.train_files"] == "${oc.env:HOME}/data/x.parquet"
    assert found["data.apply_chat_template_kwargs"] == {"enable_thinking": False}
    assert found["rollout.engine_kwargs"] == {"compilation_config": {"level": 3}, "swap_space": 4}
    assert found["trainer.experiment_name"] == "12"


def test_faster_estimators_are_the_estimators() -> None:
    assert values("algorithm.adv_estimator=grpo_vectorized")["algorithm.adv_estimator"] == "grpo"
    assert "in verl the bare reward" in notes("algorithm.adv_estimator=grpo_vectorized")
    assert values("algorithm.adv_estimator=rloo_vectorized")["algorithm.adv_estimator"] == "rloo"
    assert "in verl 0, too" in notes("algorithm.adv_estimator=rloo_vectorized")


def test_an_import_path_in_a_script_is_not_imported() -> None:
    found = converted("algorithm.adv_estimator=antigravity:fly", f"{ACTOR}.policy_loss.loss_mode=antigravity:fly")
    assert {entry.key for entry in found.left} == {"algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"}
    assert not found.values.keys() & {"algorithm.adv_estimator", "actor.policy_loss.loss_mode"}


@pytest.mark.parametrize(
    ("enable", "path"),
    [
        ("reward_model.enable", "reward_model.model.path"),
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
    ],
)
def test_a_reward_model(enable: str, path: str) -> None:
    given = [f"{enable}=True", f"{path}=/models/judge"]
    assert values(*given)["reward.model.path"] == "/models/judge"
    assert "one label" in notes(*given) and "there are rules" not in notes(*given)
    assert not left(*given)
    assert "reward.model.path" not in values(f"{enable}=False", f"{path}=/models/judge")
    assert "scoring.reward_model" in left(*given, "reward_model.micro_batch_size_per_gpu=4").popitem()[1]


def test_clip_ratio_alone_has_no_effect_in_verl() -> None:
    found = values(f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.3")
    assert [found[f"actor.clip_ratio{side}"] for side in ("", "_low", "_high")] == [0.1, 0.2, 0.3]
    assert "actor.clip_ratio_low here" in notes(f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.3")
    # verl follows clip_ratio where a bound is null, as ours does.
    nulls = [f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=null", f"{ACTOR}.clip_ratio_high=null"]
    assert not values(*nulls).keys() & {"actor.clip_ratio_low", "actor.clip_ratio_high"}
    assert "actor.clip_ratio_low" not in values(f"{ACTOR}.clip_ratio_high=0.28")


def test_cispo_without_a_lower_bound() -> None:
    cispo = [f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=10", f"{ACTOR}.clip_ratio_high=0.2"]
    assert values(*cispo)["actor.clip_ratio_low"] == 1.0
    assert "without a lower bound" in notes(*cispo)


def test_losses() -> None:
    found = values(
        f"{ACTOR}.policy_loss.loss_mode=clip-cov", f"{ACTOR}.tau_pos=2.0", f"{ACTOR}.policy_loss.dro_beta=0.1"
    )
    assert found["actor.policy_loss.loss_mode"] == "clip_cov"
    assert (found["actor.policy_loss.tau_pos"], found["actor.policy_loss.dro_beta"]) == (2.0, 0.1)
    assert values(f"{ACTOR}.policy_loss.loss_mode=sapo")["actor.loss_agg_mode"] == "seq-mean-token-mean"
    assert "actor.loss_agg_mode" not in values(f"{ACTOR}.policy_loss.loss_mode=gspo")
    assert values(f"{ACTOR}.use_token_level_loss=False")["actor.loss_agg_mode"] == "seq-mean-token-mean"


def test_the_optimisers_clip_is_the_one_that_verl_reads() -> None:
    both = (f"{ACTOR}.optim.clip_grad=0.3", f"{ACTOR}.grad_clip=0.5")
    assert values(*both)["actor.grad_clip"] == 0.3 and "grad_clip" not in notes(*both)
    assert values(both[1])["actor.grad_clip"] == 0.5 and "actor.grad_clip counts here" in notes(both[1])


def test_kl() -> None:
    found = values(
        "algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=low_var_kl+", "algorithm.kl_ctrl.type=adaptive"
    )
    assert (found["algorithm.kl_penalty"], found["algorithm.kl_ctrl.type"]) == ("low_var_kl", "adaptive")
    assert found["scoring.reference.num_gpus"] == 0.5  # shares a GPU with the critic's values
    assert "algorithm.kl_ctrl.type" not in values("algorithm.kl_ctrl.type=adaptive")
    assert "not built" in left("algorithm.kl_penalty=full")["algorithm.kl_penalty"]


def test_rejection_keeps_the_same_ratios() -> None:
    """verl's own test, -log r between the logarithms of its bounds, against ours of what it is converted to."""
    names, bounds = "token_k1,token_k2", "0.5_4.0,0.3"
    found = values(f"{CORRECTION}.rollout_rs='{names}'", f"{CORRECTION}.rollout_rs_threshold='{bounds}'")
    settings = RolloutCorrectionConfig(
        rollout_rs=found[f"{CORRECTION}.rollout_rs"], rollout_rs_threshold=found[f"{CORRECTION}.rollout_rs_threshold"]
    )
    log_ratio = np.linspace(-2.0, 2.0, 81)
    ours = correct(parse(settings), log_ratio, np.zeros(81), np.ones(81), np.array([0, 81])).keep
    verl = (-log_ratio >= np.log(0.5)) & (-log_ratio <= np.log(4.0)) & (0.5 * log_ratio**2 <= 0.3)
    assert (ours == verl).all() and 0 < verl.sum() < 81


@pytest.mark.parametrize(
    ("rules", "bounds", "ours"),
    [
        ("token_k1", "2.0", "2.0"),
        ("seq_sum_k1", "0.5_2.0", "0.5_2"),
        ("seq_mean_k1", "0.8_1.6", "0.625_1.25"),
        ("token_k3", "0.01", "0.01"),
        ("token_k1,seq_mean_k3,token_k1", "2.0", "2.0,2.0"),
    ],
)
def test_rejection_bounds(rules: str, bounds: str, ours: str) -> None:
    found = values(f"{CORRECTION}.rollout_rs='{rules}'", f"{CORRECTION}.rollout_rs_threshold='{bounds}'")
    assert found[f"{CORRECTION}.rollout_rs_threshold"] == ours


def test_thresholds_are_text() -> None:
    key = f"{CORRECTION}.rollout_is_threshold"
    assert values(f"{CORRECTION}.rollout_is=token", f"{key}=3")[key] == "3"
    assert values(f"{CORRECTION}.rollout_is=token", f"{key}='0.5_5'")[key] == "0.5_5"
    # Without quotes Hydra, and so verl, reads one number.
    assert values(f"{CORRECTION}.rollout_is=token", f"{key}=0.5_5")[key] == "0.55"
    assert "in quotes it would be two bounds" in notes(f"{key}=0.5_5")
    old = values(f"{ACTOR}.tis_imp_ratio_cap=2")
    assert (old[f"{CORRECTION}.rollout_is"], parse(RolloutCorrectionConfig("token", "2.0")).high) == ("token", 2.0)


def test_bypass_mode() -> None:
    bypass = f"{CORRECTION}.bypass_mode=true"
    found = values(bypass, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_batch_normalize=true")
    assert found["actor.old_log_probs"] == "engine"
    assert not any(ours.startswith(f"{CORRECTION}.rollout_is") for ours in found)
    plain = values(bypass, f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.loss_type=reinforce")
    assert (plain["actor.policy_loss.loss_mode"], plain[f"{CORRECTION}.rollout_is"]) == ("reinforce", "sequence")
    assert "actor.old_log_probs" not in values(f"{CORRECTION}.bypass_mode=false")
    assert "actor.policy_loss.loss_mode" not in values(bypass, f"{ACTOR}.policy_loss.loss_mode=bypass_mode")


def test_warm_up_counts_optimiser_steps() -> None:
    batch = ("data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=128", f"{ACTOR}.ppo_epochs=2")
    found = values(*batch, f"{ACTOR}.optim.lr_warmup_steps=10", "critic.optim.lr_warmup_steps=5", "critic.ppo_epochs=1")
    assert found["actor.optim.lr_warmup_steps"] == 10 * 4 * 2
    assert found["critic.optim.lr_warmup_steps"] == 5 * 4
    assert "actor.optim.lr_warmup_steps" not in values(*batch, f"{ACTOR}.optim.lr_warmup_steps=0")
    assert values(f"{ACTOR}.optim.warmup_style=cosine")["actor.optim.lr_scheduler_type"] == "cosine"


def test_critic_warm_up_ends_one_step_earlier() -> None:
    assert values("trainer.critic_warmup=10")["critic.warmup"] == 9
    assert values("trainer.critic_warmup=1")["critic.warmup"] == 0
    without = ("algorithm.adv_estimator=grpo", "trainer.critic_warmup=10")
    assert "critic.warmup" not in values(*without) and "no critic" in left(*without)["trainer.critic_warmup"]


def test_the_critic_follows_the_actor_where_verls_does() -> None:
    mode = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"
    assert "critic.loss_agg_mode" not in values(mode)  # null follows the actor's
    assert "critic.loss_agg_mode" not in values(mode, "algorithm.adv_estimator=grpo")
    assert values(mode, "critic.loss_agg_mode=token-mean")["critic.loss_agg_mode"] == "token-mean"


def test_mini_batches_divide_the_batch() -> None:
    found = values("data.train_batch_size=96", f"{ACTOR}.ppo_mini_batch_size=36", "critic.ppo_mini_batch_size=96")
    assert (found["actor.ppo_mini_batch_size"], found["critic.ppo_mini_batch_size"]) == (32, 96)
    assert values("data.train_batch_size=128")["actor.ppo_mini_batch_size"] == 128


def test_micro_batches_become_tokens() -> None:
    rows = (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=8",
        "data.max_response_length=1024",
    )
    found = values(*rows)
    assert found["actor.ppo_max_token_len_per_gpu"] == 4 * 1536
    assert found["critic.ppo_max_token_len_per_gpu"] == found["scoring.value.max_token_len"] == 8 * 1536
    assert "4 rows of 1536 tokens" in left(*rows)[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]
    # In older scripts the number is of all GPUs.
    assert values(f"{ACTOR}.ppo_micro_batch_size=64")["actor.ppo_max_token_len_per_gpu"] == 8 * 1024

    packed = values(f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=20000", *rows[:2])
    assert packed["actor.ppo_max_token_len_per_gpu"] == 20000
    assert packed["critic.ppo_max_token_len_per_gpu"] == packed["scoring.value.max_token_len"] == 32768
    long = (f"{ACTOR}.use_dynamic_bsz=True", "data.max_response_length=20480", f"{ACTOR}.use_kl_loss=True")
    assert values(*long)["scoring.reference.max_token_len"] == 20992
    assert "the longest row must fit" in notes(*long)


def test_devices_are_shared_out() -> None:
    found = values("trainer.n_gpus_per_node=8", "trainer.nnodes=2", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8")
    assert (found["trainer.num_workers"], found["rollout.num_engines"]) == (8, 8)
    assert found["trainer.use_gpu"] is True and found["rollout.num_gpus"] == 1
    assert "16 GPUs, as many as there" in notes("trainer.nnodes=2", "algorithm.adv_estimator=grpo")
    single = ("trainer.n_gpus_per_node=1", "algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=true")
    assert "3 GPUs, 2 more than there" in notes(*single)
    assert "trainer.use_gpu" not in values("trainer.n_gpus_per_node=0")


def test_unknown_numbers_of_gpus_are_assumed_and_said() -> None:
    given_keys = Settings()
    given_keys.add([Argument("trainer.nnodes=$NODES", 3, "run.sh", ("`$NODES` is read",))])
    result = convert(given_keys.settings)
    assert result.values["trainer.num_workers"] == 4
    assert result.left[0].reason.endswith("`$NODES` is read; 1 is assumed")


def test_engines() -> None:
    split = f"{ROLLOUT}.tensor_model_parallel_size"
    assert "only vLLM" in left(f"{ROLLOUT}.name=sglang")[f"{ROLLOUT}.name"]
    assert left(f"{ROLLOUT}.name=vllm", f"{split}=4") == left(f"{ROLLOUT}.name=vllm", f"{split}=1") == {}
    four = ("trainer.nnodes=2", "algorithm.adv_estimator=grpo", f"{split}=4")
    found = values(*four)
    assert (found["rollout.tensor_parallel_size"], found["rollout.num_engines"], found["rollout.num_gpus"]) == (4, 2, 1)
    assert "rollout.num_engines=2 of 4 GPUs each" in notes(*four) and "16 GPUs, as many as there" in notes(*four)
    assert values(f"{split}=1")["rollout.tensor_parallel_size"] == 1
    wide = ("trainer.nnodes=2", f"{split}=16")
    assert "a node has 8" in left(*wide)[split] and "rollout.tensor_parallel_size" not in values(*wide)
    assert "1 fewer than there" in notes("algorithm.adv_estimator=grpo", f"{split}=3")
    assert values(f"{ROLLOUT}.enable_chunked_prefill=False")["rollout.engine_kwargs"] == {
        "enable_chunked_prefill": False
    }
    assert "rollout.engine_kwargs" not in values(f"{ROLLOUT}.enable_chunked_prefill=True")


def test_the_run() -> None:
    found = values(
        "trainer.resume_mode=disable",
        "trainer.logger=[console,swanlab,wandb]",
        "trainer.experiment_name=a/b",
        "trainer.default_local_dir=/out",
        "trainer.max_actor_ckpt_to_keep=null",
        "trainer.test_freq=0",
    )
    assert (found["trainer.resume"], found["trainer.logger"]) == ("never", ["console", "wandb"])
    assert (found["trainer.experiment_name"], found["trainer.default_local_dir"]) == ("a-b", "/out")
    assert not found.keys() & {"trainer.max_ckpt_to_keep", "trainer.test_freq"}
    assert values("trainer.logger=console")["trainer.logger"] == ["console"]
    assert "own folder only" in left("trainer.resume_mode=resume_path")["trainer.resume_mode"]


def test_verls_folder_is_that_of_the_run() -> None:
    found = values("trainer.experiment_name=mine", "trainer.default_local_dir=/out/mine/")
    assert found["trainer.default_local_dir"] == "/out"
    assert "/out/mine" not in notes("trainer.experiment_name=mine", "trainer.default_local_dir=/out/mine")
    assert "/out/ckpt/mine" in notes("trainer.experiment_name=mine", "trainer.default_local_dir=/out/ckpt")


def test_words_that_are_no_settings() -> None:
    given_keys = Settings()
    words = ["python3", "-m", "verl.trainer.main_ppo", "HF_HOME=/cache", "--config-name=mine", "data.shuffle=true"]
    given_keys.add([Argument(word, 4, "run.sh") for word in words])
    given_keys.add([Argument("$EXTRA", 5, "run.sh", ("`$EXTRA` in line 5 is not assigned",))])
    assert list(given_keys.settings) == ["data.shuffle"]
    assert "--config-name=mine in line 4" in given_keys.notes[0] and "what $EXTRA holds" in given_keys.notes[1]


ODD = (
    "0",
    "-1",
    "1",
    "7",
    "1e3",
    "0.5_5",
    "true",
    "null",
    "text",
    "''",
    "[1,a]",
    "{a: 1}",
    "a:b",
    "1_2",
    "99999999999",
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*dict(RENAMED), *sorted(RULED)]), st.sampled_from(ODD)), max_size=12))
def test_odd_values_are_converted_or_left(pairs: list[tuple[str, str]]) -> None:
    result = converted(*(f"{key}={value}" for key, value in pairs))
    named = {*result.converted, *(entry.key for entry in result.left)}
    # A mapping stands for the keys inside it.
    assert {key for key, value in pairs if value != "{a: 1}"} <= named | {f"{key}.a" for key, _ in pairs}
    schema = OmegaConf.structured(Config)
    for ours, value in result.values.items():
        OmegaConf.update(schema, ours, value)


def test_what_the_engine_may_generate_is_the_length_of_a_response() -> None:
    rollout = "actor_rollout_ref.rollout"
    assert values("data.max_response_length=512", f"{rollout}.response_length=1024")["data.max_response_length"] == 1024
    assert values(f"{rollout}.prompt_length=256")["data.max_prompt_length"] == 256


def test_differences_of_meaning_are_told() -> None:
    assert "the engine sampled with" in notes("algorithm.use_kl_in_reward=True")
    assert "the engine sampled with" not in notes("algorithm.use_kl_in_reward=False")
    mode = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
    assert "the batch is padded to" in notes(mode)
    assert "the batch is padded to" not in notes(mode, f"{ACTOR}.loss_scale_factor=1024")


@pytest.mark.parametrize(
    "text", ["algorithm.adv_estimator=null", "algorithm.gamma=null", "actor_rollout_ref.rollout.engine_kwargs.vllm=3"]
)
def test_values_that_fit_nowhere_are_left(text: str) -> None:
    conversion = converted(text)
    assert [left.key for left in conversion.left] == [text.partition("=")[0]] and not conversion.converted
