"""Rollout engines with one protocol. `rollout.name` chooses the engine."""

from collections.abc import Sequence
from typing import Protocol

from pipeline.config.model import ModelConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.generation import EngineOutput, EngineRequest
from pipeline.weights.load import Shard


class Engine(Protocol):
    """An engine, which only the thread of its `EngineLoop` uses.

    An engine labels each token with the policy version that generated it: -1 before the first `load`. Log-probs
    belong to the distribution from which a token was sampled; greedy tokens have the log-prob at temperature 1.
    """

    def add(self, request_id: str, request: EngineRequest) -> None:
        """Add a request. Later steps must not read KV that another policy version computed for another request."""

    def step(self) -> list[EngineOutput]:
        """Generate for a short time; returns the requests that are finished."""

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests; they never finish."""

    def drain(self) -> list[EngineOutput]:
        """Finish the steps that the engine has begun ahead; returns the requests that are finished.

        Without this, tokens of the old weights would be labelled with the new version.
        """

    def load(self, shards: Sequence[Shard], timeout: float, version: int) -> None:
        """Replace the weights, or the adapter, in place, and label tokens with `version` from now on.

        No request may be running.

        Args:
            shards: the published weights.
            timeout: seconds in which they must arrive.
            version: the policy version.

        Raises:
            TimeoutError: the weights did not arrive in time.
            ValueError: the weights arrived damaged.
            FinalError: the engine cannot use all that is published, or needs more.
        """

    def update(self, shards: Sequence[Shard], timeout: float, version: int, recompute: bool) -> None:
        """Replace the weights of the drained engine while requests run, between two of their tokens; else like `load`.

        With `recompute` the KV cache is dropped and computed again with the new weights, also for running requests.
        Without it, running requests keep the KV that the old weights computed, and later requests never read it.
        """

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache. No request may be running."""

    def wake(self, shards: Sequence[Shard], timeout: float, version: int) -> None:
        """Allocate the GPU memory again after `sleep`, and load weights into it, like `load`."""

    def close(self) -> None:
        """End all that the engine has started, such as processes. Running requests are dropped."""


def build(model: ModelConfig, rollout: RolloutConfig, max_model_len: int, seed: int) -> Engine:
    """Build the engine that `rollout.name` names.

    In a run its weights have no meaning until the first policy version is loaded from the trainer. Engines of an
    evaluation read them from the disk.

    Args:
        model: settings of the model.
        rollout: settings of the engine.
        max_model_len: maximum number of tokens of a prompt and its response together.
        seed: seed for requests without one.
    """
    if rollout.name == "hf":
        from pipeline.rollout.engines.hf.engine import HuggingFace

        return HuggingFace(model, rollout, max_model_len, seed)
    from pipeline.rollout.engines.vllm.engine import VLLM

    return VLLM(model, rollout, max_model_len, seed)
