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


class Mine(Sampler):
    def shares(self, iteration):
        return self.data.source_weights


class Made(Generator):
    pass


WEIGHTS = "data.source_weights.a=1 data.source_weights.b=0.5"
MADE = f"data.generator={__name__}:Made"
ALONE = "model.lora.rank=4 model.lora.publish=adapter"
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
        f"{ALONE} rollout.update=in_flight algorithm.max_staleness=1 model.lora.target_modules=[q_proj]",
    ],
)
def test_what_fits_passes(overrides):
    check(good(*overrides.split()))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("model.path=null", "model.path is not set"),
        ("model.lora.path=adapters/one", "model.lora.path=adapters/one does nothing with model.lora.rank=0"),
        ("model.lora.publish=adapter", "model.lora.publish=adapter does nothing with model.lora.rank=0"),
        (f"{ALONE} model.lora.rank=513", "model.lora.rank=513 is more than the 512 of an engine's adapter"),
        ("model.lora.rank=4 model.lora.target_modules=[]", "model.lora.target_modules=[] must be all-linear, a list"),
        ("model.lora.rank=4 model.lora.target_modules='*('", "must be all-linear, a list of names or a regular"),
        ("model.lora.rank=4 model.lora.path=nowhere", "holds no adapter_config.json and no adapter_model.safetensors"),
        ("trainer.weight_transport=delta", "must be one of object_store, nixl; delta was removed: it saved bytes and"),
        (f"{ALONE} rollout.engine_kwargs.load_format=dummy", "engine_kwargs.load_format is set by model.lora"),
        (f"{ALONE} algorithm.adv_estimator=optimal_token_baseline", "whose replicas of the policy read whole weights"),
        ("model.path=./nowhere", "there is no folder"),
        ("data.train_files=null", "data.train_files is not set"),
        ("data.val_files=null trainer.test_freq=5", "data.val_files is not set"),
        ("data.train_batch_size=100", "100 = 6 x rollout.chunk_prompts=16 + 4; set data.train_batch_size to 96 or 112"),
        ("data.train_batch_size=8", "set data.train_batch_size to 16"),
        ("data.train_batch_size=64 trainer.num_workers=3", "64 / 16 = 4 chunks"),
        ("actor.ppo_mini_batch_size=48", "1024 = 21 x 48 + 16"),
        ("actor.ppo_mini_batch_size=16 trainer.num_workers=2", "16 x 2 = 32"),
        ("data.max_prompt_length=16000", "16000 + 512 = 16512 tokens"),
        ("rollout.n=0", "rollout.n=0 must be at least 1"),
        ("data.truncation=cut", "error, left, right, middle"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas=[0.9] must be 2 numbers"),
        ("trainer.logger=[console,abacus]", "abacus is not known"),
        ("trainer.experiment_name=a/b", "slash"),
        ("trainer.experiment_name=x{no.key}/", "x{no.key}/"),
        (f"trainer.experiment_name={'n' * 201}", "or have more than 200 bytes"),
        ("trainer.best_metric=acc", "trainer.test_freq=-1 and trainer.save_freq=-1 to numbers"),
        ("trainer.placement.engines.role=gpu", "there is no such stage; there are: prompts, rollout"),
        ("trainer.deadlines.collective=3600", "above trainer.deadlines.rows=3600"),
        ("trainer.deadlines.rows=100", "900 + 1800 = 2700 seconds"),
        ("trainer.storage_path=nosuch://bucket", "trainer.storage_path: 'nosuch://bucket' is on no file system"),
        ("trainer.gpus_per_worker=0.5 trainer.use_gpu=true trainer.num_workers=2", "which NCCL refuses"),
        (
            "trainer.max_log_prob_gap=1e-3 algorithm.max_staleness=1",
            "trainer.max_log_prob_gap=0.001 with algorithm.max",
        ),
        ("rollout.max_num_batched_tokens=100", "rollout.max_num_batched_tokens=100 is below rollout.max_num_seqs=256"),
        (
            "actor.parallel.tensor=2 actor.parallel.expert=4 trainer.num_workers=4",
            "actor.parallel.expert=4 must be 1 or actor.parallel.tensor=2",
        ),
        ("rollout.num_gpus=2", "set rollout.num_gpus=1 and rollout.tensor_parallel_size"),
        ("rollout.tensor_parallel_size=2", "rollout.num_gpus=0; set that to 1"),
        ("rollout.tensor_parallel_size=2 rollout.num_gpus=0.5", "of which each part needs one"),
        (f"{SPLIT} rollout.max_engines=2", "an elastic pool cannot hold engines of several GPUs"),
        (f"{SPLIT} rollout.engine_kwargs.tensor_parallel_size=2", "is set by rollout.tensor_parallel_size"),
        ("rollout.num_gpus=1 rollout.gpu_memory_utilization=0", "leaves a GPU engine no memory"),
        ("rollout.dtype=float16", "is not supported by a CPU engine"),
        ("rollout.min_tokens=513", "rollout.min_tokens=513 is above data.max_response_length=512"),
        ("rollout.stop=['']", "rollout.stop holds ''; it must be a list of texts that end a response"),
        ("rollout.min_engines=2", "rollout.num_engines=1, with which the run starts, must lie between"),
        ("rollout.num_engines=3 rollout.max_engines=2", "rollout.min_engines=3 and rollout.max_engines=2"),
        ("rollout.sleep=true", "is for engines on GPUs"),
        (
            "actor.fsdp.offload=all",
            "leaves a GPU's training state in host memory, and trainer.use_gpu=false",
        ),
        ("algorithm.adv_estimator=gae critic.fsdp.offload=optimizer", "critic.fsdp.offload=optimizer leaves"),
        ("model.activation_offload=true trainer.use_gpu=true", "and model.enable_gradient_checkpointing=false; set it"),
        (
            "model.activation_offload=true model.enable_gradient_checkpointing=true",
            "from a GPU to host memory, and trainer.use_gpu=false; leave it out",
        ),
        ("rollout.sleep=true rollout.num_gpus=0.4 rollout.engine_kwargs.enable_sleep_mode=1", "set by rollout.sleep"),
        ("rollout.sleep=true rollout.num_gpus=0.5 algorithm.max_staleness=1", "engines that generate ahead are awake"),
        ("data.sampler=wieghted", "data.sampler 'wieghted' is unknown. Did you mean 'weighted'"),
        ("data.sampler=operator:add", "not a class derived from pipeline.prompts.sampler.Sampler"),
        ("data.sampler=json:dumps", "data.sampler 'json:dumps': it is called with data and seed: too many"),
        ("data.sampler=weighted", "data.sampler=weighted needs data.source_weights"),
        (WEIGHTS, "data.source_weights does nothing with data.sampler=uniform"),
        (f"data.sampler=solve_rate {WEIGHTS}", "does nothing with data.sampler=solve_rate"),
        ("data.sampler=weighted data.source_weights.a=0", "one of them above 0"),
        (f"data.sampler=weighted {WEIGHTS} data.source_weights.c=-1", "weights must be at least 0"),
        ("data.sampler_kwargs.least=0.1", "does nothing with data.sampler=uniform"),
        ("data.generator_kwargs.a=1", "does nothing without data.generator"),
        ("data.generator=made", "data.generator 'made' is no import path"),
        (f"{MADE} data.train_files=null", "set trainer.total_training_steps"),
        (
            f"{MADE} data.train_files=null trainer.total_training_steps=5 data.sampler=solve_rate",
            "data.sampler=solve_rate chooses among the prompts of data.train_files",
        ),
        (f"{GROUPS} rollout.n=1 algorithm.adv_estimator=gae", "compares the responses of a group, and rollout.n=1"),
        (f"{GROUPS} algorithm.filter_groups.metric=''", "needs algorithm.filter_groups.metric"),
        (f"{GROUPS} algorithm.filter_groups.surplus=carry", "algorithm.max_staleness=0 forbids"),
        (f"{GROUPS} {MADE}", "data.generator makes those of an iteration"),
        (f"{GROUPS} data.sampler=solve_rate", "groups that agree are not recorded"),
    ],
)
def test_refused_with_keys_and_arithmetic(overrides, words):
    sentence = refusal(*overrides.split())
    assert words in sentence and "\n" not in sentence


def test_a_replay_filters_nothing():
    config = good(GROUPS)
    assert uses_filter(config)
    config.data.recorded_run = "runs/x"
    assert not uses_filter(config)
    with pytest.raises(ConfigError, match="a replay has only the groups of its recording"):
        check(config)


def test_all_problems_at_once():
    sentence = refusal("rollout.n=1", "actor.clip_ratio_c=0.5", "data.truncation=cut")
    assert sentence.startswith("3 settings") and sentence.count("\n- ") == 3


def test_model_folder_needs_config_and_tokenizer(tmp_path):
    path = f"model.path={tmp_path}"
    assert "holds no config.json" in refusal(path)
    (tmp_path / "config.json").write_text("{}")
    assert f"model.path={tmp_path} holds no tokenizer" in refusal(path)
    (tmp_path / "tokenizer.json").write_text("{}")
    check(good(path))
    (tmp_path / "config.json").write_text("{")
    assert "is not valid JSON" in refusal(path)


def test_packages_that_are_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install wandb" in refusal("trainer.logger=[wandb]")
    assert "on every node: pip install nixl" in refusal("trainer.weight_transport=nixl", "trainer.logger=[]")
    small = "actor.optim.name=adamw_8bit"
    assert f"{small} needs the Python package torchao" in refusal(small, "trainer.logger=[]")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    check(good(small))
    both = refusal(small, "actor.fsdp.offload=optimizer", "trainer.use_gpu=true")
    assert f"{small} with actor.fsdp.offload=optimizer" in both
    check(good("trainer.weight_transport=nixl", "trainer.num_workers=2", "trainer.logger=[wandb]"))
    alone = refusal(*ALONE.split(), "trainer.weight_transport=nixl")
    assert "model.lora.publish=adapter and trainer.weight_transport=nixl" in alone


def test_nixl_needs_memory_that_it_can_register(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    segments = "trainer.env_vars.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert "nixl cannot register memory" in refusal("trainer.weight_transport=nixl", segments)
    check(good(segments))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    found = refusal("trainer.weight_transport=nixl")
    assert "PYTORCH_ALLOC_CONF of the environment=expandable_segments:True" in found
    check(good())


EPISODES = "agent.program=a:run agent.max_contexts=3 data.max_prompt_length=10 data.max_response_length=30 "


def test_an_episode_that_does_not_fit_into_a_pass_is_refused_where_its_contexts_must_pass_together():
    tight, whole = "actor.ppo_max_token_len_per_gpu=119", "actor.policy_loss.loss_mode=gspo"
    wanted = (
        "the longest episode has agent.max_contexts x (data.max_prompt_length + data.max_response_length) = 3 x (10 + "
        "30) = 120 tokens, which the loss of the actor needs in one forward pass, more than actor.ppo_max_token_len_per"
        "_gpu=119; raise it, or choose"
    )
    bypass = "actor.old_log_probs=engine algorithm.rollout_correction.rollout_is=token actor.policy_loss.loss_mode="
    for setting in (whole, "actor.loss_agg_mode=seq-mean-token-mean", bypass + "reinforce"):
        assert wanted in refusal(*EPISODES.split(), tight, *setting.split()), setting
        check(good(*EPISODES.split(), "actor.ppo_max_token_len_per_gpu=120", *setting.split()))
    check(good(*EPISODES.split(), tight))
    shared = ["actor.parallel.sequence=2", "trainer.num_workers=2", "actor.ppo_max_token_len_per_gpu=60", whole]
    check(good(*EPISODES.split(), *shared))
    check(good(*EPISODES.split(), tight, "actor.old_log_probs=recompute"))
    check(good(*EPISODES.split(), tight, whole, "agent.max_contexts=2"))
    critic = "algorithm.adv_estimator=gae actor.loss_agg_mode=seq-mean-token-mean actor.ppo_max_token_len_per_gpu=150"
    assert "the loss of the critic needs" in refusal(
        *EPISODES.split(), *critic.split(), "critic.ppo_max_token_len_per_gpu=119"
    )
