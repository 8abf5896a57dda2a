import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.losses import checked, get_policy_loss, register_policy_loss
from tests.losses.batches import actor, evaluate, loss_input, random_row, ratios

PPO_LIKE = ("vanilla", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "clip_cov")


@pytest.fixture(autouse=True)
def _own_losses_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("name", PPO_LIKE)
def test_one_clip_ratio_stands_for_both_bounds(name):
    rows = [random_row(np.random.default_rng(0), 12) for _ in range(6)]
    one = actor(clip_ratio=0.05, clip_ratio_low=None, clip_ratio_high=None)
    two = actor(clip_ratio=0.9, clip_ratio_low=0.05, clip_ratio_high=0.05)
    assert evaluate(name, rows, one).losses == evaluate(name, rows, two).losses


def test_a_loss_of_ones_own():
    row = replace(ratios([2.0, 1.0], [1.0, 1.5]), mask=np.array([1.0, 0.0]))
    got = evaluate("custom_losses:scaled", [row], actor(kwargs={"scale": 3.0}))
    assert got.per_token.tolist() == [6.0, 0.0] and got.gradient == [-6.0, 0.0]
    assert not get_policy_loss("custom_losses:scaled").zero_without_advantage


def test_an_import_path_to_a_registered_loss_keeps_what_it_was_registered_with():
    assert get_policy_loss("custom_losses:flagged").zero_without_advantage
    assert get_policy_loss("custom_losses:known") is get_policy_loss("cispo")
    assert get_policy_loss("pipeline.losses.covariance:kl_cov").token_mask_fn is not None


def test_a_loss_in_a_file():
    file = Path(__file__).parent / "file_losses.py"
    assert get_policy_loss(f"{file}:scaled_in_file").zero_without_advantage
    assert get_policy_loss(f"{file}:test_in_file") is get_policy_loss(f"{file}:scaled_in_file")
    with pytest.raises(ValueError, match="'no_file.py' does not exist"):
        get_policy_loss("no_file.py:scaled")


def test_wrong_names_get_sentences():
    with pytest.raises(ValueError, match=r"'vanila' is unknown. Did you mean 'vanilla'\? Known are .*cispo"):
        get_policy_loss("vanila")
    with pytest.raises(ValueError, match="module 'no_such_module' cannot be imported"):
        get_policy_loss("no_such_module:f")
    for missing in ("nothing", "constant", ""):
        with pytest.raises(ValueError, match=f"module 'custom_losses' has no function '{missing}'"):
            get_policy_loss(f"custom_losses:{missing}")


def test_a_name_is_taken_once():
    vanilla = get_policy_loss("vanilla").function
    with pytest.raises(ValueError, match="'vanilla' is registered twice"):
        register_policy_loss("vanilla")(lambda data, config: vanilla(data, config))
    register_policy_loss("vanilla", zero_without_advantage=True, per_token=True)(
        vanilla
    )  # a module that is loaded again
    assert get_policy_loss("vanilla").function is vanilla


def test_importing_the_losses_brings_no_cluster_and_no_model_library():
    heavy = "{'ray', 'vllm', 'transformers', 'mlflow', 'pyarrow'}"
    script = f"import sys, pipeline.losses; sys.exit(', '.join({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stderr.strip() == ""


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.zeros(2), "a Tensor; a pair was expected"),
        ((torch.zeros(()), {}), "one number for each of the 2 tokens"),
        ((torch.zeros(2), {"width": 0.5}), "metric 'width' as 0.5"),
    ],
)
def test_a_loss_of_another_form_is_refused(returned, words):
    data = loss_input([ratios([2.0, 1.0], [1.0, 1.5])])
    with pytest.raises(ValueError, match=f"policy loss 'vanilla' returned.*{words}"):
        checked(get_policy_loss("vanilla"), data, returned)
