"""Settings of the rollout stage (`rollout.*`)."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting
from pipeline.config.engines import FACTS, SGLANG_PYTHON, EngineFacts


@dataclass
class SamplingConfig:
    """Sampling of validation responses."""

    n: int = setting(1, at_least=1)
    """Number of responses per validation prompt."""

    temperature: float = setting(0.0, at_least=0, at_most=2)
    """Sampling temperature. 0 takes the likeliest token (greedy)."""

    top_p: float = setting(1.0, above=0, at_most=1)
    """Probability mass of nucleus sampling. 1: all tokens."""

    top_k: int = setting(-1, at_least=1, or_value=-1)
    """Number of likeliest tokens to sample from. -1: all."""


@dataclass
class RolloutConfig:
    """Engines that generate responses."""

    name: str = setting("vllm", choices=tuple(FACTS))
    """Engine: `vllm`, or `hf`, the model of `transformers` in the code of the trainer: for models that vLLM lacks, for
    machines without vLLM, and to learn whether a problem is the engine's. `sglang` is SGLang's server, a child process
    with an environment of its own."""

    engine_python: str | None = setting(None, path="program")
    """Interpreter of SGLang's environment (`name=sglang`) on every machine with engines. Null is
    `.venv-sglang/bin/python` in the folder of the command, which `make sglang-env` makes."""

    n: int = setting(8, at_least=1)
    """Number of responses per training prompt (group size)."""

    temperature: float = setting(1.0, above=0, at_most=2)
    """Sampling temperature of training responses. The trainer's log-probs use the same one."""

    top_p: float = setting(1.0, above=0, at_most=1)
    """Probability mass of nucleus sampling for training responses. 1: all tokens."""

    top_k: int = setting(-1, at_least=1, or_value=-1)
    """Number of likeliest tokens to sample training responses from. -1: all."""

    min_p: float = setting(0.0, at_least=0, at_most=1)
    """Probability of a token, as a fraction of the likeliest token's, below which it is left out of training responses.
    0: none is."""

    max_support: int = setting(4096, at_least=1)
    """Maximum number of token ids that are written for a training token that was sampled from a part of the vocabulary
    (`top_p`, `top_k`, `min_p`, `min_tokens`), so that the trainer computes its log-prob over the same part. Tokens with
    a larger part, and a larger rest, are trained without this, and counted (`rollout/support_unknown`)."""

    replay_routes: bool = False
    """Write the experts that the engine chose for each token of a mixture of experts into the rows, and let the trainer
    take the same ones. Else the trainer's rounding chooses others now and then, and log-probs differ. A row grows by
    two bytes for each token, layer and expert."""

    stop: list[str] = field(default_factory=list)
    """Texts that end a response; the text is kept in the response. Generation is slower, since the engine must decode
    tokens while it generates."""

    min_tokens: int = setting(0, at_least=0)
    """Minimum number of tokens in a response; it cannot end earlier."""

    ignore_eos: bool = False
    """Generate `data.max_response_length` tokens, past the end-of-sequence token. For benchmarks."""

    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)

    chunk_prompts: int | None = setting(None, at_least=1)
    """Number of prompts in a chunk. Stages of the pipeline pass on whole chunks. Null: the largest number up to 16 with
    which each engine gets a chunk, and each train worker two chunks of each iteration and whole chunks of each
    mini-batch. A run keeps its number."""

    num_engines: int = setting(1, at_least=1)
    """Number of engines; each is a Ray actor. In an elastic pool (`min_engines` below `max_engines`), the number at the
    start."""

    min_engines: int | None = setting(None, at_least=1)
    """Minimum number of engines of an elastic pool; the run needs resources for them. Null takes `num_engines`."""

    max_engines: int | None = setting(None, at_least=1)
    """Maximum number of engines of an elastic pool. Null takes `num_engines`."""

    weight_update: str = setting("between_chunks", choices=("between_chunks", "in_flight"))
    """Time at which an engine takes new weights: `between_chunks`, so each response comes from one version, or
    `in_flight`, between two tokens (needs `algorithm.max_staleness` above 0)."""

    update_kv: str = setting("recompute", choices=("recompute", "keep"))
    """KV cache of unfinished responses when weights change during generation (`weight_update=in_flight`): `recompute`
    it with the new weights, or `keep` the old one at no cost."""

    chunks_in_flight: int = setting(0, at_least=0)
    """Number of chunks that an engine works on at the same time. 0: the engine's share of the chunks of an iteration,
    or as many as fill `max_num_seqs`, whichever is more."""

    num_cpus: float = setting(1, at_least=0)
    """Ray CPUs of one engine."""

    num_gpus: float = setting(0, at_least=0)
    """Ray GPUs of one engine. 0: the engine runs on CPUs. Below 1: it shares a GPU."""

    tensor_parallel_size: int = setting(1, at_least=1)
    """Number of GPUs over which the model of an engine is split, all on one node. Above 1, `num_gpus` must be 1."""

    num_threads: int = setting(0, at_least=0)
    """Number of compute threads of a CPU engine. 0 takes `num_cpus`."""

    dtype: str = setting("bfloat16", choices=("float32", "bfloat16", "float16"))
    """Type of an engine's computation and of the weights sent to it."""

    gpu_memory_utilization: float = setting(0.5, at_least=0, at_most=1)
    """Fraction of a GPU's memory for the weights and the KV cache of an engine."""

    sleep: bool = False
    """Free the GPU memory of an engine while it is idle, so engines and train workers can share GPUs."""

    cpu_kvcache_space_gb: int = setting(1, at_least=1)
    """KV cache of a CPU engine, in GiB."""

    max_num_seqs: int = setting(256, at_least=1)
    """Maximum number of sequences that an engine decodes at the same time."""

    max_num_batched_tokens: int = 8192
    """Maximum number of tokens in one step of an engine."""

    enable_prefix_caching: bool = True
    """Compute the KV cache of equal beginnings of prompts once per policy version."""

    enforce_eager: bool = False
    """Run the engine without CUDA graphs."""

    seed_per_request: bool = True
    """Seed each request from the run's seed, the prompt and the sample number, so rows do not depend on which engine
    generates them."""

    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the engine: of `vllm`, fields of its `EngineArgs`; of `hf`, `use_cache` (`false` passes whole
    rows at each step, in the way of the trainer, which is slow); of `sglang`, some arguments of its server."""

    @property
    def facts(self) -> EngineFacts:
        """Abilities of the engine."""
        return FACTS[self.name]

    @property
    def sglang_python(self) -> str:
        """Interpreter of SGLang's environment; a relative path is relative to the folder of the command."""
        return self.engine_python or SGLANG_PYTHON

    @property
    def gpus(self) -> float:
        """Ray GPUs of one engine."""
        return self.num_gpus * self.tensor_parallel_size

    @property
    def fewest(self) -> int:
        """Minimum number of engines, without which the run cannot start."""
        return self.num_engines if self.min_engines is None else self.min_engines

    @property
    def most(self) -> int:
        """Maximum number of engines that the run may have."""
        return self.num_engines if self.max_engines is None else self.max_engines

    @property
    def elastic(self) -> bool:
        """True if the number of engines may change during the run."""
        return self.fewest < self.most

    def restrictions(self) -> dict[str, bool]:
        """Return, for each key that can restrict training tokens to a part of the vocabulary, whether it does."""
        cut = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        # Up to this number of tokens, tokens that end a response are not sampled.
        return cut | {"min_tokens": self.min_tokens > 0}

    def in_flight(self, chunks_per_iteration: int, chunk_prompts: int) -> int:
        """Return the number of chunks that one engine works on at the same time.

        Args:
            chunks_per_iteration: number of chunks in one iteration, over all engines.
            chunk_prompts: number of prompts in a chunk.
        """
        share = -(-chunks_per_iteration // self.num_engines)
        fill = -(-self.max_num_seqs // (chunk_prompts * min(self.n, self.val_kwargs.n)))
        return self.chunks_in_flight or max(share, fill)

    def problems(self) -> dict[str, object]:
        """Return sentences on engine settings that exclude each other, each with a true value if it applies."""
        split = self.tensor_parallel_size > 1
        table: dict[str, object] = {
            "{rollout.num_engines}, with which the run starts, must lie between rollout.min_engines="
            f"{self.fewest} and rollout.max_engines={self.most}": not (self.fewest <= self.num_engines <= self.most),
            "{rollout.num_gpus}: an engine uses one GPU or a part of one; to split its model over several, set "
            "rollout.num_gpus=1 and rollout.tensor_parallel_size to their number": self.num_gpus > 1,
            "{rollout.tensor_parallel_size} splits a model over GPUs, each of which the engine must own, but "
            "{rollout.num_gpus} is a part of one; set it to 1, or {rollout.tensor_parallel_size} to 1": split
            and self.num_gpus < 1,
            "{rollout.tensor_parallel_size} with {rollout.min_engines} and {rollout.max_engines}: an elastic pool "
            "cannot hold engines of several GPUs; leave both at null": split and self.elastic,
            "{rollout.gpu_memory_utilization} leaves a GPU engine no memory; set it above 0": (
                self.num_gpus > 0 and self.gpu_memory_utilization == 0
            ),
            "{rollout.dtype} is not supported by a CPU engine ({rollout.num_gpus}); set float32 or bfloat16": (
                self.num_gpus == 0 and self.dtype == "float16"
            ),
            "{rollout.sleep} is for engines on GPUs (rollout.num_gpus above 0)": self.sleep and self.num_gpus == 0,
            "{rollout.max_num_batched_tokens} is below {rollout.max_num_seqs}: a step could not decode one token of "
            "each sequence": self.max_num_batched_tokens < self.max_num_seqs,
        }
        for name, key, used in (
            ("tensor_parallel_size", "tensor_parallel_size", split),
            ("distributed_executor_backend", "tensor_parallel_size", split),
            ("enable_sleep_mode", "sleep", self.sleep),
        ):
            sentence = f"rollout.engine_kwargs.{name} is set by rollout.{key}; leave it out"
            table[sentence] = used and name in self.engine_kwargs
        return table
