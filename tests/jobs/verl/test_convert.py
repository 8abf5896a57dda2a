"""What becomes of verl's settings beyond their names."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from jobs.verl.convert import DEFAULTS, convert
from jobs.verl.keys import RENAMED, RULED
from jobs.verl.launch import Settings
from jobs.verl.state import OURS, State
from pipeline.config import Config
from pipeline.config.algorithm import RolloutCorrectionConfig
from pipeline.train.correction import correct, parse

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION, GROUPS = "algorithm.rollout_correction", "algorithm.filter_groups"
GRPO = "algorithm.adv_estimator=grpo"


def converted(*arguments: str, unknown: Mapping[str, str] | None = None) -> State:
    verl = Settings()
    verl.add(arguments, unknown)
    return convert(verl.settings)


def values(*arguments: str) -> dict[str, Any]:
    return converted(*arguments).values


def notes(*arguments: str) -> str:
    return "\n".join(converted(*arguments).notes)


def left(*arguments: str) -> dict[str, tuple[str, bool]]:
    return {entry.key: (entry.reason, entry.cannot) for entry in converted(*arguments).left}


def test_verl_defaults_that_differ_are_written_and_no_others() -> None:
    assert DEFAULTS.keys() <= OURS.keys()
    result = converted("data.train_files=a.parquet")
    expected = {
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
    assert {ours: result.values[ours] for ours in result.defaults} == expected


def test_a_given_key_replaces_the_default_and_null_means_not_given() -> None:
    result = converted(f"{ROLLOUT}.n=4", "trainer.total_epochs=2", "trainer.total_epochs=3", "data.seed=null")
    assert (result.values["rollout.n"], result.values["trainer.total_epochs"]) == (4, 3)
    assert not result.defaults & {"rollout.n", "trainer.total_epochs"} and "trainer.seed" not in result.values


def test_a_value_that_is_not_known_is_neither_verls_default_nor_a_guess() -> None:
    keys = (f"{ROLLOUT}.n", "trainer.nnodes", "trainer.experiment_name")
    result = converted(*(f"{key}=$N" for key in keys), unknown={f"{key}=$N": "$N is read" for key in keys})
    assert not {"rollout.n", "trainer.experiment_name"} & result.values.keys()
    unknown = {entry.key: (entry.reason, entry.cannot) for entry in result.left}
    assert unknown[f"{ROLLOUT}.n"] == ("its value is not known: $N is read; give rollout.n", True)
    # A name changes nothing in the run.
    assert not unknown["trainer.experiment_name"][1]


def test_weights_that_a_loss_has_already_are_named() -> None:
    weights = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is_threshold"
    named = left(f"{CORRECTION}.bypass_mode=true", f"{weights[0]}=token", f"{weights[1]}=2")
    assert named.keys() == set(weights)
    assert all("verl does not apply it twice" in reason and not cannot for reason, cannot in named.values())


def test_values_that_are_written_otherwise_are_named() -> None:
    assert "the name of a folder, org-run" in notes("trainer.experiment_name=org/run")
    never = left("trainer.save_freq=0", "trainer.test_freq=0", "trainer.max_actor_ckpt_to_keep=3")
    assert never.keys() == {"trainer.save_freq", "trainer.test_freq"}
    (trace,) = left(f"{ROLLOUT}.trace.backend=mlflow").values()
    assert "(trainer.log_traces)" in trace[0] and not trace[1]


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        (f"{ROLLOUT}.n=many", "its value does not fit rollout.n: expected a whole number"),
        ("trainer.val_before_train=maybe", "expected true or false"),
        (f"{ACTOR}.optim.lr=[1,2]", "expected a number"),
        ("data.train_batch_size=64,128", "several values for a sweep"),
        ("~data.seed", "takes a key of verl away"),
        ("data.max_prompt_length='${data.max_response_length}'", "write the value out"),
        ("data.train_files='${oc.env:SECRET}'", "looked up in the environment"),
        ("data.train_files=a=b", "Hydra cannot read the value"),
        ("trainer.no_such=1", "not a key of verl that is known here"),
        ("trainer.nnodes=two", "not a whole number; 1 is assumed"),
        ("algorithm.gamma=null", "null is no value"),
        (f"{ROLLOUT}.engine_kwargs.vllm=3", "expected a mapping"),
        ("algorithm.kl_penalty=full", "not built"),
        ("algorithm.adv_estimator=antigravity:fly", "none of this name"),
        (f"{ACTOR}.policy_loss.loss_mode=antigravity:fly", "none of this name"),
        ("trainer.resume_mode=resume_path", "own folder only"),
        (f"{ROLLOUT}.tensor_model_parallel_size=16", "a node has 8"),
    ],
)
def test_values_that_cannot_be_taken(argument: str, part: str) -> None:
    result = converted(argument)
    ((reason, cannot),) = ((entry.reason, entry.cannot) for entry in result.left)
    assert part in reason and cannot and not result.converted
    assert "SECRET" not in str(result.values)


def test_values_are_read_with_hydras_grammar() -> None:
    found = values(
        "+data.shuffle=False",
        "++data.val_files=['a.parquet', \"b.parquet\"]",
        f"{ROLLOUT}.val_kwargs={{n: 8, temperature: 0.6}}",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        f"+{ROLLOUT}.engine_kwargs.vllm.compilation_config.level=3",
        f"+{ROLLOUT}.engine_kwargs.vllm.swap_space=4",
        "trainer.experiment_name=12",
    )
    assert found["data.shuffle"] is False and found["data.val_files"] == ["a.parquet", "b.parquet"]
    assert (found["rollout.val_kwargs.n"], found["rollout.val_kwargs.temperature"]) == (8, 0.6)
    assert found["data.apply_chat_template_kwargs"] == {"enable_thinking": False}
    assert found["rollout.engine_kwargs"] == {"compilation_config": {"level": 3}, "swap_space": 4}
    assert found["trainer.experiment_name"] == "12"


RULES = """
algorithm.adv_estimator=rloo_vectorized -> algorithm.adv_estimator=rloo
A.policy_loss.loss_mode=clip-cov -> actor.policy_loss.loss_mode=clip_cov
A.tau_pos=2.0 -> actor.policy_loss.tau_pos=2.0
A.policy_loss.loss_mode=sapo -> actor.loss_agg_mode=seq-mean-token-mean
A.policy_loss.loss_mode=gspo -> actor.loss_agg_mode=null
A.use_token_level_loss=False -> actor.loss_agg_mode=seq-mean-token-mean
A.optim.clip_grad=0.3 A.grad_clip=0.5 -> actor.grad_clip=0.3
A.policy_loss.loss_mode=cispo A.clip_ratio_low=10 -> actor.clip_ratio_low=1.0
A.clip_ratio=0.1 A.clip_ratio_high=0.3 -> actor.clip_ratio=0.1 actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.3
A.clip_ratio=0.1 A.clip_ratio_low=null -> actor.clip_ratio_low=null
A.clip_ratio_high=0.28 -> actor.clip_ratio_low=null
algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl+ -> algorithm.kl_penalty=low_var_kl
algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive -> algorithm.kl_ctrl.type=adaptive
algorithm.kl_ctrl.type=adaptive -> algorithm.kl_ctrl.type=null
reward_model.enable=True reward_model.model.path=/judge -> reward.model.path=/judge
reward_model.enable=False reward_model.model.path=/judge -> reward.model.path=null
reward_model.enable=True reward_model.model.path=/judge custom_reward_function.path=/f.py -> reward.model.path=null
C.rollout_is=token C.rollout_is_threshold=3 -> C.rollout_is_threshold='3'
A.tis_imp_ratio_cap=3 -> C.rollout_is=token C.rollout_is_threshold='3.0'
C.bypass_mode=true C.rollout_is=token -> actor.old_log_probs=engine C.rollout_is=null
C.bypass_mode=true C.loss_type=reinforce C.rollout_is=token -> actor.policy_loss.loss_mode=reinforce C.rollout_is=token
G.enable=true G.metric=seq_reward -> G.metric=score G.max_num_gen_batches=100
G.enable=true G.metric=acc G.max_num_gen_batches=7 -> G.metric=acc G.max_num_gen_batches=7
G.enable=false G.metric=acc -> G.metric=null
data.train_batch_size=512 A.ppo_mini_batch_size=128 A.ppo_epochs=2 A.optim.lr_warmup_steps=10 -> actor.W=80
data.train_batch_size=512 A.ppo_mini_batch_size=128 critic.optim.lr_warmup_steps=5 -> critic.W=20
A.optim.lr_warmup_steps=0 -> actor.W=null
trainer.critic_warmup=10 -> critic.warmup=9
algorithm.adv_estimator=grpo trainer.critic_warmup=10 -> critic.warmup=null
data.train_batch_size=96 A.ppo_mini_batch_size=36 -> actor.ppo_mini_batch_size=32
data.max_response_length=512 R.response_length=1024 -> data.max_response_length=1024
R.name=hf -> rollout.name=hf
R.name=sglang -> rollout.name=null
R.enable_rollout_routing_replay=True -> rollout.replay_routes=true
R.enable_rollout_routing_replay=False A.router_replay.mode=disabled -> rollout.replay_routes=null
A.router_replay.mode=R3 R.name=hf -> rollout.replay_routes=true rollout.name=hf
A.megatron.router_replay.mode=R2 -> rollout.replay_routes=null
data.image_key=images -> model.vision=trained
data.image_key=pictures A.freeze_vision_tower=True -> model.vision=frozen data.image_key=pictures
data.image_key=null A.freeze_vision_tower=False -> model.vision=null data.image_key=null
data.image_key=images R.name=hf -> model.vision=trained rollout.name=hf
data.image_key=images R.name=sglang -> model.vision=trained rollout.name=null
data.image_key=images actor_rollout_ref.model.lora_rank=8 -> model.vision=frozen model.lora.weight_sync=null
data.image_key=images R.engine_kwargs.vllm.disable_mm_preprocessor_cache=True -> rollout.engine_kwargs={}
actor_rollout_ref.model.lora_rank=8 R.name=vllm -> model.lora.weight_sync=adapter
actor_rollout_ref.model.lora_rank=8 R.name=hf -> model.lora.weight_sync=null rollout.name=hf
R.enable_chunked_prefill=False -> rollout.engine_kwargs={enable_chunked_prefill:false}
A.ppo_micro_batch_size_per_gpu=4 data.max_response_length=1024 -> actor.T=6144
critic.ppo_micro_batch_size_per_gpu=8 -> critic.T=8192 scoring.value.max_token_len=8192
A.ppo_micro_batch_size=64 -> actor.T=8192
A.use_dynamic_bsz=True A.T=20000 A.ppo_micro_batch_size_per_gpu=4 -> actor.T=20000 critic.T=32768
A.use_dynamic_bsz=True data.max_response_length=20480 A.use_kl_loss=True -> scoring.reference.max_token_len=20992
A.F.optimizer_offload=True A.F.param_offload=True -> actor.fsdp.offload=optimizer critic.fsdp.offload=null
A.F.offload_policy=True A.F.optimizer_offload=True -> actor.fsdp.offload=all
A.F.optimizer_offload=False A.F.param_offload=True critic.fsdp.optimizer_offload=False -> actor.fsdp.offload=null
critic.model.F.optimizer_offload=True -> critic.fsdp.offload=optimizer actor.fsdp.offload=null
critic.fsdp.offload_policy=True -> critic.fsdp.offload=all
M.enable_activation_offload=True -> model.activation_offload=true
A.use_kl_loss=True REF.param_offload=True -> S.placement=train_workers S.offload=true S.num_workers=null
A.use_kl_loss=True REF.param_offload=False -> S.placement=null S.offload=null S.num_gpus=0.5
A.use_kl_loss=True algorithm.use_kl_in_reward=True REF.param_offload=True -> S.placement=null S.offload=null
A.use_kl_loss=True M.lora_rank=8 REF.param_offload=True -> S.placement=null S.offload=null
REF.param_offload=True -> S.placement=null S.offload=null
trainer.resume_mode=disable trainer.logger=[console,swanlab] -> trainer.resume=never trainer.logger=[console]
trainer.logger=console trainer.test_freq=0 -> trainer.logger=[console] trainer.test_freq=null
trainer.experiment_name=a/b trainer.default_local_dir=/out -> trainer.experiment_name=a-b trainer.default_local_dir=/out
trainer.experiment_name=mine trainer.default_local_dir=/out/mine/ -> trainer.default_local_dir=/out
"""
WORDS = {r"\bA\.": f"{ACTOR}.", r"\bR\.": f"{ROLLOUT}.", r"\bC\.": f"{CORRECTION}.", r"\bG\.": f"{GROUPS}."}
WORDS |= {r"\bREF\.": "actor_rollout_ref.ref.fsdp_config.", r"\bM\.": "actor_rollout_ref.model."}
WORDS |= {r"\bF\.": "fsdp_config."}
WORDS |= {r"\bS\.": "scoring.reference.", r"\.W=": ".optim.lr_warmup_steps=", r"\.T=": ".ppo_max_token_len_per_gpu="}


@pytest.mark.parametrize("rule", RULES.strip().splitlines())
def test_rules(rule: str) -> None:
    """What verl is given -> what becomes of it; null stands for our default."""
    for word, meaning in WORDS.items():
        rule = re.sub(word, meaning, rule)
    arguments, _, expected = rule.partition(" -> ")
    found = values(*arguments.split())
    for key, _, value in (pair.partition("=") for pair in expected.split()):
        assert found.get(key) == yaml.safe_load(value.replace(":", ": "))


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
    same = values(f"{CORRECTION}.rollout_rs='token_k1,seq_mean_k3'", f"{CORRECTION}.rollout_rs_threshold='2.0'")
    assert same[f"{CORRECTION}.rollout_rs_threshold"] == "2.0,2.0"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # workers, engines, chunk, replicas of each pool and their share of a GPU
        ([GRPO], (4, 4, 16, None, None)),
        ([GRPO, f"{ACTOR}.use_kl_loss=True"], (4, 3, 16, 1, 1.0)),
        ([GRPO, f"{ACTOR}.use_kl_loss=True", f"{ROLLOUT}.tensor_model_parallel_size=2"], (4, 1, 16, 2, 1.0)),
        (["trainer.nnodes=2", "algorithm.use_kl_in_reward=True", "data.train_batch_size=512"], (8, 6, 16, 2, 0.5)),
        # 8 does not divide 60, 6 does.
        (
            [GRPO, "trainer.nnodes=2", "data.train_batch_size=60", f"{ACTOR}.ppo_mini_batch_size=60"],
            (6, 10, 2, None, None),
        ),
        # One GPU of verl's becomes three, one for each kind.
        ([GRPO, "trainer.n_gpus_per_node=1", f"{ACTOR}.use_kl_loss=True"], (1, 1, 16, 1, 1.0)),
    ],
)
def test_devices_are_shared_out(arguments: list[str], expected: tuple[Any, ...]) -> None:
    result = converted(*arguments)
    found = result.values
    names = ("trainer.num_workers", "rollout.num_engines", "rollout.chunk_prompts", "scoring.reference.num_workers")
    defaults = [1, 1, OURS["rollout.chunk_prompts"].default, None]
    got = [found.get(name, default) for name, default in zip(names, defaults, strict=True)]
    if expected[3] is not None:
        got[3] = got[3] or OURS["scoring.reference.num_workers"].default
    assert (*got, found.get("scoring.reference.num_gpus")) == expected
    assert found["trainer.use_gpu"] is True and found["rollout.num_gpus"] == 1
    assert "GPUs" in "".join(result.notes)


ODD = ["0", "-1", "7", "1e3", "0.5_5", "true", "null", "text", "''", "[1,a]", "{a: 1}", "a:b", "1_2", "99999999999"]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([*dict(RENAMED), *sorted(RULED)]), st.sampled_from(ODD)), max_size=12))
def test_odd_values_are_converted_or_left(pairs: list[tuple[str, str]]) -> None:
    result = converted(*(f"{key}={value}" for key, value in pairs))
    named = {*result.converted, *(entry.key for entry in result.left)}
    # A mapping stands for the keys inside it.
    assert {key for key, value in pairs if value != "{a: 1}"} <= named | {f"{key}.a" for key, _ in pairs}
    schema = OmegaConf.structured(Config)
    for ours, value in result.values.items():
        OmegaConf.update(schema, ours, value)
