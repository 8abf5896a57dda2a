"""What the scoring stages share: a whole model on one device, and its weights from the policy store.

A stage makes one `Replica`, hands it the forward pass that it wants and gets a list column back:

    replica = Replica(lambda: load_value_model(config), config.scoring.value, "value")
    weights = StoreWeights(replica.module, store, generation, CRITIC, timeout)   # not where the model is frozen
    version = weights.bring_to_rows(table)
    column = replica.score(table, lambda module, batch: ...)

Rows run in the micro-batches of the trainer (`pipeline/train/packing.py`): grouped by length and padded on the right,
some behind one copy of their prompt. A token's number depends on its own row alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.exceptions
import torch
from torch import Tensor, nn

from pipeline.ask import ANSWER_S
from pipeline.cluster import compute_threads
from pipeline.rollout.weights import fetch, parameters
from pipeline.rows import FLOATS, ragged
from pipeline.scoring.config import ScorerConfig
from pipeline.store import Ticket
from pipeline.train.config import FSDPConfig, ModelConfig
from pipeline.train.packing import Inputs, Sequences, lay_out, split_micro_batches
from pipeline.train.sharing import bundles, shared_size

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

    def __init__(self, load: Callable[[], M], scorer: ScorerConfig, name: str, share_prompts: bool | None = False):
        self.name, self.max_token_len = name, scorer.max_token_len
        self.device = torch.device("cuda" if scorer.num_gpus else "cpu")
        if self.device.type == "cpu":
            torch.set_num_threads(compute_threads(scorer.num_threads, scorer.num_cpus))
        self.module = load().to(self.device).eval().requires_grad_(False)
        self._shared_size = shared_size(share_prompts, self.module)

    @torch.no_grad()
    def score(self, table: pa.Table, forward: Callable[[M, Inputs], Tensor]) -> pa.Array:
        """One number for each response token.

        Args:
            table: generated rows (`prompt_ids`, `response_ids`); there may be none, and responses may be empty.
            forward: gives the numbers [n] of the n response tokens of one forward pass.

        Returns:
            list column of float32, as long as `response_ids` in every row.

        Raises:
            ValueError: a row is longer than a forward pass may be, or has a response after an empty prompt.
        """
        rows = Sequences.from_table(table)
        lengths = rows.lengths
        if lengths and max(lengths) > self.max_token_len:
            raise ValueError(
                f"row {int(np.argmax(lengths))} has {max(lengths)} tokens (prompt + response), more than the "
                f"{self.max_token_len} of one forward pass; raise scoring.{self.name}.max_token_len to at least "
                f"{max(lengths)}"
            )
        numbers = np.zeros(len(rows.response_ids), dtype=np.float32)
        taken = bundles(rows, range(len(rows)), self.max_token_len, self._shared_size)
        for part in split_micro_batches(rows.bundle_lengths(taken), self.max_token_len):
            batch = lay_out(rows, [taken[i] for i in part]).to(self.device)
            numbers[batch.flat] = forward(self.module, batch).float().cpu().numpy()
        return ragged(numbers, rows.response_offsets, FLOATS)


class StoreWeights:
    """Keeps a replica's module at the version that its rows need.

    Args:
        module: loaded in place.
        store: handle of the policy store.
        generation: of the stream.
        model: which of the published models, `POLICY` or `CRITIC`.
        timeout: seconds that publication and transfer may take (`trainer.deadlines.publish`).
        published_name: turns a parameter's name in `module` into the one it was published under.
    """

    def __init__(
        self,
        module: nn.Module,
        store: Any,
        generation: int,
        model: str,
        timeout: float,
        published_name: Callable[[str], str] = str,
    ):
        self._store, self._generation, self._model, self._timeout = store, generation, model, timeout
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
            StaleGeneration: the train workers have restarted.
            StoreTimeout: the train workers did not publish the version in time.
            TimeoutError: the store did not answer, or a rank's weights did not arrive, in time.
            ValueError: the published weights are not those of the module, or arrived damaged.
        """
        if version > self.version:
            ticket = self._ask(version)
            # A load that fails leaves the module between two versions.
            self.version = -1
            self._load(ticket)
            self.version = ticket.version
        return self.version

    def _ask(self, version: int) -> Ticket:
        asked = self._store.weights.remote(self._generation, self._model, version, self._timeout)
        try:
            # The store keeps the deadline and knows whom it waits for; this one is for a store that does not answer.
            return ray.get(asked, timeout=self._timeout + ANSWER_S)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(
                f"{self._model} weights: the policy store gave no answer about version {version} within "
                f"{self._timeout + ANSWER_S:.0f} s (trainer.deadlines.publish and {ANSWER_S:.0f} s)"
            ) from None

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
