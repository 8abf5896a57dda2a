"""Each impossible combination is refused with its keys and its arithmetic, and nothing else is."""

from typing import cast

import pytest
from omegaconf import OmegaConf

from pipeline.config import Config, ConfigError
from pipeline.plan.checks import check

GOOD = ["data.train_files=train.parquet", "model.path=owner/model", "data.val_files=test.parquet"]
DEFAULTS = OmegaConf.structured(Config)


def good(*overrides: str) -> Config:
    """Settings that pass, with `overrides` laid over them; many times faster than composing files."""
    return cast(Config, OmegaConf.to_object(OmegaConf.merge(DEFAULTS, OmegaConf.from_dotlist([*GOOD, *overrides]))))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(good(*overrides))
    return str(error.value)


def test_defaults_with_data_and_model_pass():
    check(good())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.path=null"], "model.path is not set"),
        (["data.train_files=null"], "data.train_files is not set"),
        (["data.val_files=null", "trainer.test_freq=5"], "data.val_files is not set"),
        (
            ["data.train_batch_size=100"],
            "100 = 6 x rollout.chunk_prompts=16 + 4; set data.train_batch_size to 96 or 112",
        ),
        (["data.train_batch_size=8"], "set data.train_batch_size to 16"),
        (["data.train_batch_size=64", "trainer.num_workers=3"], "64 / 16 = 4 chunks"),
        (["actor.ppo_mini_batch_size=48"], "1024 = 21 x 48 + 16"),
        (["actor.ppo_mini_batch_size=16", "trainer.num_workers=2"], "16 x 2 = 32"),
        (["data.max_prompt_length=16000"], "16000 + 512 = 16512 tokens"),
        (["actor.clip_ratio_c=1.0"], "actor.clip_ratio_c=1.0 must be above 1"),
        (["actor.clip_ratio=1.5"], "actor.clip_ratio=1.5"),
        (["actor.clip_ratio_low=0"], "actor.clip_ratio_low=0"),
        (["actor.clip_ratio_high=-1"], "actor.clip_ratio_high=-1"),
        (["rollout.n=0"], "rollout.n=0"),
        (["rollout.n=1"], "set rollout.n to 2 or more"),
        (["data.truncation=cut"], "error, left, right, middle"),
        (["actor.old_log_probs=guess"], "recompute, engine"),
        (["actor.old_log_probs=engine", "rollout.top_p=0.9"], "renormalised"),
        (["actor.old_log_probs=engine", "rollout.top_k=50"], "renormalised"),
        (["algorithm.max_staleness=-1"], "algorithm.max_staleness=-1 must be at least"),
        (["actor.optim.betas=[0.9]"], "two numbers"),
        (["trainer.logger=[console,abacus]"], "abacus is not known"),
        (["trainer.test_freq=0"], "trainer.test_freq=0"),
        (["trainer.total_training_steps=0"], "trainer.total_training_steps=0"),
        (["trainer.experiment_name=a/b"], "slash"),
        (["trainer.deadlines.collective=3600"], "one train worker may take while the others wait for it"),
        (["trainer.deadlines.store=0"], "trainer.deadlines.store=0"),
        (["trainer.deadlines.train_start=0"], "trainer.deadlines.train_start=0"),
        (["trainer.storage_path=nosuch://bucket"], "trainer.storage_path: 'nosuch://bucket' is on no file system"),
        (["trainer.deadlines.rows=100"], "900 + 1800 = 2700 seconds"),
        (["rollout.max_num_batched_tokens=100"], "rollout.max_num_batched_tokens=100"),
        (["rollout.num_gpus=2"], "set rollout.num_gpus=1 and rollout.tensor_parallel_size=2"),
        (["rollout.tensor_parallel_size=2"], "splits a model over GPUs and rollout.num_gpus=0"),
        (["rollout.tensor_parallel_size=2", "rollout.num_gpus=0.5"], "each part of a model has a GPU of its own"),
        (["rollout.tensor_parallel_size=0"], "rollout.tensor_parallel_size=0 must be at least"),
        (
            ["rollout.tensor_parallel_size=2", "rollout.num_gpus=1", "rollout.max_engines=2"],
            "engines of several GPUs keep their places",
        ),
        (
            ["rollout.tensor_parallel_size=2", "rollout.num_gpus=1", "rollout.engine_kwargs={tensor_parallel_size: 2}"],
            "rollout.engine_kwargs.tensor_parallel_size is set by rollout.tensor_parallel_size",
        ),
        (["rollout.update=now"], "rollout.update=now must be one of between_chunks, in_flight"),
        (["rollout.update_kv=drop"], "rollout.update_kv=drop must be one of recompute, keep"),
        (["rollout.min_tokens=-1"], "rollout.min_tokens=-1 must be at least"),
        (["rollout.min_tokens=513"], "rollout.min_tokens=513 is above data.max_response_length=512"),
        (["actor.old_log_probs=engine", "rollout.min_tokens=4"], "with rollout.min_tokens=4: the engine's log-probs"),
        (["algorithm.use_kl_in_reward=true", "rollout.min_tokens=4"], "even equal policies would have a KL"),
        (["rollout.stop=['']"], "rollout.stop holds ''; it must be a list of texts that end a response"),
        (["rollout.min_engines=2"], "rollout.num_engines=1 must lie between rollout.min_engines=2 and"),
        (["rollout.num_engines=3", "rollout.max_engines=2"], "rollout.min_engines=3 and rollout.max_engines=2"),
        (["rollout.max_engines=0"], "rollout.max_engines=0 must be at least 1, or null"),
        (["rollout.sleep=true"], "rollout.sleep=true is for engines on GPUs"),
        (["trainer.gpus_per_worker=2"], "trainer.gpus_per_worker=2 must be above 0 and at most 1"),
        (["trainer.gpus_per_worker=0.5", "trainer.use_gpu=true", "trainer.num_workers=2"], "which NCCL refuses"),
        (
            ["rollout.sleep=true", "rollout.num_gpus=0.4", "rollout.engine_kwargs={enable_sleep_mode: true}"],
            "enable_sleep_mode is set by rollout.sleep",
        ),
        (["trainer.weight_transport=nccl"], "must be one of object_store, delta, nixl"),
        (["rollout.temperature=0"], "rollout.temperature=0"),
        (["rollout.temperature=2.5"], "rollout.temperature=2.5 must be above 0 and at most 2"),
        (["rollout.val_kwargs.temperature=3"], "rollout.val_kwargs.temperature=3"),
        (["reward.max_error_rate=2"], "at least 0 and at most 1"),
        (["model.path=./nowhere"], "there is no folder"),
    ],
)
def test_refused_with_keys_and_arithmetic(overrides, words):
    sentence = refusal(*overrides)
    assert words in sentence and "\n" not in sentence


def test_engines_and_workers_on_the_same_gpus_pass():
    shared = ["rollout.num_gpus=0.4", "trainer.use_gpu=true", "trainer.gpus_per_worker=0.6", "trainer.num_workers=2"]
    check(good("rollout.sleep=true", *shared))
    check(good("trainer.gpus_per_worker=0.5", "trainer.use_gpu=true"))
    check(good("rollout.num_engines=2", "rollout.min_engines=1", "rollout.max_engines=4"))


def test_sleep_beside_a_trainer_that_does_not_wait():
    sentence = refusal("rollout.sleep=true", "rollout.num_gpus=0.5", "algorithm.max_staleness=1")
    assert "engines that generate ahead are awake while the trainer computes" in sentence


def test_tracker_without_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else object())
    assert "pip install wandb" in refusal("trainer.logger=[wandb]")


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


def test_nixl_needs_its_package_and_memory_that_it_can_register(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nixl" else object())
    assert "needs the Python package nixl on every node: pip install nixl" in refusal("trainer.weight_transport=nixl")
    check(good("trainer.weight_transport=delta"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    check(good("trainer.weight_transport=nixl", "trainer.num_workers=2"))
    segments = "trainer.env_vars.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert "NIXL cannot register memory" in refusal("trainer.weight_transport=nixl", segments)
    check(good(segments))
