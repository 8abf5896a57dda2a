"""Updates with a teacher: the distillation loss by autograd, any split, and a teacher in the train workers.

`test_mesh.py` has the same on several ranks.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.config import Config
from pipeline.losses import distill_loss
from pipeline.models.batch import TrainBatch
from pipeline.models.packing import pack
from pipeline.models.policy import load_policy
from pipeline.rows import FLOATS, INTS, flat, ragged
from pipeline.train.setup import build_actor
from tests.models.test_lora import with_lora
from tests.scoring.test_reference import other_model
from tests.scoring.test_teacher import scored
from tests.train.updates import CPU, assert_same, make_config, table, trained

TOP = 7


def with_top(rows: pa.Table, seed: int = 5) -> pa.Table:
    """`rows` with a made-up teacher's most likely tokens."""
    rng, (ids, offsets) = np.random.default_rng(seed), flat(rows, "response_ids")
    log_probs = np.log(rng.dirichlet(np.ones(TOP + 3), len(ids))[:, :TOP])
    names = np.stack([rng.permutation(300)[:TOP] for _ in ids])
    rows = rows.append_column("teacher_top_ids", ragged(names.reshape(-1).astype(np.int32), offsets * TOP, INTS))
    values = log_probs.reshape(-1).astype(np.float32)
    return rows.append_column("teacher_top_log_probs", ragged(values, offsets * TOP, FLOATS))


def distilling(model: Path | str, beta: float = 0.3, **changes: object) -> Config:
    return make_config(model, distill_coef=2.0, distill_top_k=TOP, distill_beta=beta, **changes)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_gradient_is_that_of_the_loss_over_whole_logits(tiny_model: Path, beta: float) -> None:
    rows = with_top(table())
    config = distilling(tiny_model, beta)
    config.actor.grad_clip, config.rollout.temperature = float("inf"), 0.7
    config.algorithm.adv_estimator, config.actor.ppo_mini_batch_size = "zero", 8
    zeros = np.zeros(len(flat(rows, "advantages")[0]), np.float32)
    place = rows.column_names.index("advantages")
    rows = rows.set_column(place, "advantages", ragged(zeros, flat(rows, "response_ids")[1], FLOATS))
    actor = build_actor(config, CPU, 10)
    batch = TrainBatch.from_table(rows)
    for number, micro in enumerate(actor.micro_batches(batch, list(range(len(batch))))):
        actor.run(batch, [micro], number)

    policy = load_policy(config.model)
    made = pack(batch, [[row] for row in range(len(batch))])
    logits = policy.lm(made.input_ids).logits.reshape(-1, policy.lm.config.vocab_size)[made.logit_index].float() / 0.7
    ids, teacher = (torch.from_numpy(getattr(batch, f"teacher_top_{name}")) for name in ("ids", "log_probs"))
    own = torch.log_softmax(logits, -1).gather(-1, ids[made.token_index].long())
    loss = distill_loss(own, teacher[made.token_index], beta) * torch.from_numpy(batch.mask[made.token_index])
    (2.0 * loss.sum()).backward()
    ours = dict(actor.module.named_parameters())
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None and ours[name].grad is not None, name
        theirs, found = parameter.grad, ours[name].grad.full_tensor()  # type: ignore[union-attr]
        assert (found - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max())), name


@pytest.mark.usefixtures("one_rank")
def test_any_division_into_passes_gives_the_same_update(tiny_model: Path) -> None:
    rows, results = with_top(table()), []
    for tokens, chunk in ((16384, 1024), (40, 3)):
        config = distilling(tiny_model, ppo_max_token_len_per_gpu=tokens, logits_chunk_tokens=chunk)
        results.append(trained(config, rows))
    assert results[0][0]["actor/distill_loss"] == pytest.approx(results[1][0]["actor/distill_loss"], rel=1e-5)
    assert_same(results[0][1], results[1][1])
    # It matters.
    assert trained(make_config(tiny_model), rows)[0]["actor/loss"] != pytest.approx(
        results[0][0]["actor/loss"], rel=1e-2
    )


@pytest.mark.usefixtures("one_rank")
def test_adapters_learn_from_a_teacher(tiny_model: Path) -> None:
    config = with_lora(tiny_model)
    config.actor.distill_coef, config.actor.distill_top_k = 2.0, TOP
    metrics, _ = trained(config, with_top(table()))
    assert metrics["actor/distill_loss"] > 0 and metrics["actor/grad_norm"] > 0


def teaching(config: Config, path: Path, placement: str) -> Config:
    config.teacher.path, config.teacher.placement = str(path), placement
    config.algorithm.teacher_coef = 0.5
    return config


@pytest.mark.usefixtures("one_rank")
def test_a_teacher_in_the_train_workers_teaches_as_a_replica(tiny_model: Path, tmp_path: Path) -> None:
    other, rows = other_model(tmp_path / "other", 320), table()
    replica = teaching(distilling(tiny_model), other, "replicas")
    column = scored(replica, rows.append_column("data_source", pa.array(["a"] * len(rows))), 1.0)
    advantages, offsets = flat(rows, "advantages")
    mask = flat(rows, "response_mask")[0]
    term = 0.5 * (flat(column, "teacher_log_probs")[0] - flat(rows, "rollout_log_probs")[0]) * mask
    place = column.column_names.index("advantages")
    column = column.set_column(place, "advantages", ragged((advantages + term).astype(np.float32), offsets, FLOATS))
    theirs = trained(replica, column)
    ours = trained(teaching(distilling(tiny_model), other, "train_workers"), rows)
    for name in ("actor/distill_loss", "actor/pg_loss", "actor/loss", "actor/grad_norm"):
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-4, abs=1e-6), name
    assert_same(theirs[1], ours[1])
