"""What an evaluation reads of a config: the settings of training that count, and none of the others."""

import copy
from pathlib import Path

import pytest

from pipeline.config import Config, ConfigError, save_yaml
from pipeline.config.schema import keys, value_of
from pipeline.evaluate.settings import LAYOUT, RESULT, checked, chosen_ks, in_flight, of_run, result_settings, used
from tests.storage.test_checkpoints import written


@pytest.fixture
def config(stream_config: Config) -> Config:
    """Of a run that could be trained."""
    return copy.deepcopy(stream_config)


def named(name: str) -> list[str]:
    return [key for key in keys(Config) if key == name or (name.endswith(".") and key.startswith(name))]


@pytest.mark.parametrize("name", [*RESULT, *LAYOUT])
def test_every_name_is_a_key_or_a_section(name: str) -> None:
    assert named(name)


TRAINING = (
    *(f"data.{key}" for key in ("train_files", "train_batch_size", "train_max_samples", "shuffle", "recorded_run")),
    *(f"data.{key}" for key in ("shuffle_window_rows", "sampler", "source_weights", "generator")),
    *(f"data.{key}" for key in ("sampler_kwargs", "generator_kwargs", "recorded_iterations")),
    *(f"model.{key}" for key in ("enable_gradient_checkpointing", "activation_offload", "share_prompts", "lora.")),
    *(f"rollout.{key}" for key in ("n", "temperature", "top_p", "top_k", "min_p", "max_support", "replay_routes")),
    *(f"rollout.{key}" for key in ("min_engines", "max_engines", "weight_update", "update_kv", "sleep")),
    *(f"reward.{key}" for key in ("source_scale", "normalize", "overlong_buffer.", "length_penalty", "clip")),
    "reward.repetition_penalty.",
)
"""Settings of the stages of an evaluation that only training rows need."""


def test_every_setting_of_prompts_models_engines_and_rewards_is_read_or_for_training() -> None:
    read, training = ({key for name in names for key in named(name)} for names in ((*RESULT, *LAYOUT), TRAINING))
    stages = {key for key in keys(Config) if key.startswith(("data.", "model.", "rollout.", "reward."))}
    assert stages - read == training
    assert {"model.vision", "data.image_key", "model.max_pixels"} <= {key for name in RESULT for key in named(name)}


def test_what_is_not_read_is_back_at_its_default(config: Config) -> None:
    config.actor.optim.lr, config.algorithm.adv_estimator, config.data.shuffle = 7.0, "gae", False
    config.critic.path, config.trainer.num_workers, config.rollout.temperature = "critic", 3, 0.5
    own = used(config)
    read = {key for name in (*RESULT, *LAYOUT) for key in named(name)}
    for key in keys(Config).keys() - read - {"rollout.n", "data.train_batch_size"}:
        assert value_of(own, key) == value_of(Config(), key), key
    for key in read - {"rollout.engine_kwargs"}:
        assert value_of(own, key) == value_of(config, key), key
    assert own.rollout.val_kwargs is not config.rollout.val_kwargs


def test_the_engine_reads_the_weights_itself(config: Config) -> None:
    config.rollout.engine_kwargs = {"max_logprobs": 3}
    assert used(config).rollout.engine_kwargs == {"max_logprobs": 3, "load_format": "auto"}
    config.rollout.engine_kwargs["load_format"] = "safetensors"
    assert used(config).rollout.engine_kwargs["load_format"] == "safetensors"


def test_settings_of_the_result(config: Config) -> None:
    before = result_settings(used(config))
    assert {"data.val_files", "rollout.val_kwargs.n", "reward.sandbox.score", "model.path"} <= before.keys()
    assert not {"rollout.num_engines", "trainer.logger", "reward.max_error_rate"} & before.keys()
    config.rollout.num_engines, config.reward.timeout_s, config.rollout.val_kwargs.n = 4, 3.0, 2
    after = result_settings(used(config))
    assert {key for key in after if after[key] != before[key]} == {"rollout.val_kwargs.n"}


def test_neither_training_prompts_nor_a_trainer_are_needed(config: Config) -> None:
    config.data.train_files = None
    config.data.train_batch_size, config.trainer.num_workers, config.critic.warmup = 5, 99, 10_000
    with pytest.raises(ConfigError):
        checked(config)
    plan = checked(used(config))
    assert [stage.name for stage in plan.stages][:2] == ["prompts", "rollout"]
    assert "train" not in {stage.name for stage in plan.stages} and plan.cpus < 2
    assert plan.config.data.train_files is None


@pytest.mark.parametrize(
    ("n", "temperature", "sentence"),
    [(4, 0.0, "rollout.val_kwargs.temperature=0"), (1001, 1.0, "the largest value is 1000")],
)
def test_numbers_of_responses_that_cannot_be(config: Config, n: int, temperature: float, sentence: str) -> None:
    config.rollout.val_kwargs.n, config.rollout.val_kwargs.temperature = n, temperature
    with pytest.raises(ConfigError, match=sentence):
        checked(used(config))


@pytest.mark.parametrize(
    ("text", "n", "ks"),
    [(None, 1, (1,)), (None, 8, (1, 2, 4, 8)), (None, 12, (1, 2, 4, 8, 12)), ("8, 1,4,4", 8, (1, 4, 8))],
)
def test_chosen_ks(text: str | None, n: int, ks: tuple[int, ...]) -> None:
    assert chosen_ks(text, n) == ks


@pytest.mark.parametrize("text", ["0", "1,9", "", "1.5", "1,,2"])
def test_ks_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--k .*(between 1 and rollout.val_kwargs.n=8|not a list of whole numbers)"):
        chosen_ks(text, 8)


def test_an_engine_has_twice_what_fills_it(config: Config) -> None:
    config.rollout.max_num_seqs, config.rollout.chunk_prompts, config.rollout.val_kwargs.n = 64, 4, 2
    config.rollout.num_engines = 3
    assert in_flight(used(config)) == 16
    config.rollout.chunks_in_flight = 5
    assert in_flight(used(config)) == 5


@pytest.fixture
def run_dir(config: Config, tmp_path: Path) -> Path:
    """Folder of a run that has reached iteration 12."""
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    written(folder, 12)
    config.rollout.val_kwargs.temperature = 0.5
    save_yaml(config, folder / "config.yaml")
    return folder


def test_the_last_model_of_a_run(run_dir: Path, config: Config) -> None:
    found, iteration = of_run(run_dir, [])
    assert iteration == 12 and found.model.path == str(run_dir / "model")
    found.model.path = config.model.path
    assert found == config


def test_settings_on_top_of_a_run(run_dir: Path, config: Config) -> None:
    found, iteration = of_run(run_dir, ["rollout.val_kwargs.n=6", "rollout.engine_kwargs.max_logprobs=2"])
    assert (found.rollout.val_kwargs.n, found.rollout.val_kwargs.temperature, iteration) == (6, 0.5, 12)
    assert found.rollout.engine_kwargs == {"max_logprobs": 2}
    found, iteration = of_run(run_dir, [f"model.path={config.model.path}"])
    assert (found.model.path, iteration) == (config.model.path, 0)


def test_folders_that_cannot_be_evaluated(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no config.yaml, so it is not a run"):
        of_run(tmp_path, [])
    (run_dir / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match="has no model yet"):
        of_run(run_dir, [])
