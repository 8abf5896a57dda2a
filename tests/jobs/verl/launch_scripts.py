"""Launch scripts as people write them for verl, and one that should never be run."""

GRPO = """#!/usr/bin/env bash
# GRPO on GSM8K
set -xeuo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}
NNODES=${NNODES:-1}
LR=${LR:-3e-6}
max_prompt_length=$((1024 / 2))
max_response_length=$((max_prompt_length * 2))
LAUNCH=(python3)

DATA=(
    algorithm.adv_estimator=grpo
    data.train_files=${TRAIN_FILE}
    data.val_files="['$HOME/data/gsm8k/test.parquet', '/data/math/test.parquet']"
    data.train_batch_size=512      # prompts
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}
    data.filter_overlong_prompts=True
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.actor.optim.lr=${LR}
    actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.002
    actor_rollout_ref.actor.kl_loss_type=k3+
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.fsdp_config.param_offload=False
)
EXTRA=(
)
if [ "${USE_UV:-0}" != 0 ]; then
    LAUNCH=(uv run python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \\
    "${DATA[@]}" \\
    actor_rollout_ref.model.path=${MODEL_PATH} \\
    actor_rollout_ref.model.use_remove_padding=True \\
    "${ACTOR[@]}" \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 \\
    +custom_reward_function.path=/code/reward.py \\
    trainer.logger='["console","tensorboard"]' \\
    trainer.project_name='gsm8k' trainer.experiment_name=qwen_7b_$(date +%s) \\
    trainer.n_gpus_per_node=8 trainer.nnodes=${NNODES} \\
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 \\
    "${EXTRA[@]}" "$@" 2>&1 | tee run.log
"""

PPO = """
python3 -m verl.trainer.main_ppo \\
    data.train_files=/data/train.parquet data.val_files=/data/test.parquet \\
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024 \\
    data.truncation=left \\
    actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \\
    actor_rollout_ref.rollout.name=vllm \\
    critic.optim.lr=9e-6 critic.optim.lr_warmup_steps_ratio=0.05 \\
    critic.model.path=deepseek-ai/deepseek-llm-7b-chat \\
    critic.model.enable_gradient_checkpointing=True \\
    critic.ppo_max_token_len_per_gpu=98304 critic.cliprange_value=0.2 \\
    critic.fsdp.param_offload=True \\
    algorithm.lam=0.95 algorithm.use_kl_in_reward=True \\
    algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.05 \\
    trainer.critic_warmup=20 trainer.logger=console \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.total_training_steps=300 trainer.default_local_dir=/runs/ppo
"""

RLOO = """
ROLLOUT_N=8
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo_vectorized \\
    data.train_files=/data/train.parquet data.train_batch_size=60 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B \\
    actor_rollout_ref.actor.ppo_mini_batch_size=45 \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm actor_rollout_ref.actor.loss_scale_factor=1024 \\
    actor_rollout_ref.rollout.n=$ROLLOUT_N actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.val_kwargs.n=4 actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
    algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl algorithm.kl_ctrl.kl_coef=0.01 \\
    algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=3 \\
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 algorithm.rollout_correction.rollout_rs_threshold='0.8_1.6' \\
    trainer.n_gpus_per_node=2 trainer.logger=[console] trainer.resume_mode=disable
"""

DAPO = """#!/usr/bin/env bash
set -euxo pipefail
project_name='DAPO'
exp_name='DAPO-32B'
clip_ratio_low=0.2
clip_ratio_high=0.28
enable_overlong_buffer=True
overlong_buffer_len=$((1024 * 4))
train_prompt_bsz=512
gen_prompt_bsz=$((train_prompt_bsz * 3))
NNODES=${NNODES:-16}
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
CKPTS_DIR=${CKPTS_DIR:-"${RAY_DATA_HOME}/ckpts/${project_name}/${exp_name}"}
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
sp_size=8
use_dynamic_bsz=True
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length) / sp_size))
offload=True

ray job submit --no-wait --runtime-env="${RUNTIME_ENV:-env.yaml}" \\
    --working-dir "${PWD}" \\
    -- python3 -m recipe.dapo.main_dapo --config-name=dapo_trainer \\
    data.train_files="${RAY_DATA_HOME}/data/dapo-math-17k.parquet" \\
    data.prompt_key=prompt data.truncation='left' \\
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \\
    data.gen_batch_size=${gen_prompt_bsz} data.train_batch_size=${train_prompt_bsz} \\
    actor_rollout_ref.rollout.n=16 algorithm.adv_estimator=grpo \\
    actor_rollout_ref.actor.use_kl_loss=False \\
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} \\
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \\
    actor_rollout_ref.actor.clip_ratio_c=10.0 \\
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \\
    algorithm.filter_groups.max_num_gen_batches=10 \\
    actor_rollout_ref.actor.use_dynamic_bsz=${use_dynamic_bsz} \\
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=${use_dynamic_bsz} \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \\
    actor_rollout_ref.model.path="${RAY_DATA_HOME}/models/Qwen2.5-32B" \\
    +actor_rollout_ref.model.override_config.attention_dropout=0. \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.weight_decay=0.1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \\
    actor_rollout_ref.actor.grad_clip=0.5 actor_rollout_ref.actor.loss_agg_mode=token-mean \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp_size} \\
    actor_rollout_ref.rollout.max_num_batched_tokens=$((max_prompt_length + max_response_length)) \\
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \\
    reward_model.reward_manager=dapo \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=${enable_overlong_buffer} \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=${overlong_buffer_len} \\
    trainer.logger=['console','wandb'] trainer.project_name="${project_name}" trainer.experiment_name="${exp_name}" \\
    trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES}" \\
    trainer.test_freq=5 trainer.save_freq=5 trainer.total_epochs=1 \\
    trainer.default_local_dir="${CKPTS_DIR}" trainer.resume_mode=auto
"""

HOSTILE = """
touch MARK/command
$(touch MARK/substitution)
`touch MARK/backquotes`
A=$(touch MARK/assigned)
for i in 1 2 3; do touch MARK/loop; eval "touch MARK/eval"; done
B=${C:-$(touch MARK/default)}
D=("$(touch MARK/array)")
E=$((1 + $(touch MARK/arithmetic; echo 1)))
F=$((__import__))
while true; do touch MARK/while; done
trap 'touch MARK/trap' EXIT
source MARK/sourced.sh
python3 -m verl.trainer.main_ppo data.prompt_key=$(rm -rf MARK) data.train_batch_size=`rm -rf MARK` \\
    data.val_files="$A$B" \\
    data.max_prompt_length=$E data.max_response_length=$F "${D[@]}" trainer.project_name=<(touch MARK/process) \\
    algorithm.adv_estimator=sourced:run actor_rollout_ref.actor.policy_loss.loss_mode=sourced:run \\
    data.tokenizer='${oc.decode:x}' actor_rollout_ref.rollout.n='$(touch MARK/quoted)' \\
    trainer.default_local_dir='"!!python/object/apply:os.system [touch MARK/yaml]"' \\
    trainer.experiment_name="'a: {b'" \\
    algorithm.gamma=0.9
"""
