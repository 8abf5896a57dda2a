"""Tables of verl's keys, each with our key or with the reason why we have none. Importing them loads nothing else.

They were read against verl 0.9.1, with keys of older versions. `python -m jobs.from_verl` converts scripts with them,
and a run that is given a key of verl's answers with them.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

_TABLE = """
data -> data: train_files val_files prompt_key train_batch_size max_prompt_length max_response_length
data -> data: filter_overlong_prompts truncation shuffle train_max_samples val_max_samples
data.seed -> trainer.seed
data.tokenizer -> model.tokenizer_path
data.trust_remote_code -> model.trust_remote_code
MODEL -> model: path tokenizer_path trust_remote_code enable_gradient_checkpointing
MODEL.enable_activation_offload -> model.activation_offload
MODEL -> model.lora: rank=lora.rank alpha=lora.alpha
MODEL -> model.lora: rank=lora_rank alpha=lora_alpha target_modules path=lora_adapter_path
MODEL.override_config.attn_implementation -> model.attn_implementation

ROLLOUT -> rollout: n temperature top_p top_k ignore_eos dtype gpu_memory_utilization max_num_seqs
ROLLOUT -> rollout: max_num_batched_tokens enable_prefix_caching enforce_eager
ROLLOUT -> data: max_prompt_length=prompt_length max_response_length=response_length
ROLLOUT.tensor_model_parallel_size -> rollout.tensor_parallel_size
ROLLOUT.val_kwargs -> rollout.val_kwargs: n temperature top_p top_k
ROLLOUT.update_weights_bucket_megabytes -> trainer.weight_bucket_mb
ROLLOUT.checkpoint_engine.update_weights_bucket_megabytes -> trainer.weight_bucket_mb

reward_model.overlong_buffer -> reward.overlong_buffer: enable len penalty_factor
reward_model.reward_kwargs.overlong_buffer_cfg -> reward.overlong_buffer: enable len penalty_factor
reward_kwargs.overlong_buffer_cfg -> reward.overlong_buffer: enable len penalty_factor
reward.reward_kwargs.overlong_buffer_cfg -> reward.overlong_buffer: enable len penalty_factor
reward_model.sandbox_fusion.url -> reward.sandbox.url
reward.sandbox_fusion.url -> reward.sandbox.url
reward_model.model.path -> reward.model.path
reward.reward_model.model_path -> reward.model.path
custom_reward_function -> reward.custom_reward_function: path name
reward.custom_reward_function -> reward.custom_reward_function: path name

algorithm -> algorithm: adv_estimator gamma lam norm_adv_by_std_in_grpo gdpo_reward_keys gdpo_reward_weights
algorithm -> algorithm: f_norm handle_zero_tail use_kl_in_reward kl_penalty
algorithm.kl_ctrl -> algorithm.kl_ctrl: type kl_coef target_kl horizon
algorithm.filter_groups -> algorithm.filter_groups: enable metric max_num_gen_batches
CORRECTION -> CORRECTION: rollout_is rollout_is_threshold rollout_is_batch_normalize rollout_rs rollout_rs_threshold

ACTOR -> actor: clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode loss_scale_factor entropy_coeff
ACTOR -> actor: use_kl_loss kl_loss_coef kl_loss_type ppo_epochs ppo_mini_batch_size grad_clip
ACTOR.policy_loss -> actor.policy_loss: loss_mode clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef
ACTOR.policy_loss -> actor.policy_loss: dro_beta
ACTOR -> actor.policy_loss: tau_pos tau_neg
ACTOR.optim -> actor.optim: lr betas weight_decay lr_scheduler_type lr_warmup_steps lr_warmup_steps_ratio min_lr_ratio
ACTOR.optim.warmup_style -> actor.optim.lr_scheduler_type
ACTOR.optim.clip_grad -> actor.grad_clip
ACTOR.fsdp_config.mixed_precision -> actor.fsdp: param_dtype reduce_dtype
ACTOR.fsdp_config -> actor.fsdp: param_dtype=dtype reshard_after_forward
ACTOR.fsdp_config.model_dtype -> model.dtype
actor_rollout_ref.ref.fsdp_config.param_offload -> scoring.reference.offload

critic.model.path -> critic.path
critic -> critic: enable cliprange_value loss_agg_mode ppo_epochs ppo_mini_batch_size grad_clip
critic.optim -> critic.optim: lr betas weight_decay lr_scheduler_type lr_warmup_steps lr_warmup_steps_ratio min_lr_ratio
critic.optim.warmup_style -> critic.optim.lr_scheduler_type
critic.optim.clip_grad -> critic.grad_clip
critic.fsdp -> critic.fsdp: param_dtype=dtype reshard_after_forward
critic.model.fsdp_config -> critic.fsdp: param_dtype=dtype reshard_after_forward

trainer -> trainer: project_name experiment_name default_local_dir total_epochs total_training_steps val_before_train
trainer -> trainer: test_freq save_freq logger resume=resume_mode max_ckpt_to_keep=max_actor_ckpt_to_keep
trainer.log_val_generations -> trainer.log_samples
trainer.critic_warmup -> critic.warmup
ray_init.num_cpus -> trainer.ray_num_cpus
ray_kwargs.ray_init.num_cpus -> trainer.ray_num_cpus
"""
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_CORRECTION, _TURNS = "algorithm.rollout_correction", f"{_ROLLOUT}.multi_turn"


def _renamed() -> Iterator[tuple[str, str]]:
    """Yield the pairs of the table, in which `ours=verl's` stands for names that differ."""
    for line in filter(None, _TABLE.splitlines()):
        for word, section in (("ACTOR", _ACTOR), ("ROLLOUT", _ROLLOUT), ("MODEL", _MODEL), ("CORRECTION", _CORRECTION)):
            line = line.replace(word, section)
        theirs, _, rest = line.partition(" -> ")
        ours, _, names = rest.partition(": ")
        if not names:
            yield theirs, ours
        for name in names.split():
            mine, _, other = name.partition("=")
            yield f"{theirs}.{other or mine}", f"{ours}.{mine}"


RENAMED: tuple[tuple[str, str], ...] = tuple(_renamed())
"""Pairs of verl's key and our key. If several keys of verl have the same counterpart, the last one counts."""

SECTIONS: tuple[tuple[str, str], ...] = (
    ("data.apply_chat_template_kwargs", "data.apply_chat_template_kwargs"),
    (f"{_ROLLOUT}.engine_kwargs.vllm", "rollout.engine_kwargs"),
    ("reward.custom_reward_function.reward_kwargs", "reward.custom_reward_function.reward_kwargs"),
    ("custom_reward_function.reward_kwargs", "reward.custom_reward_function.reward_kwargs"),
    ("ray_kwargs.ray_init.runtime_env.env_vars", "trainer.env_vars"),
)
"""Mappings that take any name inside."""

MEGATRON = {
    "tensor_model_parallel_size": "actor.parallel.tensor",
    "pipeline_model_parallel_size": "actor.parallel.pipeline",
    "context_parallel_size": "actor.parallel.sequence",
    "expert_model_parallel_size": "actor.parallel.expert",
}
"""Sizes in `actor.megatron`, and our keys for them."""

RULED: dict[str, str] = {
    "trainer.n_gpus_per_node": "trainer.num_workers, rollout.num_engines and scoring.*.num_workers",
    "trainer.nnodes": "trainer.num_workers, rollout.num_engines and scoring.*.num_workers",
    f"{_ROLLOUT}.name": "rollout.name",
    "data.image_key": "model.vision and data.image_key",
    f"{_ACTOR}.freeze_vision_tower": "model.vision",
    f"{_ROLLOUT}.enable_chunked_prefill": "rollout.engine_kwargs.enable_chunked_prefill",
    f"{_ACTOR}.tis_imp_ratio_cap": f"{_CORRECTION}.rollout_is_threshold",
    f"{_ACTOR}.use_token_level_loss": "actor.loss_agg_mode",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "actor.parallel.sequence",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": "actor.parallel.sequence",
    **{f"{_ACTOR}.megatron.{name}": ours for name, ours in MEGATRON.items()},
    f"{_ACTOR}.megatron.override_transformer_config.recompute_granularity": "model.enable_gradient_checkpointing",
    f"{_ACTOR}.megatron.optimizer_offload": "actor.fsdp.offload",
    "critic.megatron.optimizer_offload": "critic.fsdp.offload",
    "critic.ulysses_sequence_parallel_size": "actor.parallel.sequence",
    "critic.fsdp.ulysses_sequence_parallel_size": "actor.parallel.sequence",
    f"{_ACTOR}.fsdp_config.optimizer_offload": "actor.fsdp.offload",
    f"{_ACTOR}.fsdp_config.offload_policy": "actor.fsdp.offload",
    "critic.fsdp.optimizer_offload": "critic.fsdp.offload",
    "critic.fsdp.offload_policy": "critic.fsdp.offload",
    "critic.model.fsdp_config.optimizer_offload": "critic.fsdp.offload",
    "critic.model.fsdp_config.offload_policy": "critic.fsdp.offload",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "scoring.reference.max_token_len",
    "critic.forward_max_token_len_per_gpu": "scoring.value.max_token_len",
    "critic.ppo_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
    f"{_CORRECTION}.bypass_mode": "actor.old_log_probs=engine",
    f"{_CORRECTION}.loss_type": "actor.policy_loss.loss_mode",
    **dict.fromkeys(
        (f"{_TURNS}.tool_config_path", f"{_TURNS}.function_tool_path", "data.tool_config_path"), "agent.tools"
    ),
    "data.function_tool_path": "agent.tools",
    f"{_TURNS}.enable": "agent.tools or agent.environment",
    f"{_TURNS}.interaction_config_path": "agent.environment",
    f"{_TURNS}.max_assistant_turns": "agent.max_turns",
    f"{_TURNS}.max_user_turns": "agent.max_turns",
    f"{_TURNS}.max_parallel_calls": "agent.max_parallel_calls",
    f"{_TURNS}.max_tool_response_length": "agent.max_observation_tokens",
    f"{_TURNS}.tool_response_truncate_side": "agent.max_observation_tokens",
    f"{_TURNS}.format": "agent.parser",
    f"{_ROLLOUT}.agent.default_agent_loop": "agent.tools or agent.environment",
    f"{_MODEL}.lora.merge": "model.lora.weight_sync",
    "critic.model.lora_rank": "model.lora.rank",
    "critic.model.lora_alpha": "model.lora.alpha",
    "critic.model.target_modules": "model.lora.target_modules",
    "reward.reward_model.enable": "reward.model.path",
    "reward_model.enable": "reward.model.path",
}
"""Keys that have more than another name here, with our keys that `rules.py` sets for them."""

CANNOT: dict[str, str] = {
    "verl's agent loops do not run here; write an agent.environment or agent.program": (
        "actor_rollout_ref.rollout.agent.agent_loop* actor_rollout_ref.rollout.agent.custom_async_server* "
        "actor_rollout_ref.rollout.custom.* *.multi_turn.completion_callback"
    ),
    "what was sampled stays in the context as it was": "*.multi_turn.use_inference_chat_template",
    "video and audio are not read": "data.*video* data.*audio*",
    "images are processed as model.min_pixels and model.max_pixels say, or as the model's own settings do": (
        "data.*image* data.*multi_modal* data.mm_processor_kwargs* *.use_preprocessed_multimodal_input *.vision_*"
    ),
    "an adapter is model.lora.rank rows for the linear layers of model.lora.target_modules, and nothing else": (
        "*.lora_* *.lora.* *.lora *.exclude_modules *.target_parameters *.enable_lora"
    ),
    "training uses FSDP2, with the sizes of Megatron; there is no other engine": (
        "model_engine *.strategy *.veomni.* *.torchtitan.* *.automodel.* *.deepspeed.* *.mindspeed* *.turbo_config.* "
        "*.fsdp_turbo.*"
    ),
    "the trainer computes in bfloat16 or float32": "*.megatron.dtype",
    "a row is split over GPUs by actor.parallel.sequence, and in no other way": "*.context_parallel_size",
    "an engine is split over GPUs by rollout.tensor_parallel_size, and in no other way": (
        "actor_rollout_ref.rollout.*parallel_size *.disaggregation.*"
    ),
    "draft tokens are neither trained nor used": "*.mtp.* *.mtp *.speculative*",
    "weights are not quantised": "*.qat.* *.quantization* *.fp8*",
    "experts are replayed from the rows (rollout.replay_routes), not from a file": "*.router_replay.*",
    "rows are not resampled by preference": "algorithm.use_pf_ppo algorithm.pf_ppo.*",
    "the optimiser is AdamW": "*.optim.optimizer* *.optim.override_optimizer_config*",
    "prompts are read by the prompt source alone": "data.custom_cls.* data.sampler.* data.datagen.*",
    "the chat template is the tokenizer's": "*.custom_chat_template",
    "a run continues from its own folder only": "trainer.resume_from_path",
    "there is no run that only validates": "trainer.val_only",
    "functions score rows one by one, or with `batch` chunk by chunk; there are no reward managers": (
        "*reward_manager* *reward_loop_*"
    ),
    "the converted run waits for each iteration; algorithm.max_staleness lets engines generate ahead": (
        "trainer.v1.trainer_mode async_training.*"
    ),
    "checkpoints call no hooks, and are not copied elsewhere": (
        "trainer.checkpoint_callback_class trainer.default_hdfs_dir"
    ),
}
"""Features of verl that Slipstream lacks: patterns of keys (`*` stands for anything) by reason."""

LOST: dict[str, str] = {
    "teachers are replicas (teacher.*), which need no engine; they are on with distillation.enabled": "distillation.*",
    "scoring replicas, which need no memory for a backward pass, take whole rows": "*ulysses_sequence_parallel_size",
    "rows are packed by tokens (actor.ppo_max_token_len_per_gpu)": (
        "*micro_batch_size *micro_batch_size_per_gpu *log_prob_use_dynamic_bsz *log_prob_max_token_len_per_gpu "
        "*.use_dynamic_bsz *.forward_max_token_len_per_gpu *.use_remove_padding *.max_padding* trainer.balance_*"
    ),
    "weights and gradients make no room for an engine, which has a GPU of its own; actor.fsdp.offload=all and "
    "critic.fsdp.offload=all leave them in host memory during updates, too": (
        "*.param_offload *.optimizer_offload *.grad_offload *.offload_policy"
    ),
    "the model is sharded over all train workers": "*.fsdp_size *.fsdp_config.* *.fsdp.*",
    "how Megatron computes, cuts layers and stores weights is not a setting": "*.megatron.* *.megatron",
    "a prompt may have up to 64 images, as far as data.max_image_bytes allows": "*.limit_images",
    "engines keep processed images by themselves": "*.mm_processor_cache_gb",
    "logits are always taken in pieces (actor.logits_chunk_tokens)": (
        "*.entropy_from_logits_* *.entropy_checkpointing *.use_fused_kernels *.fused_kernel_options.* *.use_liger "
        "*.tiled_mlp.*"
    ),
    "how the model is compiled, wrapped or loaded is not a setting": (
        "*.use_torch_compile *.use_shm *.pad_to_length* *.layered_summon *.load_format *.external_lib *.nccl_timeout "
        "*.cudagraph_capture_sizes *.use_no_sync_for_gradient_accumulation"
    ),
    "samples share their prompt wherever it pays (model.share_prompts)": "*.use_prefix_grouper *.prefix_grouper.*",
    "the reference and the critic compute as the actor does": (
        "*.dtype *.model_dtype critic.model.* *.ref.model.* critic.loss_scale_factor"
    ),
    "models are loaded as they are": "*.override_config* *.hf_config_path",
    "a converted run gives engines GPUs of their own (rollout.sleep is for shared ones)": (
        "*.free_cache_engine *.multi_stage_wake_up *.enable_sleep_mode"
    ),
    "log-probs always come with the tokens, and the entropy is always measured": (
        "*.calculate_log_probs *.logprobs_mode *.calculate_entropy *sum_pi_squared*"
    ),
    "taken from data.max_prompt_length, data.max_response_length and rollout.n": (
        "*.max_model_len *.prompt_length *.response_length *.rollout_n *.max_resp_len"
    ),
    "temperature alone decides, as in verl": "*.do_sample",
    "engines always run in the stream": (
        "actor_rollout_ref.rollout.mode *.hybrid_engine actor_rollout_ref.rollout.nnodes transfer_queue.* "
        "actor_rollout_ref.rollout.n_gpus_per_node *.scheduling_policy *.disable_log_stats *.router_config_path "
        "actor_rollout_ref.rollout.skip* actor_rollout_ref.rollout.moe_* *.checkpoint_engine.* skip.*"
    ),
    "episodes run beside the engines": "actor_rollout_ref.rollout.agent.num_workers",
    "tokens are never encoded again, so there is nothing to compare": (
        "*.multi_turn.tokenization_sanity_check_mode data.continuous_token.*"
    ),
    "verl does not read it": "*.multi_turn.num_repeat_rollouts",
    "vLLM is the engine": "*.engine_kwargs.* *.engine_kwargs",
    "all responses are trained; algorithm.max_staleness keeps others from waiting for slow ones": "*.over_sample_rate",
    "the run is on CPUs or NVIDIA GPUs (trainer.use_gpu)": "trainer.device",
    "the schedule is worked out from the length of the run": (
        "*.optim.num_cycles *.optim.zero_indexed_step *.optim.total_training_steps *.optim.lr_decay_* "
        "*.optim.lr_warmup_init *.optim.lr_wsd_*"
    ),
    "rows stay in the order of the stream, and requests are seeded by trainer.seed": (
        "*.shuffle *.data_loader_seed *.seed *.full_determinism"
    ),
    "replacements are generated as soon as groups are dropped": "algorithm.filter_groups.max_inflight_gen_batches",
    "the penalty is always among the parts of the reward": "*overlong_buffer.log *overlong_buffer_cfg.log",
    "rewards are computed by stages that Ray Data scales (reward.num_cpus)": (
        "reward*.num_workers reward_model.launch_reward_fn_async"
    ),
    "the sandbox has limits of its own (reward.sandbox.*)": "*sandbox_fusion*",
    "scoring.reward_model says where a reward model runs": "reward_model.* reward.reward_model.*",
    "the reward function gets reward_kwargs and nothing else": "*reward_kwargs* custom_reward_function.*",
    "data_source chooses the rule": "data.reward_fn_key",
    "responses are sent to MLflow as traces (trainer.log_traces)": "*.trace.*",
    "there is no profiler or server of metrics": "*profile* *.prometheus.* *nsys*",
    "checkpoints hold all that a run needs to go on; actor and critic lie in one": (
        "*.checkpoint.* trainer.del_local_ckpt_after_load trainer.max_critic_ckpt_to_keep trainer.esi_redundant_time"
    ),
    "the trajectories and metrics of a run are kept in its folder": (
        "trainer.rollout_data_dir trainer.validation_data_dir trainer.tensorboard_dir"
    ),
    "a choice between verl's own trainers": "trainer.use_v1 trainer.v1.* trainer.use_legacy_worker_impl",
    "prompts are read as a stream, in chunks of rollout.chunk_prompts": (
        "data.val_batch_size data.validation_shuffle data.gen_batch_size data.dataloader_num_workers data.cache_dir "
        "data.filter_overlong_prompts_workers data.return_*"
    ),
    "a key of an older verl (see algorithm.rollout_correction)": "algorithm.rollout_is* algorithm.rollout_rs*",
    "Ray is started by the run, or joined by RAY_ADDRESS": "ray_kwargs.* ray_init.* trainer.ray_wait_*",
    "Hydra's own behaviour": "hydra.*",
}
"""Features that change no result, or that Slipstream does in another way: patterns of keys by reason."""

UNKNOWN = "not a key of verl that is known here"
SAME = "switched off there, or so here, too"

_OFF: tuple[Any, ...] = (False, None, 0, -1, "", "null", "none", "disabled", "disable", [], {})
_SAME: dict[str, tuple[Any, ...]] = {
    "*.strategy": ("fsdp", "fsdp2"),
    "model_engine": ("fsdp", "fsdp2", "dp"),
    "*parallel_size": (1,),
    "trainer.device": ("cuda", "cpu"),
    "trainer.v1.trainer_mode": ("sync",),
    "*reward_manager*": ("naive", "dapo", "gdpo", "register"),
    "*.megatron.dtype": ("bfloat16", "float32"),
    "*.optimizer": ("AdamW",),
    "*.optimizer_impl": ("torch.optim",),
    "*.lora_alpha": tuple(range(1, 1025)),
    "*.use_remove_padding": (True,),
    "trainer.balance_batch": (True,),
    "*.hybrid_engine": (True,),
}
"""Values with which verl does the same as Slipstream. The values of `_OFF` switch a feature off."""


def reason(key: str, value: Any = ...) -> tuple[str, bool]:
    """Return the reason why `key=value` of verl has no counterpart, and True if its loss changes what the run means."""
    for table in (CANNOT, LOST):
        for why, patterns in table.items():
            if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
                return (SAME, False) if _same_here(key, value) else (why, table is CANNOT)
    return UNKNOWN, True


def _same_here(key: str, value: Any) -> bool:
    allowed = [same for pattern, values in _SAME.items() if fnmatchcase(key, pattern) for same in values]
    # 0 and False are equal, and so are 1 and True: their types differ.
    return any(value == same and type(value) is type(same) for same in (*_OFF, *allowed))


def _roots() -> Iterator[str]:
    """Yield the sections that verl's keys begin with."""
    patterns = (pattern for table in (CANNOT, LOST) for text in table.values() for pattern in text.split())
    for key in (*dict(RENAMED), *RULED, *patterns):
        root = key.partition(".")[0]
        if "*" not in root:
            yield root


def answer(key: str) -> str | None:
    """Return the sentence that answers a key of verl's in a command of Slipstream; None for other keys."""
    ours = {**dict(RENAMED), **RULED}.get(key)
    if ours == key:
        return None
    if ours:
        return f"there is no key {key}; did you mean {ours}?"
    why, _ = reason(key)
    if why == UNKNOWN or key.partition(".")[0] not in set(_roots()):
        return None
    # A pattern with a star also fits keys that verl lacks.
    exact = any(key in text.split() for table in (CANNOT, LOST) for text in table.values())
    return f"there is no key {key}{', which verl has; ' if exact else '; of such keys in verl: '}{why}"
