"""`examples/rl_loop.py` computes what the system computes: advantages, log-probs, loss, gradient and steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import rl_loop
from examples.rl_loop import Rollouts, Settings
from pipeline.advantage.estimators import EstimatorInput, get_adv_estimator
from pipeline.config.algorithm import AlgorithmConfig
from tests.train.plain import plain_log_probs
from tests.train.updates import COLUMNS, PROMPTS, N, assert_same, make_config, moved, trained

LENGTH = 12
SETTINGS = Settings(
    iterations=100, prompts=PROMPTS, n=N, mini_batch=PROMPTS // 2, micro_batch=3, max_tokens=LENGTH, lr=1e-2, eps=1e-2
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def sampled(model: Any, tokenizer: Any, temperature: float = 1.0, seed: int = 0) -> tuple[list[list[int]], Rollouts]:
    """Prompts of different lengths, `N` times each, and a response to every one."""
    texts = [f"Numbers: {' '.join(map(str, range(i + 1)))}." for i in range(PROMPTS) for _ in range(N)]
    prompts = tokenizer(texts)["input_ids"]
    generator = torch.Generator().manual_seed(seed)
    rollouts = rl_loop.sample(model, tokenizer, prompts, LENGTH, temperature, generator)
    return prompts, rollouts


def as_rows(prompts: list[list[int]], rollouts: Rollouts, advantages: torch.Tensor) -> pa.Table:
    """The rows that the stream would hand to the actor."""
    log_probs = [row[mask > 0].tolist() for row, mask in zip(rollouts.log_probs_BT, rollouts.mask_BT, strict=True)]
    rows = [
        {
            "uid": str(number // N),
            "sample": number % N,
            "prompt_ids": prompts[number],
            "response_ids": response,
            "response_mask": [1] * len(response),
            "rollout_log_probs": log_probs[number],
            "advantages": [advantages[number].item()] * len(response),
            "returns": [0.0] * len(response),
        }
        for number, response in enumerate(rollouts.responses)
    ]
    return pa.Table.from_pylist(rows, schema=COLUMNS)


def test_advantages_are_those_of_the_estimator() -> None:
    rng = np.random.default_rng(3)
    scores = rng.choice([0.0, 0.1, 1.0], size=(50, 4))
    scores[7] = 0.1
    lengths = rng.integers(1, 6, scores.size)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = int(offsets[-1])
    data = EstimatorInput(
        rewards=scores.ravel(),
        group=np.repeat(np.arange(50), 4),
        offsets=offsets,
        mask=np.ones(tokens, bool),
        token_rewards=np.zeros(tokens),
        log_probs=np.zeros(tokens),
    )
    expected = get_adv_estimator("grpo").function(data, AlgorithmConfig()).advantages
    advantages = rl_loop.grpo_advantages(torch.from_numpy(scores.ravel()), 4).numpy()
    np.testing.assert_allclose(np.repeat(advantages, lengths), expected, rtol=1e-12, atol=1e-15)
    assert (advantages[28:32] == 0).all() and np.ptp(advantages) > 1


def test_sampled_log_probs_are_those_of_a_plain_forward_pass(model: Any, tokenizer: Any, tiny_model: Path) -> None:
    prompts, rollouts = sampled(model, tokenizer, temperature=0.7)
    rows = as_rows(prompts, rollouts, torch.zeros(len(prompts))).to_pylist()
    with torch.no_grad():
        _, expected, _ = plain_log_probs(tiny_model, rows, temperature=0.7)
        again = rl_loop.response_log_probs(model, rollouts, 0.7) * rollouts.mask_BT
    torch.testing.assert_close(rollouts.log_probs_BT, expected * rollouts.mask_BT, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again, expected * rollouts.mask_BT, rtol=1e-4, atol=1e-5)


def test_responses_end_with_their_end_token_and_follow_the_seed(model: Any, tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    with torch.no_grad():
        # A likelier end, so that responses of all lengths occur.
        model.get_output_embeddings().weight[end] *= 20
    responses = sampled(model, tokenizer)[1].responses
    assert any(len(response) < LENGTH for response in responses)
    for response in responses:
        assert end not in response[:-1]
        assert len(response) == LENGTH or response[-1] == end
    assert sampled(model, tokenizer)[1].responses == responses != sampled(model, tokenizer, seed=1)[1].responses
    greedy = sampled(model, tokenizer, temperature=0.0)[1].responses
    assert greedy[0::N] == greedy[1::N]


@pytest.mark.usefixtures("one_rank")
def test_updates_give_the_loss_and_the_weights_of_the_actor(model: Any, tokenizer: Any, tiny_model: Path) -> None:
    prompts, rollouts = sampled(model, tokenizer)
    # Behind the policy by a few steps, so that the clip and the dual clip are at work.
    noise = torch.randn(rollouts.log_probs_BT.shape, generator=torch.Generator().manual_seed(5))
    rollouts.log_probs_BT += noise * rollouts.mask_BT
    scores = torch.from_numpy(np.random.default_rng(1).choice([0.0, 0.1, 1.0], PROMPTS * N))
    advantages = rl_loop.grpo_advantages(scores, N)
    rows = as_rows(prompts, rollouts, advantages)

    config = make_config(tiny_model, ppo_mini_batch_size=PROMPTS // 2)
    config.actor.optim.lr_scheduler_type, config.actor.optim.min_lr_ratio = "linear", 0.1
    metrics, expected = trained(config, rows, rows)

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer, scheduler = rl_loop.build_optimizer(model, SETTINGS)
    for _ in range(2):
        ours = rl_loop.update(model, optimizer, scheduler, rollouts, advantages, SETTINGS)
    assert ours["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=1e-4)
    assert ours["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-4)
    assert scheduler.get_last_lr()[0] < SETTINGS.lr and metrics["actor/pg_clipfrac_lower"] > 0
    weights = {name: model.state_dict()[name.removeprefix("lm.")] for name in expected}
    assert_same(weights, expected, tolerance=1e-4)
    assert moved(before, model.state_dict()) > 1e-3


def test_the_loop_learns_what_is_rewarded(
    tiny_model: Path, prompt_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in (("train", prompt_files.train), ("test", prompt_files.val)):
        pq.write_table(pq.read_table(path), tmp_path / f"{name}.parquet")
    monkeypatch.setattr(
        rl_loop, "compute_score", lambda text, truth: {"score": sum(map(str.isdigit, text)) / LENGTH, "acc": 0}
    )
    changes = {"iterations": 8, "prompts": 8, "n": 8, "mini_batch": 2, "lr": 1e-2, "test_every": 4}
    settings = Settings(model=str(tiny_model), data=str(tmp_path), max_tokens=LENGTH, **changes)
    metrics = list(rl_loop.train(settings))
    assert [entry["iteration"] for entry in metrics] == list(range(9))
    assert [entry["iteration"] for entry in metrics if "val/acc" in entry] == [0, 4, 8]
    assert metrics[-1]["critic/score/mean"] > 2 * metrics[1]["critic/score/mean"]


def test_the_command_prints_a_line_for_each_iteration(
    tiny_model: Path, prompt_files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "test"):
        pq.write_table(pq.read_table(prompt_files.val), tmp_path / f"{name}.parquet")
    options = ["--iterations", "2", "--prompts", "4", "--mini_batch", "2", "--n", "2", "--max_tokens", "4"]
    rl_loop.main(["--model", str(tiny_model), "--data", str(tmp_path), *options])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["iteration", str(number)] for number in range(3)]
    assert "critic/score/mean" in lines[1] and "val/acc" in lines[2]
