"""Settings of the rollout stage (`rollout.*`)."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SamplingConfig:
    """How validation responses are sampled (`rollout.val_kwargs.*`)."""

    n: int = 1
    """Responses per validation prompt."""

    temperature: float = 0.0
    """0 is greedy."""

    top_p: float = 1.0
    """Nucleus sampling mass."""

    top_k: int = -1
    """Sample among the k likeliest tokens; -1 takes all."""


@dataclass
class RolloutConfig:
    """The engine pool that turns prompts into responses."""

    n: int = 8
    """Responses per training prompt (the group size)."""

    temperature: float = 1.0
    """Sampling temperature of training responses; the trainer's log-probs use the same."""

    top_p: float = 1.0
    """Nucleus sampling mass of training responses."""

    top_k: int = -1
    """Sample among the k likeliest tokens; -1 takes all."""

    stop: list[str] = field(default_factory=list)
    """Texts that end a response, training and validation alike; the one that ended it stays in the response. The engine
    then decodes while it generates, which costs time."""

    min_tokens: int = 0
    """Tokens before which no response may end, training and validation alike."""

    ignore_eos: bool = False
    """Go on to `data.max_response_length` past the end-of-sequence token (for benchmarks)."""

    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling of validation responses."""

    chunk_prompts: int = 16
    """Prompts in one chunk, the unit that flows through the stream."""

    oversample: float = 0.0
    """Groups that a chunk of training prompts begins with beyond `chunk_prompts`, as a share of these, rounded up. The
    chunk is done when `chunk_prompts` groups are complete, and the slowest are cut off: 4 of 20 with 0.25 and chunks of
    16. Which ones depends on the clock, so that a run cannot be repeated exactly."""

    oversample_policy: str = "drop"
    """What becomes of groups that are cut off: `drop` them, and their prompts; `cancel` them, and begin them anew,
    once, with a chunk of a later policy version; or `carry` them over, running on as weights change, into a later chunk
    (with `update=in_flight` or `partial_tokens`; one version of `algorithm.max_staleness` is then kept for that). All
    but `carry` favour prompts with short responses."""

    partial_tokens: int = 0
    """Tokens after which a response is interrupted; it goes on behind them with a later iteration and that one's
    weights. 0 interrupts none. With `oversample_policy=carry`, which then needs no `update=in_flight`, and for as many
    groups as a chunk has too many: the others go on at once. Responses with stop strings are never interrupted."""

    num_engines: int = 1
    """Engines in the pool, each one Ray actor; of an elastic pool, those that it begins with."""

    min_engines: int | None = None
    """Engines with which the run must be able to go on, fewer than `num_engines` in an elastic pool; null takes
    `num_engines`."""

    max_engines: int | None = None
    """Engines up to which an elastic pool grows where the cluster has room, or gains it; null takes `num_engines`."""

    scale_up_s: float = 30.0
    """Seconds that the trainer may wait for the rows of an iteration; for each such wait an elastic pool grows, up to
    twice its size."""

    scale_down_s: float = 600.0
    """Seconds in which one engine fewer would have kept all waits below `scale_up_s`, before it is removed; and that a
    lost engine may look for a node before an idle one makes room for it."""

    update: str = "between_chunks"
    """When an engine takes new weights: `between_chunks`, once what it works on is done, so that every response is of
    one policy version (or every go of one, with `partial_tokens`); or `in_flight`, between two tokens of running
    responses (with `algorithm.max_staleness` above 0). Validation responses are of one version either way."""

    update_kv: str = "recompute"
    """What an update in flight does with the KV cache of running responses: `recompute` it with the new weights, so
    that every token has the log-prob that a forward pass of its version gives, or `keep` it, which costs nothing."""

    chunks_in_flight: int = 0
    """Chunks one engine works on at a time; 0 takes an engine's share of an iteration, and at least as many as fill
    `max_num_seqs`."""

    num_cpus: float = 1
    """Ray CPUs of one engine actor."""

    num_gpus: float = 0
    """Ray GPUs of one engine actor."""

    tensor_parallel_size: int = 1
    """GPUs of one node that an engine's model is split over, each with a Ray worker of its own; above 1, `num_gpus`
    must be 1."""

    num_threads: int = 0
    """Compute threads of one CPU engine; 0 takes `num_cpus`."""

    dtype: str = "bfloat16"
    """Type the engine computes in and weights travel in."""

    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory for the engine's weights and KV cache."""

    sleep: bool = False
    """Give a GPU engine's memory back while it has nothing to generate, so that engines and train workers share GPUs
    (`num_gpus` and `trainer.gpus_per_worker` as parts of one)."""

    cpu_kvcache_space_gb: int = 1
    """GiB of KV cache of a CPU engine."""

    max_num_seqs: int = 256
    """Sequences one engine decodes at the same time."""

    max_num_batched_tokens: int = 8192
    """Tokens one engine step may process."""

    enable_prefix_caching: bool = True
    """Share the KV cache of equal prompt beginnings (the samples of one group) within one policy version."""

    enforce_eager: bool = False
    """Run the engine without CUDA graphs."""

    seed_per_request: bool = True
    """Seed every request from the run's seed, the prompt and the sample number, so that a run can be repeated."""

    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further vLLM `EngineArgs`, passed as they are."""

    @property
    def begun_prompts(self) -> int:
        """Training prompts that a chunk begins with."""
        return self.chunk_prompts + math.ceil(round(self.oversample * self.chunk_prompts, 6))

    @property
    def gpus(self) -> float:
        """Ray GPUs of one engine."""
        return self.num_gpus * self.tensor_parallel_size

    @property
    def fewest(self) -> int:
        """Engines that the run needs."""
        return self.num_engines if self.min_engines is None else self.min_engines

    @property
    def most(self) -> int:
        """Engines that the run may have."""
        return self.num_engines if self.max_engines is None else self.max_engines

    @property
    def elastic(self) -> bool:
        """Whether engines come and go during the run."""
        return self.fewest < self.most

    def in_flight(self, chunks_per_iteration: int) -> int:
        """Chunks one engine works on at a time."""
        share = -(-chunks_per_iteration // self.num_engines)
        fill = -(-self.max_num_seqs // (self.chunk_prompts * min(self.n, self.val_kwargs.n)))
        return self.chunks_in_flight or max(share, fill)
