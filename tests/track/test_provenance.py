"""Settings are flattened, secrets masked, versions found."""

import subprocess
from pathlib import Path

import pytest

from pipeline.config import load_config, to_flat
from pipeline.track import provenance
from pipeline.track.provenance import flattened, git_commit, masked, masked_command, user, versions


def test_flattened_uses_dots_and_json() -> None:
    config = {"actor": {"optim": {"lr": 1e-6, "betas": [0.9, 0.999]}, "clip": None}, "name": "run", "empty": {}}
    assert flattened(config) == {
        "actor.optim.lr": "1e-06",
        "actor.optim.betas": "[0.9, 0.999]",
        "actor.clip": "null",
        "name": "run",
        "empty": "{}",
    }


def test_secrets_are_masked_and_nothing_else() -> None:
    kwargs = {"api_key": "abc", "headers": [{"Auth_Token": "abc"}], "tokens": ["abc"], "api_key_env": "JUDGE_KEY"}
    plain = {"model": "m", "max_tokens": 5, "tokenizer": "there"}
    config = {
        "trainer": {"env_vars": {"HF_TOKEN": "abc", "wandb_api_key": 5, "OMP_NUM_THREADS": 1}},
        "reward": {
            "custom_reward_function": {"reward_kwargs": kwargs | plain},
            "functions": {"judge": {"kwargs": kwargs}},
            "rule_kwargs": {"gsm8k": {"method": "strict", "password": "abc"}},
        },
        "actor": {"ppo_max_token_len_per_gpu": 5},
        "model": {"tokenizer_path": "there"},
    }
    hidden = kwargs | {"api_key": "***", "headers": [{"Auth_Token": "***"}], "tokens": "***"}
    assert masked(config) == config | {
        "trainer": {"env_vars": {"HF_TOKEN": "***", "wandb_api_key": "***", "OMP_NUM_THREADS": 1}},
        "reward": {
            "custom_reward_function": {"reward_kwargs": hidden | plain},
            "functions": {"judge": {"kwargs": hidden}},
            "rule_kwargs": {"gsm8k": {"method": "strict", "password": "***"}},
        },
    }
    assert kwargs["api_key"] == "abc"


def test_secrets_are_masked_in_the_settings_as_trackers_get_them() -> None:
    config = load_config(["+trainer.env_vars.HF_TOKEN=abc", "+rollout.engine_kwargs.api_key=abc", "rollout.n=3"])
    hidden = masked(to_flat(config))
    assert hidden["trainer.env_vars"] == {"HF_TOKEN": "***"} and hidden["rollout.engine_kwargs"] == {"api_key": "***"}
    assert hidden["rollout.n"] == 3


def test_versions_name_the_stack() -> None:
    assert {"python", "ray", "torch", "transformers", "pyarrow"} <= versions().keys()


def test_git_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "pipeline" / "track" / "provenance.py"))
    assert git_commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_commit() is None
    (tmp_path / "a").write_text("1")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert git_commit() == (head, False)
    (tmp_path / "a").write_text("2")
    assert git_commit() == (head, True)


def test_a_command_hides_its_secrets() -> None:
    words = ["slipstream", "train", "trainer.env_vars.HF_TOKEN=abc", "+trainer.env_vars={WANDB_API_KEY: abc, A: 1}"]
    words += ["reward.reward_kwargs={api_key: abc}", "model.tokenizer_path=/a b", "trainer.seed=1", "--token=5"]
    assert masked_command(words) == (
        "slipstream train 'trainer.env_vars.HF_TOKEN=***' '+trainer.env_vars=***' 'reward.reward_kwargs=***' "
        "'model.tokenizer_path=/a b' trainer.seed=1 --token=5"
    )


def test_a_user_that_the_system_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    assert user() == "ada"

    def unknown() -> str:
        raise OSError("no name for this uid")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert user() is None
