"""Each impossible combination is refused with its keys and its arithmetic, and nothing else is."""

from typing import cast

import pytest
from omegaconf import OmegaConf

from pipeline.config import Config, ConfigError
from pipeline.derived import uses_filter
from pipeline.plan.checks import check
from pipeline.prompts.generator import Generator
from pipeline.prompts.sampler import Sampler

GOOD = ["data.train_files=train.parquet", "model.path=owner/model", "data.val_files=test.parquet"]
DEFAULTS = OmegaConf.structured(Config)


def good(*overrides: str) -> Config:
    """Settings that pass, with `overrides` laid over them; many times faster than composing files."""
    merged = OmegaConf.merge(DEFAULTS, OmegaConf.from_dotlist([*GOOD, *overrides]))
    config = cast(Config, OmegaConf.to_object(merged))
    for learner in (config.actor, config.critic):
        learner.optim.betas = cast(tuple[float, float], tuple(learner.optim.betas))
    return config


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(good(*overrides))
    return str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        *("agent.hosts=-1", "actor.parallel.expert=0", "trainer.deadlines.rows=-1", "trainer.deadlines.collective=-1"),
        *("agent.episode_timeout_s=-1", "agent.reset_timeout_s=-1", "rollout.max_num_seqs=0", "rollout.n=0"),
    ],
)
@pytest.mark.parametrize("more", [(), ("agent.environment=my_game:Game",)])
def test_a_value_outside_its_bounds_is_one_problem(override: str, more: tuple[str, ...]) -> None:
    found = refusal(override, *more)
    assert found.startswith(f"{override} must be ") and "\n" not in found


class Mine(Sampler):
    def shares(self, iteration):
        return self.data.source_weights


class Made(Generator):
    pass


WEIGHTS = "data.source_weights.a=1 data.source_weights.b=0.5"
MADE = f"data.generator={__name__}:Made"
ALONE = "model.lora.rank=4 model.lora.weight_sync=adapter"
SPLIT = "rollout.tensor_parallel_size=2 rollout.num_gpus=1"
GROUPS = "algorithm.filter_groups.enable=true"


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "rollout.sleep=true rollout.num_gpus=0.4 trainer.use_gpu=true trainer.gpus_per_worker=0.6",
        "trainer.gpus_per_worker=0.6 trainer.use_gpu=true trainer.num_workers=2",
        "trainer.gpus_per_worker=0.5 trainer.use_gpu=true",
        "trainer.use_gpu=true actor.fsdp.offload=all model.activation_offload=true "
        "model.enable_gradient_checkpointing=true critic.fsdp.offload=all",
        "rollout.num_engines=2 rollout.min_engines=1 rollout.max_engines=4",
        f"data.sampler=weighted {WEIGHTS}",
        f"data.sampler={__name__}:Mine {WEIGHTS} data.sampler_kwargs.x=1",
        "data.sampler=solve_rate data.sampler_kwargs.least=0.2",
        f"{MADE} data.generator_kwargs.x=1",
        f"{MADE} data.train_files=null trainer.total_training_steps=5",
        f"{GROUPS} algorithm.filter_groups.metric=acc",
        "trainer.max_log_prob_gap=1e-3",
        f"{ALONE} rollout.weight_update=in_flight algorithm.max_staleness=1 model.lora.target_modules=[q_proj]",
    ],
)
def test_what_fits_passes(overrides):
    check(good(*overrides.split()))


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("model.path=null", "model.path"),
        ("model.lora.path=adapters/one", "model.lora.path"),
        ("model.lora.weight_sync=adapter", "model.lora.weight_sync"),
        (f"{ALONE} model.lora.rank=513", "model.lora.rank model.lora.weight_sync"),
        ("model.lora.rank=4 model.lora.target_modules=[]", "model.lora.target_modules"),
        ("model.lora.rank=4 model.lora.target_modules='*('", "model.lora.target_modules"),
        ("model.lora.rank=4 model.lora.path=nowhere", "model.lora.path"),
        ("trainer.weight_transport=delta", "trainer.weight_transport delta object_store"),
        (f"{ALONE} rollout.engine_kwargs.load_format=dummy", "rollout.engine_kwargs.load_format"),
        (f"{ALONE} algorithm.adv_estimator=optimal_token_baseline", "model.lora.weight_sync algorithm.adv_estimator"),
        ("model.path=./nowhere", "model.path"),
        ("data.train_files=null", "data.train_files"),
        ("data.val_files=null trainer.test_freq=5", "trainer.test_freq data.val_files"),
        ("data.train_batch_size=100 rollout.chunk_prompts=16", "data.train_batch_size"),
        ("data.train_batch_size=8 rollout.chunk_prompts=16", "data.train_batch_size"),
        ("data.train_batch_size=64 trainer.num_workers=3", "data.train_batch_size trainer.num_workers"),
        ("actor.ppo_mini_batch_size=48", "actor.ppo_mini_batch_size"),
        (
            "actor.ppo_mini_batch_size=16 trainer.num_workers=2 rollout.chunk_prompts=16",
            "actor.ppo_mini_batch_size trainer.num_workers",
        ),
        ("data.max_prompt_length=16000", "data.max_prompt_length"),
        ("rollout.n=0", "rollout.n"),
        ("data.truncation=cut", "data.truncation"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas"),
        ("trainer.logger=[console,abacus]", "trainer.logger"),
        ("trainer.experiment_name=a/b", "trainer.experiment_name"),
        ("trainer.experiment_name=x{no.key}/", "trainer.experiment_name"),
        (f"trainer.experiment_name={'n' * 201}", "trainer.experiment_name"),
        ("trainer.best_metric=acc", "trainer.best_metric"),
        ("trainer.placement.engines.role=gpu", "trainer.placement.engines"),
        ("trainer.deadlines.collective=3600", "trainer.deadlines.collective"),
        ("trainer.deadlines.rows=100", "trainer.deadlines.rows"),
        ("trainer.storage_path=nosuch://bucket", "trainer.storage_path"),
        (
            "trainer.gpus_per_worker=0.5 trainer.use_gpu=true trainer.num_workers=2",
            "trainer.gpus_per_worker trainer.num_workers",
        ),
        (
            "trainer.max_log_prob_gap=1e-3 algorithm.max_staleness=1",
            "trainer.max_log_prob_gap algorithm.max_staleness",
        ),
        ("rollout.max_num_batched_tokens=100", "rollout.max_num_batched_tokens"),
        (
            "actor.parallel.tensor=2 actor.parallel.expert=4 trainer.num_workers=4",
            "actor.parallel.expert actor.parallel.tensor",
        ),
        ("rollout.num_gpus=2", "rollout.num_gpus"),
        ("rollout.tensor_parallel_size=2", "rollout.tensor_parallel_size"),
        ("rollout.tensor_parallel_size=2 rollout.num_gpus=0.5", "rollout.tensor_parallel_size rollout.num_gpus"),
        (f"{SPLIT} rollout.max_engines=2", "rollout.tensor_parallel_size rollout.max_engines"),
        (
            f"{SPLIT} rollout.engine_kwargs.tensor_parallel_size=2",
            "rollout.engine_kwargs.tensor_parallel_size rollout.tensor_parallel_size",
        ),
        ("rollout.num_gpus=1 rollout.gpu_memory_utilization=0", "rollout.gpu_memory_utilization"),
        ("rollout.dtype=float16", "rollout.dtype"),
        ("rollout.min_tokens=513", "rollout.min_tokens"),
        ("rollout.stop=['']", "rollout.stop"),
        ("rollout.min_engines=2", "rollout.num_engines rollout.min_engines"),
        ("rollout.num_engines=3 rollout.max_engines=2", "rollout.num_engines rollout.max_engines"),
        ("rollout.sleep=true", "rollout.sleep"),
        (
            "actor.fsdp.offload=all",
            "actor.fsdp.offload",
        ),
        ("algorithm.adv_estimator=gae critic.fsdp.offload=optimizer", "critic.fsdp.offload"),
        ("model.activation_offload=true trainer.use_gpu=true", "model.activation_offload"),
        (
            "model.activation_offload=true model.enable_gradient_checkpointing=true",
            "model.activation_offload",
        ),
        (
            "rollout.sleep=true rollout.num_gpus=0.4 rollout.engine_kwargs.enable_sleep_mode=1",
            "rollout.engine_kwargs.enable_sleep_mode rollout.sleep",
        ),
        ("rollout.sleep=true rollout.num_gpus=0.5 algorithm.max_staleness=1", "rollout.sleep algorithm.max_staleness"),
        ("data.sampler=wieghted", "data.sampler"),
        ("data.sampler=operator:add", "data.sampler"),
        ("data.sampler=json:dumps", "data.sampler"),
        ("data.sampler=weighted", "data.sampler"),
        (WEIGHTS, "data.source_weights"),
        (f"data.sampler=solve_rate {WEIGHTS}", "data.source_weights data.sampler"),
        ("data.sampler=weighted data.source_weights.a=0", "data.source_weights"),
        (f"data.sampler=weighted {WEIGHTS} data.source_weights.c=-1", "data.source_weights"),
        ("data.sampler_kwargs.least=0.1", "data.sampler_kwargs"),
        ("data.generator_kwargs.a=1", "data.generator_kwargs"),
        ("data.generator=made", "data.generator"),
        (f"{MADE} data.train_files=null", "data.generator data.train_files"),
        (
            f"{MADE} data.train_files=null trainer.total_training_steps=5 data.sampler=solve_rate",
            "data.sampler data.train_files",
        ),
        (f"{GROUPS} rollout.n=1 algorithm.adv_estimator=gae", "algorithm.filter_groups.enable rollout.n"),
        (
            f"{GROUPS} algorithm.filter_groups.metric=''",
            "algorithm.filter_groups.enable algorithm.filter_groups.metric",
        ),
        (f"{GROUPS} algorithm.filter_groups.surplus=carry", "algorithm.filter_groups.surplus"),
        (f"{GROUPS} {MADE}", "algorithm.filter_groups.enable data.generator"),
        (f"{GROUPS} data.sampler=solve_rate", "algorithm.filter_groups.enable data.sampler"),
    ],
)
def test_refused_with_keys_and_arithmetic(overrides, keys, named):
    sentence = refusal(*overrides.split())
    assert "\n" not in sentence
    named(sentence, keys)


def test_a_replay_filters_nothing(named):
    config = good(GROUPS)
    assert uses_filter(config)
    config.data.recorded_run = "runs/x"
    assert not uses_filter(config)
    with pytest.raises(ConfigError) as refused:
        check(config)
    named(refused.value, "algorithm.filter_groups.enable data.recorded_run")


def test_all_problems_at_once():
    sentence = refusal("rollout.n=1", "actor.clip_ratio_c=0.5", "data.truncation=cut")
    assert sentence.startswith("3 settings") and sentence.count("\n- ") == 3


def test_model_folder_needs_config_and_tokenizer(tmp_path, named):
    path = f"model.path={tmp_path}"
    named(refusal(path), f"{path} config.json")
    (tmp_path / "config.json").write_text("{}")
    named(refusal(path), f"{path} tokenizer")
    (tmp_path / "tokenizer.json").write_text("{}")
    check(good(path))
    (tmp_path / "config.json").write_text("{")
    named(refusal(path), "config.json")


def test_packages_that_are_not_installed(monkeypatch, named):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "vllm" else None)
    named(refusal("trainer.logger=[wandb]"), "trainer.logger wandb")
    named(refusal("trainer.weight_transport=nixl", "trainer.logger=[]"), "trainer.weight_transport=nixl")
    small = "actor.optim.name=adamw_8bit"
    named(refusal(small, "trainer.logger=[]"), f"{small} torchao")
    named(refusal("model.lora.rank=8", "trainer.logger=[]"), "model.lora.rank=8 peft")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    check(good(small))
    named(
        refusal(small, "actor.fsdp.offload=optimizer", "trainer.use_gpu=true"), f"{small} actor.fsdp.offload=optimizer"
    )
    check(good("trainer.weight_transport=nixl", "trainer.num_workers=2", "trainer.logger=[wandb]"))
    named(refusal(*ALONE.split(), "trainer.weight_transport=nixl"), "model.lora.weight_sync trainer.weight_transport")


def test_nixl_needs_memory_that_it_can_register(monkeypatch, named):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    segments = "trainer.env_vars.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    named(refusal("trainer.weight_transport=nixl", segments), "trainer.env_vars.PYTORCH_CUDA_ALLOC_CONF")
    check(good(segments))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    named(refusal("trainer.weight_transport=nixl"), "PYTORCH_ALLOC_CONF expandable_segments:True")
    check(good())


EPISODES = "agent.program=a:run agent.max_contexts=3 data.max_prompt_length=10 data.max_response_length=30 "


def test_an_episode_that_does_not_fit_into_a_pass_is_refused_where_its_contexts_must_pass_together(named):
    tight, whole = "actor.ppo_max_token_len_per_gpu=119", "actor.policy_loss.loss_mode=gspo"
    bypass = "actor.old_log_probs=engine algorithm.rollout_correction.rollout_is=token actor.policy_loss.loss_mode="
    for setting in (whole, "actor.loss_agg_mode=seq-mean-token-mean", bypass + "reinforce"):
        named(refusal(*EPISODES.split(), tight, *setting.split()), f"agent.max_contexts {tight}")
        check(good(*EPISODES.split(), "actor.ppo_max_token_len_per_gpu=120", *setting.split()))
    check(good(*EPISODES.split(), tight))
    shared = ["actor.parallel.sequence=2", "trainer.num_workers=2", "actor.ppo_max_token_len_per_gpu=60", whole]
    check(good(*EPISODES.split(), *shared))
    check(good(*EPISODES.split(), tight, "actor.old_log_probs=recompute"))
    check(good(*EPISODES.split(), tight, whole, "agent.max_contexts=2"))
    critic = "algorithm.adv_estimator=gae actor.loss_agg_mode=seq-mean-token-mean actor.ppo_max_token_len_per_gpu=150"
    tight_critic = "critic.ppo_max_token_len_per_gpu=119"
    named(refusal(*EPISODES.split(), *critic.split(), tight_critic), f"agent.max_contexts {tight_critic}")
