"""The common part of the scoring stages: a whole model on one device, and the updates of its weights.

    replica = Replica(lambda: load_value_model(model), scorer, "value")
    weights = StoreWeights(replica.module, store, CRITIC, deadlines)   # not for a frozen model
    version = weights.bring_to(table)
    column = replica.score(table, lambda module, batch: ...)

Rows pass through the model in micro-batches, as in the trainer (`pipeline/models/packing.py`). The number that a token
gets depends only on the token's context (`pipeline/models/contexts.py`), not on other rows.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from pipeline.config.scoring import ScorerConfig
from pipeline.config.trainer import DeadlineConfig
from pipeline.derived import scorer_key
from pipeline.models.batch import TokenBatch
from pipeline.models.micro_batches import split_micro_batches
from pipeline.models.packing import ModelInputs, pack
from pipeline.models.sharing import Passes, pack_rows
from pipeline.models.state import tensors
from pipeline.rows import FLOATS, ragged
from pipeline.store.client import StoreClient
from pipeline.store.events import Noted
from pipeline.store.policy_store import PolicyStore
from pipeline.store.versions import Ticket
from pipeline.threads import compute_threads
from pipeline.weights.load import copy_into

M = TypeVar("M", bound=nn.Module)


class Replica(Generic[M]):
    """A frozen model that computes numbers for rows.

    Args:
        load: builds the model on the CPU.
        scorer: settings: device, threads, and the size of a forward pass.
        name: name of the pool, a key of `derived.scorers`.
        share_prompts: `model.share_prompts`, for modules with a `decoder`.
        store: the policy store, from which the result of the handshake comes, and to which notes on the model are
            posted; None in an evaluation.
        patience: seconds to wait for the handshake without a heartbeat.
    """

    def __init__(
        self,
        load: Callable[[], M],
        scorer: ScorerConfig,
        name: str,
        share_prompts: str = "never",
        store: StoreClient | None = None,
        patience: float = 0.0,
    ):
        self.name, self.max_token_len = name, scorer.max_token_len
        self.device = torch.device("cuda" if scorer.num_gpus else "cpu")
        if self.device.type == "cpu":
            torch.set_num_threads(compute_threads(scorer.num_threads, scorer.num_cpus))
        self.module = load().to(self.device).eval().requires_grad_(False)
        self.passes = Passes.of(self.module, share_prompts)
        self._store, self._patience = store, patience
        if store is not None:
            for note in self.passes.notes:
                store.call(PolicyStore.post, Noted(note))

    def settle(self) -> None:
        """Wait for the handshake, and let rows pass in the way that it chose for models of this class.

        Only the first call does so; it must come before the first rows.
        """
        store, self._store = self._store, None
        if store is None:
            return
        change = store.wait(PolicyStore.wait_settled, self._patience)
        decoder = getattr(self.module, "decoder", None)
        if change is not None and type(decoder).__name__ == change.decoder:
            self.passes = self.passes.taking(change.way, self.module)

    def score(self, table: pa.Table, forward: Callable[[M, ModelInputs], Tensor], routes: bool = False) -> pa.Array:
        """Compute one number for each response token.

        Args:
            table: generated rows (`prompt_ids`, `response_ids`, perhaps `contexts`); there may be none, and responses
                may be empty.
            forward: runs the model on one micro-batch, and returns the numbers [n] of its n response tokens.
            routes: as in `TokenBatch.from_table`.

        Returns:
            list column of float32, with one number per entry of `response_ids` in every row.

        Raises:
            ValueError: as `unfold`, or a context has more tokens than a forward pass may have.
        """
        rows = TokenBatch.from_table(table, routes)
        numbers = np.zeros(len(rows.response_ids), dtype=np.float32)
        self.fill(rows, lambda module, batch: (forward(module, batch),), (numbers,))
        return ragged(numbers, rows.row_offsets, FLOATS)

    @torch.no_grad()
    def fill(
        self, rows: TokenBatch, forward: Callable[[M, ModelInputs], Sequence[Tensor]], into: Sequence[np.ndarray]
    ) -> None:
        """Compute several numbers for each of N response tokens.

        Args:
            rows: the rows.
            forward: runs the model on one micro-batch, and returns one tensor [n, ...] for each array of `into`.
            into: arrays [N, ...] for the results.

        Raises ValueError as `score` does.
        """
        self.settle()
        longest = max(rows.lengths, default=0)
        if longest > self.max_token_len:
            row = rows.rows_of(np.array(rows.lengths.index(longest)))
            raise ValueError(
                f"row {row} has {longest} tokens (prompt + response), more than the "
                f"{self.max_token_len} of one forward pass; raise {scorer_key(self.name)}.max_token_len to at least "
                f"{longest}"
            )
        packs, _ = pack_rows(rows, range(len(rows)), self.max_token_len, self.passes.shared, whole=False)
        packed, reader = self.passes.packed, getattr(self.module, "image_reader", None)
        place = reader and reader.place
        for part in split_micro_batches(rows.pack_lengths(packs), self.max_token_len, packed=packed):
            batch = pack(rows, [packs[i] for i in part], packed=packed, place_images=place).to(self.device)
            for array, values in zip(into, forward(self.module, batch), strict=True):
                numbers = values.float() if values.is_floating_point() else values
                array[batch.token_index] = numbers.cpu().numpy()


class StoreWeights:
    """Loads published weights into a replica's module, so that they are at least as new as the rows to score.

    Args:
        module: the module; weights are written in place.
        store: the policy store, for this attempt.
        model: name of the published model, `POLICY` or `CRITIC`.
        deadlines: `admission` limits the wait for a version (in a replay it may not be published yet), `publish` the
            transfer of weights.
        published_name: turns a tensor's name in `module` into its published name.
    """

    def __init__(
        self,
        module: nn.Module,
        store: StoreClient,
        model: str,
        deadlines: DeadlineConfig,
        published_name: Callable[[str], str] = str,
    ):
        self._store, self._model, self._deadlines = store, model, deadlines
        self._targets = {published_name(name): tensor for name, tensor in tensors(module)}
        self._version = -1
        """Version of the weights in the module; -1 before the first load."""

    def bring_to(self, table: pa.Table) -> int:
        """Load the store's current weights, unless the module is at least as new as the newest row of `table`.

        Returns the version of the module's weights; -1, without a load, if `table` has no rows.

        Raises:
            StaleAttempt: the train workers have restarted.
            StoreTimeout: the train workers did not publish the version in time.
            TimeoutError: the store did not answer, or a bucket of weights did not arrive, in time.
            ValueError: the published weights do not fit the module, or arrived damaged.
        """
        if not len(table):
            return -1
        version = pc.max(table["policy_version"]).as_py()
        if version > self._version:
            ticket = self._store.wait(PolicyStore.weights, self._model, version, self._deadlines.admission)
            # A load that fails leaves the module between two versions.
            self._version = -1
            self._load(ticket)
            self._version = ticket.version
        return self._version

    @torch.no_grad()
    def _load(self, ticket: Ticket) -> None:
        published = f"{self._model} weights: version {ticket.version}"
        copy_into(self._targets, ticket.shards, self._deadlines.publish, published)
