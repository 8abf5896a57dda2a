"""Load balancing: the ranks exchange the rows of a mini-batch so that all have about the same work.

Ray Data gives chunks to the ranks in turn, regardless of the cost of their rows, and every pass of a sharded model
takes as long as on the slowest rank. So the ranks exchange rows before they train:

1. Units are sorted by their work, an estimate of the cost of training on them. A unit is a row, or a whole group if
   samples share their prompt in a pass or are compared with each other.
2. Each of the N ranks gets one of the N units with most work, then one of the next N, and so on. So all ranks have the
   same number of rows, with similar lengths and similar micro-batches.
3. Among N such units, the one with most work goes to the rank with the least work so far, and so on, which evens out
   the sums.

Rows stay in their mini-batch. Every rank knows the work of all units, so all compute the same assignment. Only rows
that change their rank are sent. A single rank keeps its rows as they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from pipeline.models.batch import TokenBatch
from pipeline.models.mesh import Mesh
from pipeline.rows import flat, loss_mask
from pipeline.train import ranks
from pipeline.train.actor import Actor
from pipeline.train.critic import Critic


def deal(work: np.ndarray, trains: np.ndarray, count: int, idle: float = 0.0) -> np.ndarray:
    """Assign units to ranks: return the rank of each unit, [U] int64.

    Args:
        work: [U] float64, work of each unit; `count` divides U.
        trains: [U] bool, true for units that take part in the actor's update. They are assigned before the others, so
            that each rank gets the same number of them.
        count: number of ranks.
        idle: factor on the work of a unit that does not train, from 0 to 1.
    """
    owner = np.empty(len(work), dtype=np.int64)
    order = np.lexsort((-work, ~trains))
    weighted = work * np.where(trains, 1.0, idle)
    done = np.zeros(count)
    for block in order.reshape(-1, count):
        least = np.argsort(done, kind="stable")
        owner[block] = least
        done[least] += weighted[block]
    return owner


def work_of(table: pa.Table, hidden_size: int, unit: int = 1) -> np.ndarray:
    """[R / unit] float64, the work of each unit: of `unit` neighbouring rows, which share their prompt.

    A context of L tokens has the work L * (12 H + L), with the hidden size H. This is proportional to the number of
    operations: per layer and token about 24 H^2 in matrices and, under causal attention, 2 L H in attention.

    Args:
        table: R rows.
        hidden_size: H.
        unit: number of rows of a unit.
    """
    rows = TokenBatch.from_table(table)
    length = np.asarray(rows.lengths, dtype=np.float64)
    work = length * (12 * hidden_size + length)
    # Attention reads a shared prompt again for each response; the matrices do not.
    first = rows.context_offsets[:-1]
    repeated = np.arange(len(rows)) % unit > 0
    work[first[repeated]] -= 12 * hidden_size * np.diff(rows.prompt_offsets)[first[repeated]]
    return np.add.reduceat(work, first[::unit])


def trains(table: pa.Table, unit: int = 1) -> np.ndarray:
    """[R / unit] bool, for each unit of `unit` neighbouring rows: true if a token in the loss mask has an advantage
    other than 0."""
    mask, offsets = loss_mask(table)
    counts = np.concatenate([[0], np.cumsum((mask > 0) & (flat(table, "advantages")[0] != 0))])[offsets]
    return np.diff(counts).reshape(-1, unit).sum(axis=1) > 0


@dataclass(frozen=True)
class Dealer:
    """Exchange of rows among ranks, for each part of an iteration."""

    device: torch.device
    """Device on which the process group communicates."""
    segments: int
    """Number of equal sections of a part. Rows stay in their section, so that every mini-batch, the actor's and the
    critic's, keeps its rows."""
    unit: int
    """Number of neighbouring rows that stay together on one rank."""
    hidden_size: int
    """Hidden size H of the model, for `work_of`."""
    skips: bool
    """True if rows whose advantages are all 0 skip the actor's update."""
    idle: float
    """Factor on the work of a row that skips the update, from 0 to 1."""
    mesh: Mesh
    """The ranks. Groups of `mesh.same_rows` of them train the same rows."""

    @classmethod
    def of(cls, actor: Actor, critic: Critic | None, samples: int, parts: int) -> "Dealer":
        """Make the dealer of a run.

        Args:
            actor, critic: the run's learners.
            samples: number of samples per prompt.
            parts: number of parts of each iteration.
        """
        steps = [learner.shape.mini_batches for learner in (actor, critic) if learner]
        # Forward passes over all rows (a backward pass costs two of them): recomputed log-probs, the reference, and the
        # critic's update.
        others = float(actor.needs_old_log_probs + actor.own_reference) + (3.0 * critic.shape.epochs if critic else 0.0)
        return cls(
            device=actor.device,
            segments=max(1, math.lcm(*steps) // parts),
            unit=samples if actor.shares_prompts or actor.loss.of_pairs else 1,
            hidden_size=int(actor.module.decoder.config.get_text_config().hidden_size),
            skips=actor.skips_without_advantage,
            idle=others / (others + 3.0 * actor.shape.epochs - actor.in_one_pass),
            mesh=actor.mesh,
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        """Exchange rows with the other ranks; a collective.

        Returns the rows that this rank trains. They are `mesh.same_rows` times as many as in `table`, because each row
        goes to that many ranks.

        Args:
            table: the rows of a part that this rank got from the stream.
        """
        if ranks.count() == 1:
            return table
        size = len(table) // self.segments
        return pa.concat_tables([self._deal(table.slice(start, size)) for start in range(0, len(table), size)])

    def _deal(self, table: pa.Table) -> pa.Table:
        work = work_of(table, self.hidden_size, self.unit)
        active = trains(table, self.unit) if self.skips else np.ones(len(work), dtype=bool)
        parts = ranks.all_gather((work, active))
        works, actives = (np.concatenate(column) for column in zip(*parts, strict=True))
        owner = deal(works, actives, ranks.count() // self.mesh.same_rows, self.idle)
        before = sum(len(part[0]) for part in parts[: ranks.rank()])
        owner = np.repeat(owner[before : before + len(work)], self.unit)
        return exchange(table, owner, self.device, self.mesh.rows_group)


def exchange(
    table: pa.Table, owner: np.ndarray, device: torch.device, group_of: Callable[[int], int] = int
) -> pa.Table:
    """Send each row to its new ranks; a collective.

    Returns the rows of all ranks' tables that this rank gets, ordered by their old rank and their place in its table.

    Args:
        table: this rank's rows.
        owner: [R] new group of each row.
        device: device on which the process group communicates.
        group_of: returns the group of a rank; each rank gets all rows of its group.
    """
    own = ranks.rank()
    packed = []
    for other in range(ranks.count()):
        rows = table.take(pa.array(np.flatnonzero(owner == group_of(other))))
        if other == own:
            kept, rows = rows, rows.slice(0, 0)
        packed.append(_to_bytes(rows) if len(rows) else np.empty(0, dtype=np.uint8))
    sizes = ranks.all_gather([len(content) for content in packed])
    received = [row[own] for row in sizes]
    arrived = torch.empty(sum(received), dtype=torch.uint8, device=device)
    sent = torch.from_numpy(np.concatenate(packed)).to(device)
    dist.all_to_all_single(arrived, sent, received, sizes[own])
    contents = np.split(arrived.cpu().numpy(), np.cumsum(received)[:-1])
    tables = [pa.ipc.open_stream(content).read_all() if len(content) else table.slice(0, 0) for content in contents]
    tables[own] = kept
    return pa.concat_tables(tables)


def _to_bytes(table: pa.Table) -> np.ndarray:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return np.frombuffer(sink.getvalue(), dtype=np.uint8)
