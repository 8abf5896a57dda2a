"""Rows of several contexts: the update is that of one forward pass per context, with rows as the losses' sequences."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from pipeline.config import Config
from pipeline.losses import AGG_MODES, Candidates, LossInput, get_policy_loss
from pipeline.losses.kl import kl_loss
from pipeline.models.batch import TrainBatch
from pipeline.rows import CONTEXTS, flat
from pipeline.stats import Stats, reduce
from pipeline.train.correction import correct, parse
from pipeline.train.learner import Learner
from pipeline.train.setup import build_actor
from tests.train import test_critic
from tests.train.plain import aggregate, padded, plain_log_probs, sequences
from tests.train.test_actor_losses import LOSSES, make_config
from tests.train.updates import (
    CPU,
    assert_same,
    in_chunks,
    table,
    trained,
    update,
    with_contexts,
    with_reference,
    with_values,
)

pytestmark = pytest.mark.usefixtures("one_rank")

SCALE = 5.0
WHOLE = {"gspo", "geo_mean"}
"""Losses that need all contexts of a row at once."""
SMALL = 64
"""Tokens of a pass that holds the largest row of `rows_of`, padded, and little more."""
EXACT = 1e-6


def rows_of() -> pa.Table:
    return with_contexts(with_values(with_reference(table(longest=24))))


def watch(learner: Learner) -> dict[str, Tensor]:
    """Fills with the gradient of the last step, by the names of the language model; no step is taken."""
    taken: dict[str, Tensor] = {}

    def watched(tokens: float, rejected: float) -> Stats:
        for name, parameter in learner.module.named_parameters():
            grad = parameter.grad
            assert grad is not None
            taken[name.removeprefix("lm.")] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        return {}

    learner.optimizer_step = watched  # type: ignore[method-assign]
    return taken


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Norm of the difference of two gradients, relative to the norm of the second."""
    assert found.keys() == wanted.keys()

    def norm(gradients: list[Tensor]) -> float:
        return float(torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()) ** 0.5

    return norm([found[name] - wanted[name] for name in wanted]) / norm(list(wanted.values()))


class Plain:
    """Loss and gradient of `rows_of`, from `transformers`' own model and one forward pass per context."""

    def __init__(self, model: Path) -> None:
        self.rows = rows_of().to_pylist()
        self.batch = TrainBatch.from_table(rows_of())
        self.lengths = [len(row["response_ids"]) for row in self.rows]
        self.lm, *numbers = plain_log_probs(model, self.rows)
        self.log_probs, self.entropies = map(self.flat, numbers)
        columns = ("response_mask", "rollout_log_probs", "advantages", "ref_log_probs")
        self.mask, self.engine, self.advantages, self.reference = (self.flat(padded(self.rows, c)) for c in columns)
        self.row_index = torch.arange(len(self.rows)).repeat_interleave(torch.tensor(self.lengths))

    def flat(self, values: Tensor) -> Tensor:
        return torch.cat([line[:length] for line, length in zip(values, self.lengths, strict=True)])

    def aggregate(self, values: Tensor, mask: Tensor, mode: str) -> Tensor:
        width = max(self.lengths)
        lines = [
            torch.stack([pad(row, (0, width - len(row))) for row in column.split(self.lengths)])
            for column in (values, mask)
        ]
        return aggregate(lines[0], lines[1], mode, SCALE)

    def chosen(self, config: Config) -> Tensor | None:
        """[N] the tokens that the loss chooses."""
        loss = get_policy_loss(config.actor.policy_loss.loss_mode)
        if loss.token_mask_fn is None:
            return None
        kept = self.mask > 0
        keys = self.batch.random_keys(list(range(len(self.rows))), config.trainer.seed, 0)
        columns = (values.detach()[kept].double().numpy() for values in (self.log_probs, self.engine, self.advantages))
        chosen = torch.zeros(len(kept), dtype=torch.bool)
        chosen[kept] = torch.from_numpy(loss.choose_tokens(Candidates(*columns, keys), config.actor))
        return chosen

    def pg_loss_and_gradient(self, config: Config) -> tuple[float, float, dict[str, Tensor]]:
        """The loss, what it would be without losses of both signs that cancel, and the gradient."""
        actor, mask, weights = config.actor, self.mask, torch.ones(())
        recomputed = actor.old_log_probs == "recompute"
        old = self.log_probs.detach() if recomputed else self.engine
        correction = parse(config.algorithm.rollout_correction)
        if correction.active:
            log_probs = self.log_probs.detach().double().numpy()
            args = (log_probs, self.engine.numpy(), mask.numpy(), np.cumsum([0, *self.lengths]))
            corrected = correct(correction, *args, list if recomputed else None)
            mask = torch.from_numpy(corrected.keep).float()
            if corrected.weights is not None:
                weights = torch.from_numpy(corrected.weights).float()
        data = LossInput(
            self.log_probs, old, self.advantages, mask, self.row_index, len(self.rows), self.chosen(config)
        )
        per_token, _ = get_policy_loss(actor.policy_loss.loss_mode).function(data, actor)
        # In bypass mode, tokens that are rejected count in the normalisation.
        counted, mode = mask if recomputed else self.mask, actor.loss_agg_mode
        share = self.count(mask, mode) / self.count(counted, mode)
        pg_loss = loss = self.aggregate(per_token * weights, mask, mode) * share
        size = self.aggregate((per_token * weights).abs(), mask, mode) * share
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * self.aggregate(self.entropies, mask, mode) * share
        if actor.use_kl_loss:
            per_token = kl_loss(self.log_probs, self.reference, mask, actor.kl_loss_type)
            loss = loss + actor.kl_loss_coef * self.aggregate(per_token, mask, mode) * share
        names, parameters = zip(*self.lm.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        return pg_loss.item(), size.item(), dict(zip(names, gradients, strict=True))

    def count(self, mask: Tensor, mode: str) -> float:
        rows = self.row_index[mask > 0].unique()
        return {"token-mean": float(mask.sum()), "token-sum": 1.0}.get(mode, float(len(rows)))


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Plain:
    return Plain(tiny_model)


WAYS: list[tuple[int, str, bool]] = [(16384, "always", False), (SMALL, "never", True)]
"""Token budget, prompt sharing, and whether rows come in chunks."""


def assert_plain(plain: Plain, config: Config) -> None:
    """The actor's loss and gradient are those of `plain`, however the work is split."""
    wanted, size, gradient = plain.pg_loss_and_gradient(config)
    chooses = get_policy_loss(config.actor.policy_loss.loss_mode).token_mask_fn is not None
    for budget, config.model.share_prompts, chunked in WAYS:
        config.actor.ppo_max_token_len_per_gpu = budget
        actor = build_actor(config, CPU, 100)
        found = watch(actor)
        metrics = reduce([update(actor, *(in_chunks(rows_of()) if chunked and not chooses else [rows_of()]))])
        assert metrics["actor/pg_loss"] == pytest.approx(wanted, rel=0, abs=EXACT * size)
        assert distance(found, gradient) < EXACT


@pytest.mark.parametrize("number", range(len(LOSSES)), ids=LOSSES)
def test_every_loss_is_that_of_the_contexts_alone_with_the_rows_as_sequences(
    tiny_model: Path, plain: Plain, number: int
) -> None:
    mode = AGG_MODES[number % len(AGG_MODES)]
    assert_plain(plain, make_config(tiny_model, LOSSES[number], loss_agg_mode=mode, loss_scale_factor=SCALE))


@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
@pytest.mark.parametrize("mode", AGG_MODES)
def test_every_aggregation_counts_rows(tiny_model: Path, plain: Plain, mode: str, loss: str) -> None:
    assert_plain(plain, make_config(tiny_model, loss, loss_agg_mode=mode, loss_scale_factor=SCALE))


@pytest.mark.long
@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_in_every_aggregation(tiny_model: Path, plain: Plain, loss: str, mode: str) -> None:
    assert_plain(plain, make_config(tiny_model, loss, loss_agg_mode=mode, loss_scale_factor=SCALE))


CORRECTED: dict[str, dict[str, Any]] = {
    "decoupled": {
        "loss": "reinforce",
        "old_log_probs": "recompute",
        "correction": {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.3"},
    },
    "decoupled, gspo": {
        "loss": "gspo",
        "old_log_probs": "recompute",
        "correction": {"rollout_is": "token", "rollout_rs": "seq_max_k2", "rollout_rs_threshold": "0.3"},
    },
    "bypass": {
        "loss": "reinforce",
        "correction": {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.3"},
    },
    "bypass, token-mean": {
        "loss": "reinforce",
        "loss_agg_mode": "token-mean",
        "correction": {"rollout_is": "sequence", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.5"},
    },
    "entropy and kl": {"loss": "vanilla", "entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.3},
}


@pytest.mark.parametrize("case", CORRECTED.values(), ids=CORRECTED)
def test_a_response_of_the_correction_is_the_whole_row(tiny_model: Path, plain: Plain, case: dict[str, Any]) -> None:
    options = {"loss_agg_mode": "seq-mean-token-mean", "loss_scale_factor": SCALE} | case
    assert_plain(plain, make_config(tiny_model, **options))


def as_rows(rows: pa.Table) -> pa.Table:
    """Every context as a row of its own."""
    made, names = [], ("response_mask", "rollout_log_probs", "advantages", "returns")
    for row in rows.to_pylist():
        begin = 0
        for prompt, response in sequences(row):
            end = begin + len(response)
            columns = {name: row[name][begin:end] for name in names}
            made.append(row | columns | {"prompt_ids": prompt, "response_ids": response})
            begin = end
    return pa.Table.from_pylist(made, schema=rows.schema).drop_columns(["contexts", "ref_log_probs", "values"])


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - WHOLE - {"clip_cov", "kl_cov"}))
def test_contexts_train_as_rows_that_have_the_normalisation_of_the_whole_ones(
    tiny_model: Path, plain: Plain, loss: str
) -> None:
    counts = []
    for rows in (rows_of(), as_rows(rows_of())):
        batch = TrainBatch.from_table(rows)
        counts.append(batch.mask_counts(list(range(len(batch)))))
    (tokens, whole), (same, cut) = counts
    assert tokens == same and cut > 1.5 * whole
    factors = {"token-mean": 1.0, "token-sum": 1.0, "seq-mean-token-sum": cut / whole}
    for mode, factor in factors.items():
        config = make_config(tiny_model, loss, loss_agg_mode=mode)
        config.model.share_prompts = "never"
        found = []
        for rows in (rows_of(), as_rows(rows_of())):
            actor = build_actor(config, CPU, 100)
            gradient = watch(actor)
            found.append((reduce([update(actor, rows)])["actor/pg_loss"], gradient))
        _, size, _ = plain.pg_loss_and_gradient(config)
        assert found[0][0] == pytest.approx(found[1][0] * factor, rel=0, abs=EXACT * size), mode
        scaled = {name: grad * factor for name, grad in found[1][1].items()}
        assert distance(found[0][1], scaled) < EXACT, mode


@pytest.mark.parametrize("mode", AGG_MODES)
def test_the_critic(tiny_model: Path, mode: str) -> None:
    rows = rows_of().to_pylist()
    lm, head, values = test_critic.plain_values(tiny_model, rows)
    mask, old, returns = (padded(rows, name) for name in ("response_mask", "values", "returns"))
    near = torch.minimum(torch.maximum(values, old - 0.4), old + 0.4)
    per_token = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    loss = aggregate(per_token, mask, mode, SCALE)
    loss.backward()
    wanted = {
        f"decoder.{name.removeprefix('model.')}": p.grad for name, p in lm.named_parameters() if p.grad is not None
    }
    wanted |= {f"head.{name}": p.grad for name, p in head.named_parameters() if p.grad is not None}
    for budget, share, chunked in WAYS:
        config = test_critic.make_config(
            tiny_model, loss_agg_mode=mode, cliprange_value=0.4, ppo_max_token_len_per_gpu=budget
        )
        config.model.share_prompts, config.actor.loss_scale_factor = share, SCALE
        critic = test_critic.make_critic(config)
        found = watch(critic)
        metrics = reduce([update(critic, *(in_chunks(rows_of()) if chunked else [rows_of()]))])
        assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), rel=EXACT)
        assert distance(found, wanted) < EXACT


# which rows must stay whole


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({}, False),
        ({"loss_agg_mode": "seq-mean-token-mean"}, True),
        ({"loss_agg_mode": "seq-mean-token-sum"}, False),
        ({"loss": "gspo"}, True),
        ({"loss": "tests.train.own_loss:own"}, True),
        ({"correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}}, True),
        ({"correction": {"rollout_is": "sequence"}, "old_log_probs": "recompute"}, False),
    ],
)
def test_only_what_reads_other_tokens_of_the_row_needs_it_whole(
    tiny_model: Path, changes: dict[str, Any], whole: bool
) -> None:
    config = make_config(tiny_model, **({"loss": "vanilla", "ppo_max_token_len_per_gpu": 30} | changes))
    actor = build_actor(config, CPU, 100)
    assert actor.shape.whole_rows == whole
    # Contexts have at most 25 tokens, rows up to 63.
    if whole:
        with pytest.raises(
            ValueError, match=r"a row has \d contexts .* with \d+ tokens .* actor.ppo_max_token_len_per_gpu"
        ):
            update(actor, rows_of())
    else:
        assert reduce([update(actor, rows_of())])["actor/grad_norm"] > 0


def test_recomputed_log_probs_come_in_the_order_of_the_rows(tiny_model: Path, plain: Plain) -> None:
    for budget, share, _ in WAYS:
        config = make_config(tiny_model, "vanilla", old_log_probs="recompute", ppo_max_token_len_per_gpu=budget)
        # With one step, the pass of the step would compute the log-probs.
        config.actor.ppo_epochs = 2
        config.model.share_prompts = share
        batch = TrainBatch.from_table(rows_of())
        build_actor(config, CPU, 100).compute_old_log_probs(batch)
        trained = plain.mask.numpy() > 0
        wanted = np.where(trained, plain.log_probs.detach().numpy(), plain.engine.numpy())
        np.testing.assert_allclose(batch.old_log_probs, wanted, rtol=EXACT, atol=0)


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "clip_cov"])
def test_rows_without_contexts_train_as_without_the_column(tiny_model: Path, loss: str) -> None:
    rows = table()
    config = make_config(tiny_model, loss, loss_agg_mode="seq-mean-token-mean", ppo_max_token_len_per_gpu=40)
    wanted = trained(config, rows)
    for value in (None, []):
        same = rows.append_column("contexts", pa.array([value] * len(rows), CONTEXTS))
        found = trained(config, same)
        assert_same(found[1], wanted[1], tolerance=0)
        for name, number in wanted[0].items():
            assert name.startswith("timing_s/") or found[0][name] == number, name


def test_observations_may_stand_in_any_context() -> None:
    """The rows of these tests have masked tokens, a context without trained tokens, and one without tokens."""
    batch = TrainBatch.from_table(rows_of())
    per_context = np.add.reduceat(np.append(batch.mask, 0), batch.response_offsets[:-1])
    counts = np.diff(batch.response_offsets)
    assert (counts == 0).any() and ((per_context == 0) & (counts > 0)).any()
    assert len(counts) > 2 * len(batch) and len(flat(rows_of(), "response_ids")[0]) == counts.sum()
