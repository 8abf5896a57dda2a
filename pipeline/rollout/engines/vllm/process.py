"""Environment variables of a vLLM engine's process."""

from pipeline.config.rollout import RolloutConfig
from pipeline.rollout.engines.vllm import tensor_parallel

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment variable that makes glibc use huge pages: vLLM allocates new memory for new weights, and the first access
to this memory would take longer than the copy."""


def environment(rollout: RolloutConfig) -> dict[str, str]:
    """Return the environment variables."""
    env = {"VLLM_LOGGING_LEVEL": "ERROR", **HUGE_PAGES}
    if rollout.tensor_parallel_size > 1:
        env |= tensor_parallel.ENV
    if rollout.num_gpus == 0 and rollout.enforce_eager:
        # Even in eager mode vLLM compiles one function of its sampler, which takes seconds and needs a C++ compiler.
        env["TORCHDYNAMO_DISABLE"] = "1"
    return env
