"""Settings that no longer exist are refused by name, with what to do instead."""

from pathlib import Path

import pytest

from pipeline.config import Config, ConfigError, load_config, load_yaml
from pipeline.config.bounds import bounds_of, violations
from pipeline.config.renamed import MOVED, RENAMED, VALUES
from pipeline.config.schema import keys, value_of

INSTEAD = {
    "rollout.oversample": "rollout.weight_update=in_flight",
    "rollout.oversample_policy": "leave this key out",
    "rollout.partial_tokens": "rollout.weight_update=in_flight",
    "rollout.scale_up_s": "leave it out",
    "rollout.scale_down_s": "leave it out",
    "algorithm.on_stale": "leave this key out",
    "stream.order": "leave this key out",
    "stream": "every chunk",
    "trainer.early": "trainer.stream_gradients",
    "agent.preload": "agent.program=FILE.py:run",
    "loss.rpo_alpha": "loss.type=package.module:function",
    "loss.desirable_weight": "leave it out",
    "loss.undesirable_weight": "leave it out",
    "data.completion_key": "pairs of a better and a worse answer",
    "data.label_key": "pairs of a better and a worse answer",
    "data.margin_key": "jobs.reward_model",
    "agent.late": "agent.on_timeout",
    "agent.history": "agent.context",
    "agent.open_timeout_s": "agent.reset_timeout_s",
    "rollout.update": "rollout.weight_update",
    "model.lora.publish": "model.lora.weight_sync",
    "scoring.reference.where": "scoring.reference.placement",
}
"""What the sentence of each removed key names in its place."""


@pytest.mark.parametrize("key", INSTEAD)
def test_a_removed_key_is_refused_with_what_takes_its_place(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([f"{key}=1"])
    (line,) = (line for line in str(error.value).splitlines() if f"the key {key} no longer exists" in line)
    assert INSTEAD[key] in line


def test_every_removed_key_has_its_case() -> None:
    assert set(RENAMED) == set(INSTEAD)


def test_no_key_is_both_there_and_removed() -> None:
    assert not set(RENAMED) & set(keys(Config))


@pytest.mark.parametrize("key", VALUES)
def test_a_removed_value_is_refused_and_a_run_folder_that_holds_it_is_read(key: str, tmp_path: Path) -> None:
    section, _, name = key.rpartition(".")
    file = tmp_path / "config.yaml"
    for old, (new, reason) in VALUES[key].items():
        bounds = bounds_of(type(value_of(Config(), section)), name)
        assert not bounds.allow(old) and bounds.allow(new)
        assert any(
            f"{key}={old} must be" in line and reason in line for line in violations(load_config([f"{key}={old}"]))
        )
        nested = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(key.split(".")))
        file.write_text(nested.rstrip() + f" {old}\n")
        assert value_of(load_yaml(file, Config), key) == new


def test_a_run_folder_with_old_keys_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "agent:\n  late: score\n  history: template\n  open_timeout_s: 7\n  on_malformed: tell\n"
        "  named:\n    a.b: {late: error, history: keep, open_timeout_s: 8, on_malformed: tell}\n"
        "rollout: {update: in_flight}\nmodel: {lora: {publish: adapter}}\n"
        "scoring: {reference: {where: train_workers}}\ntrainer: {early: true}\n"
    )
    config = load_yaml(file, Config)
    agent = config.agent
    assert (agent.on_timeout, agent.context, agent.reset_timeout_s) == ("score", "rerender", 7)
    assert agent.on_malformed == "retry"
    assert agent.named == {
        "a.b": {"on_timeout": "error", "context": "keep", "reset_timeout_s": 8, "on_malformed": "retry"}
    }
    assert config.rollout.weight_update == "in_flight" and config.model.lora.weight_sync == "adapter"
    assert config.scoring.reference.placement == "train_workers"
    assert config.trainer.stream_gradients is True


def test_every_key_that_moved_has_a_key_of_the_same_section() -> None:
    for old, new in MOVED.items():
        assert new in keys(Config) and old.rpartition(".")[0] == new.rpartition(".")[0]


def test_an_old_key_of_a_named_agent_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"the key agent\.named\.a\.late no longer exists: .* agent\.on_timeout now"):
        load_config(["agent.named.a.late=score"])


def test_a_named_agent_of_a_run_folder_is_read_with_current_values(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "agent:\n  preload: [openai]\n  named:\n    a.b:\n      isolation: auto\n      preload: [a]\n    plain: {}\n"
    )
    assert load_yaml(file, Config).agent.named == {"a.b": {"isolation": "namespaces"}, "plain": {}}
