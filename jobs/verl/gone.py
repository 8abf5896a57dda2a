"""verl's keys without a counterpart, as patterns, and why there is none."""

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

_ROLLOUT = "actor_rollout_ref.rollout"


class Gone(NamedTuple):
    """Keys without a counterpart."""

    pattern: str
    """Of the key, `*` standing for anything."""
    reason: str
    off: tuple[Any, ...] | None = None
    """Values with which verl does without the feature too, so that nothing is lost."""


_OFF: tuple[Any, ...] = (False, None, 0, -1, "", "null", "none", "disabled", "disable", [], {})

NOTHING_LOST = "nothing is lost"


def _feature(reason: str, *patterns: str, off: tuple[Any, ...] = _OFF) -> tuple[Gone, ...]:
    return tuple(Gone(pattern, reason, off) for pattern in patterns)


def _gone(reason: str, *patterns: str) -> tuple[Gone, ...]:
    return tuple(Gone(pattern, reason) for pattern in patterns)


GONE: tuple[Gone, ...] = (
    *_feature("there is no distillation", "distillation.enabled"),
    *_gone("there is no distillation", "distillation.*"),
    *_gone("rows travel through Ray Data", "transfer_queue.*"),
    *_gone("rollouts are not skipped", "skip.*"),
    *_gone("there is no profiler", "*profile*", "*.trace.*", "*.prometheus.*"),
    *_gone(
        "replacements are generated as soon as groups are dropped", "algorithm.filter_groups.max_inflight_gen_batches"
    ),
    *_gone("the penalty is reckoned from data.max_response_length", "*.max_resp_len"),
    *_gone("the penalty is always among the parts of the reward", "*overlong_buffer.log", "*overlong_buffer_cfg.log"),
    *_feature("rows are not resampled by preference", "algorithm.use_pf_ppo"),
    *_gone("rows are not resampled by preference", "algorithm.pf_ppo.*"),
    *_gone(
        "there are no reward managers: functions score rows one by one, or with `batch` chunk by chunk; weights, "
        "shaping and rate limits are keys of their own (docs/rewards.md)",
        "*reward_manager*",
        "*reward_loop_*",
    ),
    *_gone("rewards are computed by stages that Ray Data scales (reward.num_cpus)", "reward*.num_workers"),
    *_gone("the sandbox has limits of its own (reward.sandbox.*)", "*sandbox_fusion*"),
    *_gone("rewards are always computed beside the stream", "reward_model.launch_reward_fn_async"),
    *_gone(
        "scoring.reward_model says where a reward model runs; it reads the conversation by its own chat template",
        "reward_model.*",
        "reward.reward_model.*",
    ),
    *_gone("the reward function gets reward_kwargs and nothing else", "*reward_kwargs*", "custom_reward_function.*"),
    *_gone("data_source chooses the rule", "data.reward_fn_key"),
    *_feature(
        "responses have one turn and there are no tools",
        "actor_rollout_ref.rollout.multi_turn.*",
        "data.tool_config_path",
        "data.function_tool_path",
    ),
    *_gone("responses have one turn and there are no agent loops", "actor_rollout_ref.rollout.agent.*"),
    *_feature(
        "all weights are trained, there is no LoRA",
        "*.lora_rank",
        "*.lora.rank",
        "*.lora_adapter_path",
        "*.lora.adapter_path",
    ),
    *_gone(
        "all weights are trained, there is no LoRA", "*.lora_*", "*.lora.*", "*.target_modules", "*.exclude_modules"
    ),
    *_gone("training uses FSDP2; there is no Megatron", "*.megatron.*", "*.megatron", "model_engine", "*.mtp.*"),
    *_gone(
        "training uses FSDP2 and no other engine",
        "*.veomni.*",
        "*.torchtitan.*",
        "*.automodel.*",
        "*.deepspeed.*",
        "*.mindspeed*",
        "*.turbo_config.*",
    ),
    *_feature("training uses FSDP2 and no other engine", "*.strategy", off=("fsdp", "fsdp2")),
    *_feature(
        "weights and optimiser state stay on the GPU: more workers or bfloat16 take less of it",
        "*.param_offload",
        "*.optimizer_offload",
        "*.grad_offload",
        "*.offload_policy",
        "*.enable_activation_offload",
    ),
    *_feature(
        "a sequence is never split over GPUs; it must fit actor.ppo_max_token_len_per_gpu",
        "*ulysses_sequence_parallel_size",
        "*.context_parallel_size",
        off=(1,),
    ),
    *_feature("the model is sharded over all train workers", "*.fsdp_size", off=(-1,)),
    *_feature("rows are always packed without padding", "*.use_remove_padding", off=(True,)),
    *_gone(
        "rows are packed by tokens, for the old log-probs as for the update (actor.ppo_max_token_len_per_gpu)",
        "*micro_batch_size",
        "*micro_batch_size_per_gpu",
        "*log_prob_use_dynamic_bsz",
        "*log_prob_max_token_len_per_gpu",
        "*.use_dynamic_bsz",
        "*.forward_max_token_len_per_gpu",
    ),
    *_gone(
        "logits are always taken in pieces (actor.logits_chunk_tokens)",
        "*.entropy_from_logits_*",
        "*.entropy_checkpointing",
        "*.use_fused_kernels",
        "*.fused_kernel_options.*",
        "*.use_liger",
        "*.tiled_mlp.*",
    ),
    *_gone(
        "how the model is compiled, wrapped or padded is not a setting",
        "*.use_torch_compile",
        "*.wrap_policy.*",
        "*.forward_prefetch",
        "*.use_orig_params",
        "*.pad_to_length*",
        "*.use_no_sync_for_gradient_accumulation",
        "*.forward_only",
        "*.layered_summon",
        "*.use_shm",
    ),
    *_gone("samples share their prompt wherever it pays (model.share_prompts)", "*.use_prefix_grouper"),
    *_gone("model.dtype holds for all models", "*.model_dtype"),
    *_gone("the reference and the critic compute as the actor does", "*.dtype", "*.mixed_precision*"),
    *_gone("models are loaded as they are", "*.override_config*", "*.external_lib", "*.hf_config_path"),
    *_feature("the chat template is the tokenizer's", "*.custom_chat_template"),
    *_feature("weights are not quantised", "*.qat.*", "*.quantization*"),
    *_feature("routers of mixture models are not replayed", "*router_replay*", "*.enable_rollout_routing_replay"),
    *_feature("drafts are not used", "*.mtp"),
    *_gone(
        "model.enable_gradient_checkpointing holds for the critic, too", "critic.model.enable_gradient_checkpointing"
    ),
    *_gone("model, tokenizer and trust_remote_code of the actor hold for all", "critic.model.*", "*.ref.model.*"),
    *_feature("images, video and audio are not read", "*.freeze_vision_tower", "*.limit_images"),
    *_gone(
        "images, video and audio are not read", "data.*image*", "data.*video*", "data.*audio*", "data.*multi_modal*"
    ),
    *_gone("images, video and audio are not read", "data.mm_processor_kwargs*", "*.use_preprocessed_multimodal_input"),
    *_feature(
        "an engine is split over GPUs by rollout.tensor_parallel_size, and in no other way", "*parallel_size", off=(1,)
    ),
    *_feature("prefill and decoding share an engine", "*.disaggregation.enabled"),
    *_gone("prefill and decoding share an engine", "*.disaggregation.*"),
    *_gone(
        "a converted run gives engines GPUs of their own; rollout.sleep is for shared ones",
        "*.free_cache_engine",
        "*.multi_stage_wake_up",
    ),
    *_gone("engines get their first weights from the trainer", "*.load_format"),
    *_gone("log-probs always come with the tokens", "*.calculate_log_probs", "*.logprobs_mode"),
    *_gone("an engine's rows have data.max_prompt_length + data.max_response_length tokens", "*.max_model_len"),
    *_gone("taken from data.max_prompt_length and data.max_response_length", "*.prompt_length", "*.response_length"),
    *_gone("temperature alone decides, as in verl", "*.do_sample"),
    *_gone("engines always run in the stream", "actor_rollout_ref.rollout.mode", "*.hybrid_engine"),
    *_gone("a request is seeded by trainer.seed, its prompt and its number", "*.rollout.seed", "*.full_determinism"),
    *_gone(
        "weights travel through Ray's object store (trainer.weight_transport)",
        "*.checkpoint_engine.*",
        "*.nccl_timeout",
    ),
    *_gone("taken from rollout.n", "*.rollout_n"),
    *_gone(
        "a vLLM option of that name goes into rollout.engine_kwargs",
        "*.cudagraph_capture_sizes",
        "*.scheduling_policy",
        "*.disable_log_stats",
    ),
    *_gone("only vLLM is an engine here", "*.engine_kwargs.*", "*.engine_kwargs"),
    *_gone(
        "verl trains without the slowest responses of a batch; rollout.oversample begins more groups than are trained, "
        "and cuts off the slowest",
        "*.over_sample_rate",
    ),
    *_gone(
        "no such setting of the engines",
        f"{_ROLLOUT}.nnodes",
        f"{_ROLLOUT}.n_gpus_per_node",
        f"{_ROLLOUT}.router_config_path",
        f"{_ROLLOUT}.skip*",
        f"{_ROLLOUT}.moe_*",
    ),
    *_gone("Slipstream always optimises with AdamW", "*.optim.optimizer*", "*.optim.override_optimizer_config*"),
    *_gone("the cosine is half a wave, from the first step", "*.optim.num_cycles", "*.optim.zero_indexed_step"),
    *_gone("worked out from the length of the run", "*.optim.total_training_steps"),
    *_feature("rows stay in the order of the stream", "*.actor.shuffle", "critic.shuffle"),
    *_gone("rows stay in the order of the stream", "*.data_loader_seed", "*.fsdp_config.seed", "critic.fsdp.seed"),
    *_gone("taken from the actor", "critic.loss_scale_factor"),
    *_gone("the entropy is always measured", "*.calculate_entropy"),
    *_gone("measured where the advantage estimator needs it", "*sum_pi_squared*"),
    *_feature("the reference policy is not sharded: each replica holds all of it", "*.reshard_after_forward"),
    *_gone("checkpoints hold all that a run needs to go on", "*.checkpoint.*", "trainer.del_local_ckpt_after_load"),
    *_gone("actor and critic lie in one checkpoint (trainer.max_ckpt_to_keep)", "trainer.max_critic_ckpt_to_keep"),
    *_feature("a run continues from its own folder only", "trainer.resume_from_path"),
    *_feature("checkpoints are not copied elsewhere", "trainer.default_hdfs_dir"),
    *_gone("all trajectories are kept in the run's folder", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    *_gone("every rank gets whole chunks of equally many rows", "trainer.balance_*"),
    *_feature("there is no run that only validates", "trainer.val_only"),
    *_feature(
        "a converted run is synchronous; algorithm.max_staleness lets engines generate ahead",
        "trainer.v1.trainer_mode",
        off=("sync",),
    ),
    *_gone(
        "a converted run is synchronous; algorithm.max_staleness, rollout.update and rollout.oversample say otherwise",
        "trainer.v1.*",
        "async_training.*",
    ),
    *_gone("a choice between verl's own trainers", "trainer.use_v1", "trainer.use_legacy_worker_impl"),
    *_feature("CPUs and NVIDIA GPUs are supported (trainer.use_gpu)", "trainer.device", off=("cuda", "cpu")),
    *_gone("every wait has a deadline in trainer.deadlines", "trainer.ray_wait_register_center_timeout"),
    *_feature("the run is not told when its machine will be taken away", "trainer.esi_redundant_time"),
    *_feature("checkpoints call nobody back", "trainer.checkpoint_callback_class"),
    *_gone("validation prompts flow through the engines all at once", "data.val_batch_size", "data.validation_shuffle"),
    *_gone("chunks of rollout.chunk_prompts prompts flow through the engines", "data.gen_batch_size"),
    *_gone(
        "prompts are read as a stream",
        "data.dataloader_num_workers",
        "data.filter_overlong_prompts_workers",
        "data.cache_dir",
    ),
    *_gone("every row keeps its messages and its tokens", "data.return_*"),
    *_feature("prompts are read by the prompt source alone", "data.custom_cls.*", "data.sampler.*", "data.datagen.*"),
    *_gone(
        "a key of an older verl (see algorithm.rollout_correction)", "algorithm.rollout_is*", "algorithm.rollout_rs*"
    ),
    *_gone("Ray is started by the run, or joined by RAY_ADDRESS", "ray_kwargs.*", "ray_init.*"),
    *_gone("how Hydra itself behaves", "hydra.*"),
)
"""The first pattern that fits a key says why it has no counterpart."""

UNKNOWN = "not a key of verl that is known here"


def reason(key: str, value: Any) -> str:
    """Why `key=value` of verl has no counterpart."""
    for gone in GONE:
        if fnmatchcase(key, gone.pattern):
            # 0 and False are equal, and so are 1 and True: a type tells what was meant.
            off = gone.off is not None and any(value == other and type(value) is type(other) for other in gone.off)
            return f"{NOTHING_LOST}: {gone.reason}" if off else gone.reason
    return UNKNOWN
