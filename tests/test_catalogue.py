"""A new algorithm is one file and one entry of the catalogue: checks, plan, docs and the update know it by its name."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.train import main
from pipeline import catalogue, derived
from pipeline.advantage.estimators import EstimatorInput
from pipeline.catalogue import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.config.learner import PolicyLossConfig
from pipeline.plan.checks import check
from pipeline.plan.without_effect import unread
from tests import docs_configuration
from tests.losses.batches import actor, evaluate, ratios
from tests.plan.test_checks import good, refusal
from tests.test_docs import test_every_built_in_choice_has_its_row as documented

LOSS, ESTIMATOR = "actor.policy_loss.loss_mode", "algorithm.adv_estimator"


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings that choose a loss and an estimator of one file and one entry each."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "new_loss.py").write_text(
        "def halved(data, config):\n    return -0.5 * data.masked(data.advantages * data.log_probs), {}\n"
    )
    (tmp_path / "new_estimator.py").write_text(
        "from pipeline.advantage.estimators import Estimate\n\n\n"
        "def centred(data, config):\n"
        "    rows = data.per_token(data.rewards - data.rewards.mean())\n    return Estimate(rows, rows)\n"
    )
    loss = PolicyLoss("halved", "new_loss:halved", ratio="none", clips=True, reads=("dro_beta",), per_token=True)
    monkeypatch.setitem(POLICY_LOSSES, "halved", loss)
    estimator = Estimator("centred", "new_estimator:centred", "batch", compares="responses", reads=("f_norm",))
    monkeypatch.setitem(ESTIMATORS, "centred", estimator)
    return [f"{LOSS}=halved", f"{ESTIMATOR}=centred"]


def test_the_dry_run_knows_new_algorithms(
    new: list[str], tiny_model: Path, prompt_files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"data.train_files={prompt_files.train}", f"model.path={tiny_model}", "data.max_prompt_length=64"]
    folder = f"trainer.default_local_dir={tmp_path}/run"
    sizes = ["data.train_batch_size=16", "data.max_response_length=16", "actor.policy_loss.dro_beta=0.1"]
    sizes.append("trainer.ray_num_cpus=8")
    assert main(["--dry-run", *files, folder, *sizes, *new, "algorithm.lam=0.5"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "algorithm.lam=0.5" in shown, "a note says that the estimator reads no lam"
    assert main(["--dry-run", *files, *sizes, f"{LOSS}=halve"]) == 2
    assert "Did you mean 'halved'?" in " ".join(capsys.readouterr().err.split())


def test_checks_and_derived_settings_read_the_facts_of_new_algorithms(new: list[str]) -> None:
    loss, estimator = new
    assert "dro_beta" in refusal(loss) and "rollout.n" in refusal(estimator, "rollout.n=1")
    beta = "actor.policy_loss.dro_beta=0.1"
    check(good(*new, beta))
    assert "actor.clip_ratio=1.5" in refusal(*new, beta, "actor.clip_ratio=1.5")
    config = good(*new, beta, "actor.old_log_probs=engine", "actor.policy_loss.tau_pos=2", "algorithm.f_norm=2")
    assert not derived.weighs_itself(config), "no ratio"
    assert ESTIMATOR in str(derived.why_not_streamed(config)), "its scope is the batch"
    assert not derived.needs_whole_rows(good(loss, beta), config.actor), "a token's loss reads no other token"
    assert list(unread(config)) == ["actor.policy_loss.tau_pos=2"]
    assert "no built-in loss reads it" in refusal(*new, beta, "actor.policy_loss.kwargs.width=1")


def test_docs_must_name_new_algorithms(new: list[str]) -> None:
    rows = {line.split("|")[1].strip(): line for line in docs_configuration.page().splitlines() if "|" in line}
    assert "`halved`" in rows[f"`{LOSS}`"] and "`centred`" in rows[f"`{ESTIMATOR}`"]
    for heading, known in (("Policy losses", POLICY_LOSSES), ("Advantage estimators", ESTIMATORS)):
        with pytest.raises(AssertionError):
            documented(heading, {name for name, entry in known.items() if entry.built_in})


def test_new_algorithms_compute(new: list[str]) -> None:
    assert evaluate("halved", [ratios([2.0], [1.0])], actor()).per_token.tolist() == [1.0]
    one = np.ones(2)
    offsets, mask = np.array([0, 1, 2]), np.array([True, True])
    data = EstimatorInput(np.array([0.0, 1.0]), np.zeros(2, np.int64), offsets, mask, one, one)
    estimate = catalogue.get_adv_estimator("centred").function(data, AlgorithmConfig())
    assert estimate.advantages.tolist() == [-0.5, 0.5]


def test_a_loss_of_the_user_states_its_facts_in_the_decorator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(catalogue, "POLICY_LOSSES", dict(POLICY_LOSSES))
    monkeypatch.setattr("pipeline.losses.registry.POLICY_LOSSES", catalogue.POLICY_LOSSES)
    (tmp_path / "stated.py").write_text(
        "from pipeline.losses import register_policy_loss\n\n\n"
        "@register_policy_loss('stated_loss', ratio='token', clips=True, reads=('tau_pos',))\n"
        "def function(data, config):\n    raise NotImplementedError\n\n\n"
        "def silent(data, config):\n    raise NotImplementedError\n"
    )
    bypass = ["actor.old_log_probs=engine", "algorithm.rollout_correction.rollout_is=token"]
    for path in ("stated:stated_loss", "stated:function"):
        stated = f"{LOSS}={path}"
        assert "count twice" in refusal(stated, *bypass)
        assert "actor.clip_ratio=1.5" in refusal(stated, "actor.clip_ratio=1.5")
        assert list(unread(good(stated, "actor.policy_loss.tau_neg=2"))) == ["actor.policy_loss.tau_neg=2"]
    # A loss without stated facts is left alone.
    silent = f"{LOSS}=stated:silent"
    check(good(silent, *bypass, "actor.clip_ratio=1.5", "actor.policy_loss.kwargs.width=1"))
    assert not list(unread(good(silent, "actor.policy_loss.tau_neg=2")))


@pytest.mark.parametrize("name", [name for name, loss in POLICY_LOSSES.items() if loss.built_in])
def test_an_import_path_of_a_built_in_loss_has_its_facts(name: str) -> None:
    entry = POLICY_LOSSES[name]
    config = good(f"{LOSS}={entry.source}", "actor.old_log_probs=engine")
    assert derived.policy_loss(config) is entry
    assert derived.weighs_itself(config) == derived.weighs_itself(good(f"{LOSS}={name}", "actor.old_log_probs=engine"))


@pytest.mark.parametrize("entry", [e for e in (*POLICY_LOSSES.values(), *ESTIMATORS.values()) if e.built_in])
def test_entries_lead_to_documented_functions_and_read_keys_that_exist(entry: Any) -> None:
    assert entry.function.__doc__ and entry.owns(entry.function)
    section = PolicyLossConfig() if isinstance(entry, PolicyLoss) else AlgorithmConfig()
    assert all(hasattr(section, key) for key in entry.reads)
    if isinstance(entry, PolicyLoss) and entry.token_mask_fn:
        assert callable(entry.choose_tokens)


def test_the_facts_are_known_without_torch() -> None:
    script = (
        "import sys\nfrom pipeline.catalogue import get_adv_estimator, get_policy_loss\n"
        "assert get_policy_loss('gspo').clips and get_policy_loss('pipeline.losses.ppo:vanilla').name == 'vanilla'\n"
        "assert get_adv_estimator('gae').needs == ('values',)\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_an_entry_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="scope"):
        replace(ESTIMATORS["grpo"], scope="token")
