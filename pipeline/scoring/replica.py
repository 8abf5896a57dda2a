"""What the scoring stages share: a whole model on one device, and its weights from the policy store.

A stage makes one `Replica`, hands it the forward pass that it wants and gets a list column back:

    replica = Replica(lambda: load_value_model(config), config.scoring.value, "value")
    weights = StoreWeights(replica.module, store, CRITIC, timeout)   # not where the model is frozen
    version = weights.bring_to_rows(table)
    column = replica.score(table, lambda module, batch: ...)

Rows run in the micro-batches of the trainer (`pipeline/models/packing.py`): grouped by length and padded on the right,
some behind one copy of their prompt. A token's number depends on its own row alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from pipeline.config.learner import FSDPConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ScorerConfig
from pipeline.models.batch import TokenBatch
from pipeline.models.micro_batches import split_micro_batches
from pipeline.models.packing import ModelInputs, pack
from pipeline.models.sharing import share_prefixes, shared_size
from pipeline.rows import FLOATS, ragged
from pipeline.store.client import StoreClient
from pipeline.store.policy_store import PolicyStore
from pipeline.store.versions import Ticket
from pipeline.threads import compute_threads
from pipeline.weights.load import fetch, parameters

M = TypeVar("M", bound=nn.Module)


def scoring_model(model: ModelConfig, scorer: ScorerConfig, fsdp: FSDPConfig, path: str | None = None) -> ModelConfig:
    """`model` as a replica loads it: in the type that `scorer` asks for, else the one the trainer computes in.

    Args:
        model: the trained model.
        scorer: the pool.
        fsdp: sharding of the learner whose numbers the replica should give.
        path: another model than the trained one.
    """
    return dataclasses.replace(
        model,
        path=path or model.path,
        dtype=scorer.dtype or fsdp.param_dtype or model.dtype,
        enable_gradient_checkpointing=False,
    )


def newest(table: pa.Table) -> int:
    """The newest policy version that generated a row; the table must have rows."""
    return pc.max(table["policy_version"]).as_py()


class Replica(Generic[M]):
    """A model that scores rows.

    Args:
        load: builds the model on the CPU.
        scorer: device, threads and the size of a forward pass.
        name: of the pool, as in `scoring.<name>`.
        share_prompts: `model.share_prompts`, for modules with a `decoder`.
    """

    def __init__(self, load: Callable[[], M], scorer: ScorerConfig, name: str, share_prompts: str = "never"):
        self.name, self.max_token_len = name, scorer.max_token_len
        self.device = torch.device("cuda" if scorer.num_gpus else "cpu")
        if self.device.type == "cpu":
            torch.set_num_threads(compute_threads(scorer.num_threads, scorer.num_cpus))
        self.module = load().to(self.device).eval().requires_grad_(False)
        self._shared_size = shared_size(share_prompts, self.module, self.device)

    @torch.no_grad()
    def score(self, table: pa.Table, forward: Callable[[M, ModelInputs], Tensor]) -> pa.Array:
        """One number for each response token.

        Args:
            table: generated rows (`prompt_ids`, `response_ids`); there may be none, and responses may be empty.
            forward: gives the numbers [n] of the n response tokens of one forward pass.

        Returns:
            list column of float32, as long as `response_ids` in every row.

        Raises:
            ValueError: a row is longer than a forward pass may be, or has a response after an empty prompt.
        """
        rows = TokenBatch.from_table(table)
        lengths = rows.lengths
        if lengths and max(lengths) > self.max_token_len:
            raise ValueError(
                f"row {int(np.argmax(lengths))} has {max(lengths)} tokens (prompt + response), more than the "
                f"{self.max_token_len} of one forward pass; raise scoring.{self.name}.max_token_len to at least "
                f"{max(lengths)}"
            )
        numbers = np.zeros(len(rows.response_ids), dtype=np.float32)
        packs = share_prefixes(rows, range(len(rows)), self.max_token_len, self._shared_size)
        for part in split_micro_batches(rows.pack_lengths(packs), self.max_token_len):
            batch = pack(rows, [packs[i] for i in part]).to(self.device)
            numbers[batch.token_index] = forward(self.module, batch).float().cpu().numpy()
        return ragged(numbers, rows.response_offsets, FLOATS)


class StoreWeights:
    """Keeps a replica's module at the version that its rows need.

    Args:
        module: loaded in place.
        store: the policy store, for this attempt.
        model: which of the published models, `POLICY` or `CRITIC`.
        timeout: seconds that publication and transfer may take (`trainer.deadlines.publish`).
        published_name: turns a parameter's name in `module` into the one it was published under.
    """

    def __init__(
        self,
        module: nn.Module,
        store: StoreClient,
        model: str,
        timeout: float,
        published_name: Callable[[str], str] = str,
    ):
        self._store, self._model, self._timeout = store, model, timeout
        self._parameters = {published_name(name): parameter for name, parameter in module.named_parameters()}
        self.version = -1
        """What the module holds; -1 before the first load."""

    def bring_to_rows(self, table: pa.Table) -> int:
        """`bring_to` the newest policy version that generated a row of `table`.

        No rows need no weights, and nothing is waited for: a chunk of validation rows has left the stream before.
        """
        return self.bring_to(newest(table)) if len(table) else -1

    def bring_to(self, version: int) -> int:
        """Load the store's current weights unless the module holds `version` or a newer one; the version it then holds.

        Raises:
            StaleAttempt: the train workers have restarted.
            StoreTimeout: the train workers did not publish the version in time.
            TimeoutError: the store did not answer, or a rank's weights did not arrive, in time.
            ValueError: the published weights are not those of the module, or arrived damaged.
        """
        if version > self.version:
            ticket = self._store.wait(PolicyStore.weights, self._model, version, self._timeout)
            # A load that fails leaves the module between two versions.
            self.version = -1
            self._load(ticket)
            self.version = ticket.version
        return self.version

    @torch.no_grad()
    def _load(self, ticket: Ticket) -> None:
        device = next(iter(self._parameters.values())).device

        def take(refs: list[Any]) -> list[Any]:
            try:
                return fetch(refs, device, self._timeout)
            except TimeoutError:
                ranks = ", ".join(str(shard.rank) for shard in ticket.shards)
                raise TimeoutError(
                    f"{self._model} weights: a bucket of version {ticket.version} did not arrive from train ranks "
                    f"{ranks} within {self._timeout:.0f} s (trainer.deadlines.publish)"
                ) from None

        missing = set(self._parameters)
        for name, tensor in parameters(ticket.shards, take):
            target = self._parameters.get(name)
            if target is None or target.shape != tensor.shape:
                here = "does not know" if target is None else f"has with shape {tuple(target.shape)}"
                raise ValueError(
                    f"{self._model} weights: version {ticket.version} holds {name!r} with shape "
                    f"{tuple(tensor.shape)}, which this replica {here}; it must load the model that is trained"
                )
            target.copy_(tensor)
            missing.discard(name)
        if missing:
            raise ValueError(
                f"{self._model} weights: version {ticket.version} lacks {len(missing)} of {len(self._parameters)} "
                f"parameters: {', '.join(sorted(missing))}; the train workers must publish all of them"
            )
