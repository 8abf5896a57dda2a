"""The actor's update: against a formula written out on padded tensors, and over one and two real gloo ranks."""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.config import Config
from pipeline.rows import SCHEMA
from pipeline.track.metrics import Stats, reduce
from pipeline.train.actor import Actor
from pipeline.train.fsdp import full_state_dict
from pipeline.train.losses import AGG_MODES
from pipeline.train.packing import Rows

PROMPTS, N, CHUNK_ROWS = 8, 2, 4
NAMES = ("uid", "sample", "prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "advantages", "returns")
COLUMNS = pa.schema([SCHEMA.field(name) for name in NAMES])
CPU = torch.device("cpu")


def table(seed: int = 0) -> pa.Table:
    """One iteration: 8 prompts with 2 responses of 0 to 9 tokens each, some masked; one row is masked as a whole."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(PROMPTS * N):
        length = 0 if number == 5 else int(rng.integers(1, 10))
        rows.append(
            {
                "uid": str(number // N),
                "sample": number % N,
                "prompt_ids": rng.integers(5, 300, rng.integers(1, 8)),
                "response_ids": rng.integers(5, 300, length),
                "response_mask": (rng.random(length) < 0.8) & (number != 9),
                "rollout_log_probs": rng.normal(-5.7, 0.4, length),
                "advantages": np.full(length, rng.normal()),
                "returns": np.zeros(length),
            }
        )
    return pa.Table.from_pylist(rows, schema=COLUMNS)


def make_config(model: Path | str, **changes: Any) -> Config:
    """A run of 8 prompts an iteration; `changes` are settings of the actor."""
    config = Config()
    config.model.path = str(model)
    config.data.train_batch_size = PROMPTS
    config.data.max_response_length = 12
    config.rollout.n = N
    # A large eps keeps AdamW from blowing rounding noise of tiny gradients up to whole steps.
    config.actor.optim.lr, config.actor.optim.eps = 1e-2, 1e-2
    config.actor.old_log_probs = "engine"
    for name, value in changes.items():
        setattr(config.actor, name, value)
    return config


def trained(config: Config, *tables: pa.Table) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of the last update and the weights after updates with these rows."""
    actor = Actor(config, CPU, iterations=100)
    stats: Stats = {}
    for rows in tables:
        stats = actor.update(Rows.from_table(rows))
    return reduce([stats]), full_state_dict(actor.module)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance * 1e-2)


def moved(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def initial(tiny_model: Path, one_rank: None) -> dict[str, Tensor]:
    return full_state_dict(Actor(make_config(tiny_model), CPU, 1).module)


# against plain formulas


def plain_log_probs(model: Path, rows: list[dict[str, Any]], temperature: float = 1.0) -> tuple[Any, Tensor, Tensor]:
    """`transformers`' own model, and log-probs and entropies [B, T] of the responses, one forward pass per row."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    width = max(len(row["response_ids"]) for row in rows)
    log_probs, entropies = [], []
    for row in rows:
        ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
        first, count = len(row["prompt_ids"]), len(row["response_ids"])
        logits = lm(input_ids=ids[None]).logits[0, first - 1 : first - 1 + count] / temperature
        all_log_probs = logits.log_softmax(-1)
        chosen = all_log_probs[torch.arange(count), ids[first:]]
        pad = (0, width - count)
        log_probs.append(torch.nn.functional.pad(chosen, pad))
        entropies.append(torch.nn.functional.pad(-(all_log_probs.exp() * all_log_probs).sum(-1), pad))
    return lm, torch.stack(log_probs), torch.stack(entropies)


def padded(rows: list[dict[str, Any]], name: str) -> Tensor:
    width = max(len(row["response_ids"]) for row in rows)
    return torch.tensor([list(map(float, row[name])) + [0.0] * (width - len(row[name])) for row in rows])


def aggregate(values: Tensor, mask: Tensor, mode: str, divisor: float) -> Tensor:
    """[B, T] to one number, as the modes are defined; sequences without a token are left out."""
    kept = mask.sum(1) > 0
    values, mask = (values * mask)[kept], mask[kept]
    return {
        "token-mean": values.sum() / mask.sum(),
        "token-sum": values.sum(),
        "seq-mean-token-sum": values.sum(1).mean(),
        "seq-mean-token-sum-norm": (values.sum(1) / divisor).mean(),
        "seq-mean-token-mean": (values.sum(1) / mask.sum(1)).mean(),
    }[mode]


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.usefixtures("one_rank")
def test_loss_and_gradient_are_those_of_the_written_out_formula(tiny_model: Path, mode: str) -> None:
    rows = table().to_pylist()
    lm, log_probs, entropy = plain_log_probs(tiny_model, rows)
    mask, advantages = padded(rows, "response_mask"), padded(rows, "advantages")
    ratio = (log_probs - padded(rows, "rollout_log_probs")).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.9, 1.3))
    loss = torch.where(advantages < 0, torch.minimum(loss, -1.5 * advantages), loss)
    divisor = 12.0 if mode != "token-sum" else 1.0
    pg_loss = aggregate(loss, mask, mode, divisor)
    total = pg_loss - 0.05 * aggregate(entropy, mask, mode, divisor)
    total.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in lm.parameters()])

    changes = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5, "entropy_coeff": 0.05}
    metrics, _ = trained(make_config(tiny_model, loss_agg_mode=mode, ppo_max_token_len_per_gpu=40, **changes), table())
    assert metrics["actor/pg_loss"] == pytest.approx(pg_loss.item(), rel=1e-4, abs=1e-6)
    assert metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-4, abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["actor/entropy"] == pytest.approx(aggregate(entropy, mask, "token-mean", 1.0).item(), rel=1e-5)
    gap = ((log_probs - padded(rows, "rollout_log_probs")).abs() * mask).max()
    assert metrics["training/rollout_log_probs_diff_max"] == pytest.approx(gap.item(), rel=1e-4)
    assert 0 < metrics["actor/pg_clipfrac"] < 1 and 0 < metrics["actor/pg_clipfrac_lower"] < 1


@pytest.mark.usefixtures("one_rank")
def test_the_divisor_of_a_constant_length_can_be_set(tiny_model: Path) -> None:
    losses = [
        trained(make_config(tiny_model, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=factor), table())[0]
        for factor in (None, 24.0)
    ]
    assert losses[0]["actor/pg_loss"] == pytest.approx(2 * losses[1]["actor/pg_loss"], rel=1e-5)


def test_the_update_follows_the_gradient(tiny_model: Path, initial: dict[str, Tensor]) -> None:
    rows = table()
    before, after = trained(make_config(tiny_model), rows)
    again, _ = trained(make_config(tiny_model), rows, rows)
    assert again["actor/pg_loss"] < before["actor/pg_loss"]
    assert moved(initial, after) > 1e-4
    frozen = make_config(tiny_model)
    frozen.actor.optim.lr = 0.0
    assert moved(initial, trained(frozen, rows)[1]) == 0


@pytest.mark.usefixtures("one_rank")
def test_gradients_are_clipped_and_the_norm_is_that_before(tiny_model: Path) -> None:
    free, far = trained(make_config(tiny_model, grad_clip=1e9), table())
    clipped, near = trained(make_config(tiny_model, grad_clip=1e-3), table())
    assert clipped["actor/grad_norm"] == pytest.approx(free["actor/grad_norm"], rel=1e-5)
    initial = full_state_dict(Actor(make_config(tiny_model), CPU, 1).module)
    assert moved(initial, near) < moved(initial, far) / 10


@pytest.mark.usefixtures("one_rank")
def test_the_temperature_is_the_samplers(tiny_model: Path) -> None:
    rows = table().to_pylist()
    with torch.no_grad():
        _, log_probs, _ = plain_log_probs(tiny_model, rows, temperature=0.7)
    exact = [line[: len(row["response_ids"])].tolist() for line, row in zip(log_probs, rows, strict=True)]
    made = pa.Table.from_pylist([row | {"rollout_log_probs": e} for row, e in zip(rows, exact, strict=True)], COLUMNS)
    gaps = {}
    for temperature in (0.7, 1.0):
        for source in ("engine", "recompute"):
            config = make_config(tiny_model, old_log_probs=source)
            config.rollout.temperature = temperature
            gaps[temperature, source] = trained(config, made)[0]["training/rollout_log_probs_diff_max"]
    assert gaps[0.7, "engine"] < 1e-4 and gaps[0.7, "recompute"] < 1e-4
    assert gaps[1.0, "engine"] > 1e-2 and gaps[1.0, "recompute"] > 1e-2


# where old log-probs come from


@pytest.mark.usefixtures("one_rank")
def test_engine_and_recomputed_log_probs_agree_when_the_engine_is_exact(tiny_model: Path) -> None:
    actor = Actor(make_config(tiny_model), CPU, 1)
    rows = Rows.from_table(table())
    actor._recompute(rows)
    lists = [
        rows.old_log_probs[a:b].tolist()
        for a, b in zip(rows.response_offsets[:-1], rows.response_offsets[1:], strict=True)
    ]
    column = table().schema.get_field_index("rollout_log_probs")
    exact = table().set_column(column, COLUMNS.field("rollout_log_probs"), pa.array(lists, pa.list_(pa.float32())))
    options = {"ppo_epochs": 2, "ppo_mini_batch_size": 4}
    _, by_engine = trained(make_config(tiny_model, old_log_probs="engine", **options), exact)
    metrics, by_trainer = trained(make_config(tiny_model, old_log_probs="recompute", **options), exact)
    assert_same(by_engine, by_trainer)
    assert metrics["training/rollout_log_probs_diff_max"] < 1e-5
    assert metrics["timing_s/old_log_prob"] > 0

    # An inexact engine makes a difference to `engine` and none to `recompute`.
    assert_same(trained(make_config(tiny_model, old_log_probs="recompute", **options), table())[1], by_trainer)
    assert moved(trained(make_config(tiny_model, old_log_probs="engine", **options), table())[1], by_engine) > 1e-4


@pytest.mark.usefixtures("one_rank")
def test_recomputed_log_probs_stay_those_of_before_the_update(tiny_model: Path) -> None:
    metrics, _ = trained(make_config(tiny_model, old_log_probs="recompute"), table())
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)  # one step: the policy has not moved yet
    metrics, _ = trained(make_config(tiny_model, old_log_probs="recompute", ppo_epochs=3), table())
    assert abs(metrics["actor/ppo_kl"]) > 1e-5


# batches and steps


@pytest.mark.usefixtures("one_rank")
def test_the_token_budget_changes_nothing(tiny_model: Path) -> None:
    whole = trained(make_config(tiny_model, loss_agg_mode="seq-mean-token-mean", entropy_coeff=0.01), table())
    for budget in (17, 40):
        parts = trained(
            make_config(
                tiny_model,
                loss_agg_mode="seq-mean-token-mean",
                entropy_coeff=0.01,
                ppo_max_token_len_per_gpu=budget,
                logits_chunk_tokens=3,
            ),
            table(),
        )
        for name in ("actor/pg_loss", "actor/loss", "actor/entropy", "actor/grad_norm", "actor/pg_clipfrac"):
            assert parts[0][name] == pytest.approx(whole[0][name], rel=1e-4)
        assert_same(whole[1], parts[1])
    with pytest.raises(ValueError, match="ppo_max_token_len_per_gpu"):
        trained(make_config(tiny_model, ppo_max_token_len_per_gpu=5), table())


@pytest.mark.usefixtures("one_rank")
def test_a_mini_batch_is_a_step_of_its_own(tiny_model: Path) -> None:
    _, split = trained(make_config(tiny_model, ppo_mini_batch_size=4), table())
    half = make_config(tiny_model)
    half.data.train_batch_size = 4
    _, one_by_one = trained(half, table().slice(0, 8), table().slice(8))
    assert_same(split, one_by_one)
    assert moved(split, trained(make_config(tiny_model), table())[1]) > 1e-4


@pytest.mark.parametrize(("epochs", "mini_batch", "steps"), [(1, None, 1), (3, None, 3), (1, 2, 4), (2, 4, 4)])
@pytest.mark.usefixtures("one_rank")
def test_number_of_optimiser_steps(tiny_model: Path, epochs: int, mini_batch: int | None, steps: int) -> None:
    config = make_config(tiny_model, ppo_epochs=epochs, ppo_mini_batch_size=mini_batch)
    config.actor.optim.lr_warmup_steps = 100
    actor = Actor(config, CPU, iterations=1000)
    metrics = reduce([actor.update(Rows.from_table(table()))])
    assert {int(state["step"]) for state in actor.optimizer.state.values()} == {steps}
    assert actor.scheduler.last_epoch == steps
    assert metrics["actor/lr"] == pytest.approx(1e-2 * steps / 100)
    assert metrics["actor/skipped_steps"] == 0


@pytest.mark.usefixtures("one_rank")
def test_losses_are_shown_as_the_mean_over_the_steps(tiny_model: Path) -> None:
    shown = []
    for epochs, mini_batch in ((1, None), (3, None), (2, 4)):
        # Without movement every pass has the same loss.
        config = make_config(
            tiny_model, ppo_epochs=epochs, ppo_mini_batch_size=mini_batch, loss_agg_mode="token-sum", entropy_coeff=0.1
        )
        config.actor.optim.lr = 0.0
        metrics, _ = trained(config, table())
        shown.append((metrics["actor/pg_loss"], metrics["actor/loss"]))
    assert shown[1] == pytest.approx(shown[0], rel=1e-5)
    assert shown[2] == pytest.approx((shown[0][0] / 2, shown[0][1] / 2), rel=1e-5)  # two halves of one sum


@pytest.mark.usefixtures("one_rank")
def test_the_schedule_goes_on_after_a_restore(tiny_model: Path) -> None:
    config = make_config(tiny_model)
    config.actor.optim.lr_warmup_steps = 10
    walked, restored = Actor(config, CPU, 100), Actor(config, CPU, 100)
    for _ in range(4):
        walked.update(Rows.from_table(table()))
    restored.restore_schedule(walked.scheduler.last_epoch)
    for actor in (walked, restored):
        assert actor.scheduler.last_epoch == 4
        assert actor.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 5 / 10)


# steps that are not taken


def masked(rows: pa.Table) -> pa.Table:
    column = rows.schema.get_field_index("response_mask")
    zeros = pa.array([[0] * len(mask) for mask in rows["response_mask"].to_pylist()], pa.list_(pa.int8()))
    return rows.set_column(column, COLUMNS.field("response_mask"), zeros)


def test_rows_without_a_token_to_train_on_take_no_step(tiny_model: Path, initial: dict[str, Tensor]) -> None:
    metrics, after = trained(make_config(tiny_model, entropy_coeff=0.1), masked(table()))
    assert moved(initial, after) == 0  # not even by weight decay
    assert metrics["actor/skipped_steps"] == 1 and metrics["actor/grad_norm"] == 0
    assert metrics["actor/pg_loss"] == 0 and "actor/entropy" not in metrics

    # One empty mini-batch of two skips one step, the first one's momentum notwithstanding.
    half = table().slice(0, 8)
    mixed = pa.concat_tables([half, masked(table().slice(8))])
    metrics, after = trained(make_config(tiny_model, ppo_mini_batch_size=4), mixed)
    assert metrics["actor/skipped_steps"] == 1
    alone = make_config(tiny_model)
    alone.data.train_batch_size = 4
    assert_same(after, trained(alone, half)[1])


def test_a_gradient_that_is_not_finite_takes_no_step(tiny_model: Path, initial: dict[str, Tensor]) -> None:
    actor = Actor(make_config(tiny_model, ppo_epochs=2), CPU, 100)
    broken = Rows.from_table(table())
    broken.advantages[:] = 1e37
    metrics = reduce([actor.update(broken)])
    assert metrics["actor/skipped_steps"] == 2 and "actor/grad_norm" not in metrics
    assert moved(initial, full_state_dict(actor.module)) == 0
    assert actor.scheduler.last_epoch == 0
    # The next iteration finds no trace of it.
    metrics = reduce([actor.update(Rows.from_table(table()))])
    assert metrics["actor/skipped_steps"] == 0
    assert_same(full_state_dict(actor.module), trained(make_config(tiny_model, ppo_epochs=2), table())[1])


# ranks

CASES: dict[str, dict[str, Any]] = {
    "one step": {"ppo_max_token_len_per_gpu": 40},
    "four steps": {
        "ppo_epochs": 2,
        "ppo_mini_batch_size": 4,
        "loss_agg_mode": "seq-mean-token-mean",
        "entropy_coeff": 0.01,
        "old_log_probs": "recompute",
    },
    # Rank 1 has only rows that train nothing, and few of them.
    "uneven": {"loss_agg_mode": "seq-mean-token-sum", "ppo_max_token_len_per_gpu": 20},
}


def case_rows(name: str) -> pa.Table:
    rows = table()
    if name != "uneven":
        return rows
    chunks = [rows.slice(start, CHUNK_ROWS) for start in range(0, len(rows), CHUNK_ROWS)]
    return pa.concat_tables([chunk if number % 2 == 0 else masked(chunk) for number, chunk in enumerate(chunks)])


def share(rows: pa.Table, rank: int, world: int) -> pa.Table:
    """The chunks of one rank, dealt in turn."""
    chunks = [rows.slice(start, CHUNK_ROWS) for start in range(0, len(rows), CHUNK_ROWS)]
    return pa.concat_tables(chunks[rank::world])


def work(rank: int, folder: str, model: str) -> None:
    torch.set_num_threads(1)
    for world in (1, 2):
        if rank >= world:
            continue
        store = dist.FileStore(f"{folder}/store{world}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        for name, changes in CASES.items():
            actor = Actor(make_config(model, **changes), CPU, 100)
            stats = actor.update(Rows.from_table(share(case_rows(name), rank, world)))
            gathered: list[Any] = [None] * world
            dist.all_gather_object(gathered, stats)
            state = full_state_dict(actor.module)
            if rank == 0:
                torch.save({"metrics": reduce(gathered), "state": state}, f"{folder}/{name}-{world}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("actor")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.spawn(work, args=(str(folder), str(tiny_model)), nprocs=2, join=False)
    deadline = time.monotonic() + 180
    while not context.join(timeout=1):
        assert time.monotonic() < deadline, "2 ranks did not finish within 180 s"
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one(results: Path, name: str) -> None:
    one, two = (torch.load(results / f"{name}-{world}.pt", weights_only=True) for world in (1, 2))
    assert one["metrics"].keys() == two["metrics"].keys()
    for metric, value in one["metrics"].items():
        if not metric.startswith("timing_s/"):
            assert two["metrics"][metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric
    assert one["metrics"]["actor/grad_norm"] > 0
    assert_same(one["state"], two["state"], tolerance=1e-4)
