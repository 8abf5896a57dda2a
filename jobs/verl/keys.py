"""verl's keys that have a counterpart, as tables: renamed with their defaults, or converted by rules.

Read against verl 0.9.1; keys of older versions that many scripts still hold are in the tables too.
"""

from typing import Any

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"


def _same(theirs: str, ours: str, names: str) -> tuple[tuple[str, str], ...]:
    """Pairs of keys with equal names in two sections."""
    return tuple((f"{theirs}.{name}", f"{ours}.{name}") for name in names.split())


_OPTIM = "lr betas weight_decay lr_scheduler_type lr_warmup_steps lr_warmup_steps_ratio min_lr_ratio"
_REWARD_FUNCTION = "custom_reward_function"

RENAMED: tuple[tuple[str, str], ...] = (
    (f"{_ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_parallel_size"),
    *_same(
        "data",
        "data",
        "train_files val_files prompt_key train_batch_size max_prompt_length max_response_length "
        "filter_overlong_prompts truncation shuffle train_max_samples val_max_samples",
    ),
    *(
        (f"{section}.{verl}.{key}", f"reward.overlong_buffer.{key}")
        for section, verl in (
            ("reward_model", "overlong_buffer"),
            ("reward_model.reward_kwargs", "overlong_buffer_cfg"),
            ("reward.reward_kwargs", "overlong_buffer_cfg"),
            ("reward_kwargs", "overlong_buffer_cfg"),
        )
        for key in ("enable", "len", "penalty_factor")
    ),
    *((f"{section}.sandbox_fusion.url", "reward.sandbox.url") for section in ("reward", "reward_model")),
    ("reward.reward_model.model_path", "reward.model.path"),
    ("reward_model.model.path", "reward.model.path"),
    # In this order: what the engine is given is what it generates.
    (f"{_ROLLOUT}.prompt_length", "data.max_prompt_length"),
    (f"{_ROLLOUT}.response_length", "data.max_response_length"),
    ("data.seed", "trainer.seed"),
    ("data.tokenizer", "model.tokenizer_path"),
    ("data.trust_remote_code", "model.trust_remote_code"),
    *_same(_MODEL, "model", "path tokenizer_path trust_remote_code enable_gradient_checkpointing"),
    (f"{_MODEL}.override_config.attn_implementation", "model.attn_implementation"),
    *_same(
        _ROLLOUT,
        "rollout",
        "n temperature top_p top_k ignore_eos dtype gpu_memory_utilization max_num_seqs max_num_batched_tokens "
        "enable_prefix_caching enforce_eager",
    ),
    *_same(f"{_ROLLOUT}.val_kwargs", "rollout.val_kwargs", "n temperature top_p top_k"),
    (f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", "trainer.weight_bucket_mb"),
    (f"{_ROLLOUT}.update_weights_bucket_megabytes", "trainer.weight_bucket_mb"),
    *_same(f"reward.{_REWARD_FUNCTION}", f"reward.{_REWARD_FUNCTION}", "path name"),
    *_same(_REWARD_FUNCTION, f"reward.{_REWARD_FUNCTION}", "path name"),
    *_same(
        "algorithm",
        "algorithm",
        "adv_estimator gamma lam norm_adv_by_std_in_grpo gdpo_reward_keys gdpo_reward_weights f_norm handle_zero_tail "
        "use_kl_in_reward kl_penalty",
    ),
    *_same("algorithm.kl_ctrl", "algorithm.kl_ctrl", "type kl_coef target_kl horizon"),
    *_same("algorithm.filter_groups", "algorithm.filter_groups", "enable metric max_num_gen_batches"),
    *_same(
        _CORRECTION,
        _CORRECTION,
        "rollout_is rollout_is_threshold rollout_is_batch_normalize rollout_rs rollout_rs_threshold",
    ),
    *_same(
        _ACTOR,
        "actor",
        "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode loss_scale_factor entropy_coeff "
        "use_kl_loss kl_loss_coef kl_loss_type ppo_epochs ppo_mini_batch_size",
    ),
    *_same(
        f"{_ACTOR}.policy_loss",
        "actor.policy_loss",
        "loss_mode clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta",
    ),
    *_same(_ACTOR, "actor.policy_loss", "tau_pos tau_neg"),
    *_same(f"{_ACTOR}.optim", "actor.optim", _OPTIM),
    (f"{_ACTOR}.optim.warmup_style", "actor.optim.lr_scheduler_type"),
    # In this order: where both are given, the optimiser's is the one that verl reads.
    (f"{_ACTOR}.grad_clip", "actor.grad_clip"),
    (f"{_ACTOR}.optim.clip_grad", "actor.grad_clip"),
    (f"{_ACTOR}.fsdp_config.reshard_after_forward", "actor.fsdp.reshard_after_forward"),
    (f"{_ACTOR}.fsdp_config.dtype", "actor.fsdp.param_dtype"),
    (f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype", "actor.fsdp.param_dtype"),
    (f"{_ACTOR}.fsdp_config.mixed_precision.reduce_dtype", "actor.fsdp.reduce_dtype"),
    (f"{_ACTOR}.fsdp_config.model_dtype", "model.dtype"),
    ("critic.enable", "critic.enable"),
    ("critic.model.path", "critic.path"),
    ("trainer.critic_warmup", "critic.warmup"),
    *_same("critic", "critic", "cliprange_value loss_agg_mode ppo_epochs ppo_mini_batch_size"),
    ("critic.grad_clip", "critic.grad_clip"),
    ("critic.optim.clip_grad", "critic.grad_clip"),
    *_same("critic.optim", "critic.optim", _OPTIM),
    ("critic.optim.warmup_style", "critic.optim.lr_scheduler_type"),
    ("critic.fsdp.reshard_after_forward", "critic.fsdp.reshard_after_forward"),
    ("critic.fsdp.dtype", "critic.fsdp.param_dtype"),
    ("critic.model.fsdp_config.reshard_after_forward", "critic.fsdp.reshard_after_forward"),
    ("critic.model.fsdp_config.dtype", "critic.fsdp.param_dtype"),
    *_same(
        "trainer",
        "trainer",
        "project_name experiment_name default_local_dir total_epochs total_training_steps val_before_train test_freq "
        "save_freq logger",
    ),
    ("trainer.resume_mode", "trainer.resume"),
    ("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
    ("trainer.log_val_generations", "trainer.log_samples"),
    ("ray_kwargs.ray_init.num_cpus", "trainer.ray_num_cpus"),
    ("ray_init.num_cpus", "trainer.ray_num_cpus"),
)
"""verl's key and ours. The value may still be changed on the way, by the rules in `convert.py`."""

SECTIONS: tuple[tuple[str, str], ...] = (
    ("data.apply_chat_template_kwargs", "data.apply_chat_template_kwargs"),
    (f"{_ROLLOUT}.engine_kwargs.vllm", "rollout.engine_kwargs"),
    (f"reward.{_REWARD_FUNCTION}.reward_kwargs", f"reward.{_REWARD_FUNCTION}.reward_kwargs"),
    (f"{_REWARD_FUNCTION}.reward_kwargs", f"reward.{_REWARD_FUNCTION}.reward_kwargs"),
    ("ray_kwargs.ray_init.runtime_env.env_vars", "trainer.env_vars"),
)
"""Mappings that take any name inside."""

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.shuffle": True,
    f"{_MODEL}.enable_gradient_checkpointing": True,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.top_p": 1.0,
    f"{_ROLLOUT}.top_k": -1,
    f"{_ROLLOUT}.dtype": "bfloat16",
    f"{_ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{_ROLLOUT}.max_num_seqs": 256,
    f"{_ROLLOUT}.max_num_batched_tokens": 8192,
    f"{_ROLLOUT}.enable_prefix_caching": True,
    f"{_ROLLOUT}.val_kwargs.n": 1,
    f"{_ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{_ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{_ROLLOUT}.val_kwargs.top_k": -1,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.entropy_coeff": 0.0,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl",
    f"{_ACTOR}.ppo_epochs": 1,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{_ACTOR}.optim.lr": 1e-6,
    f"{_ACTOR}.optim.betas": [0.9, 0.999],
    f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.optim.lr_scheduler_type": "constant",
    f"{_ACTOR}.optim.lr_warmup_steps": -1,
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    f"{_ACTOR}.optim.min_lr_ratio": 0.0,
    f"{_ACTOR}.optim.clip_grad": 1.0,
    f"{_ACTOR}.fsdp_config.dtype": "bfloat16",
    f"{_ACTOR}.fsdp_config.model_dtype": "fp32",
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.lr_scheduler_type": "constant",
    "critic.optim.clip_grad": 1.0,
    "critic.cliprange_value": 0.5,
    "critic.fsdp.dtype": "bfloat16",
    "trainer.critic_warmup": 0,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.total_epochs": 30,
    "trainer.val_before_train": True,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.logger": ["console", "wandb"],
    "trainer.resume_mode": "auto",
}
"""verl's defaults of renamed keys; where they differ from ours they are written out, so that the run means the same.
Left out: placeholders (files, model), and what concerns only speed, memory or disk."""

RULED: frozenset[str] = frozenset(
    {
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
        f"{_ROLLOUT}.name",
        f"{_ROLLOUT}.enable_chunked_prefill",
        f"{_ACTOR}.use_dynamic_bsz",
        f"{_ACTOR}.ppo_max_token_len_per_gpu",
        f"{_ACTOR}.ppo_micro_batch_size",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "critic.use_dynamic_bsz",
        "critic.ppo_max_token_len_per_gpu",
        "critic.ppo_micro_batch_size",
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.forward_max_token_len_per_gpu",
        "critic.forward_micro_batch_size",
        "critic.forward_micro_batch_size_per_gpu",
        "reward.reward_model.enable",
        "reward_model.enable",
        f"{_CORRECTION}.bypass_mode",
        f"{_CORRECTION}.loss_type",
        f"{_ACTOR}.tis_imp_ratio_cap",
        f"{_ACTOR}.use_token_level_loss",
    }
)
"""Keys that are no renaming: `convert.py` makes other keys of them."""
