"""Time and memory of the head: log-probs and gradients from hidden states, fused against autograd with recomputation.

    python -m benchmarks.head                          # 4,096 tokens, width 320, 8,192 tokens of vocabulary
    python -m benchmarks.head --device cuda --dtype bfloat16 --width 3584 --vocabulary 151936 --tokens 16384

`checkpointed` is the plain softmax in chunks that autograd computes again in the backward pass. Both are timed in
turns, on a CPU with one thread and in processor time. Entropy is `measured` (no gradient) or `trained`, or left out.
"""

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.models.head import LogitRule, token_log_probs

ENTROPY = ("none", "measured", "trained")
Head = Callable[[Tensor, Tensor, Tensor, float, int, bool], tuple[Tensor, Tensor | None]]


def fused(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the fused head."""
    return token_log_probs(hidden, weight, None, targets, LogitRule(temperature=temperature), chunk, entropy)


def checkpointed(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the plain softmax, recomputed chunk by chunk."""

    def one(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
        log_probs = torch.log_softmax((states @ weight.t()).float() / temperature, dim=-1)
        picked = log_probs.gather(-1, chosen[:, None]).squeeze(-1)
        return picked, -(log_probs.exp() * log_probs).sum(-1) if entropy else None

    parts = [
        checkpoint(one, hidden[start : start + chunk], targets[start : start + chunk], use_reentrant=False)
        for start in range(0, len(hidden), chunk)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]) if entropy else None


class Case:
    """One size of the head.

    Args:
        tokens, width, vocabulary: N, H and V.
        dtype: type of hidden states and weights.
        device: device of hidden states and weights.
        chunk: positions whose logits exist at a time.
    """

    def __init__(self, tokens: int, width: int, vocabulary: int, dtype: torch.dtype, device: str, chunk: int):
        generator = torch.Generator().manual_seed(0)
        normal = [
            torch.randn(*shape, generator=generator) for shape in ((tokens, width), (vocabulary, width), (tokens,))
        ]
        self.hidden, self.weight = (value.to(device, dtype) for value in (normal[0], normal[1] / width**0.5))
        self.given, self.chunk = normal[2].to(device), chunk
        self.targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)

    def run(self, head: Head, entropy: str) -> tuple[float, list[Tensor]]:
        """Run a forward and a backward pass; returns the seconds, and log-probs, gradients and entropies."""
        hidden, weight = (value.clone().requires_grad_() for value in (self.hidden, self.weight))
        self._wait()
        clock = time.perf_counter if hidden.is_cuda else time.process_time
        began = clock()
        log_probs, entropies = head(hidden, weight, self.targets, 0.9, self.chunk, entropy != "none")
        loss = (log_probs * self.given).sum()
        if entropy == "trained" and entropies is not None:
            loss = loss + (entropies * self.given).sum()
        loss.backward()
        self._wait()
        seconds = clock() - began
        assert hidden.grad is not None and weight.grad is not None
        results = [log_probs.detach(), hidden.grad, weight.grad]
        return seconds, results + ([entropies.detach()] if entropies is not None else [])

    def _wait(self) -> None:
        if self.hidden.is_cuda:
            torch.cuda.synchronize()


def compare(case: Case, repeats: int) -> list[tuple[str, float, float, float]]:
    """Compare both ways for each use of the entropy: their best seconds, and their largest relative difference."""
    rows = []
    for entropy in ENTROPY:
        times: dict[str, list[float]] = {"fused": [], "checkpointed": []}
        for _ in range(repeats):
            found = {}
            for head in (checkpointed, fused):
                seconds, found[head.__name__] = case.run(head, entropy)
                times[head.__name__].append(seconds)
        pairs = zip(found["fused"], found["checkpointed"], strict=True)
        difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        rows.append((entropy, min(times["checkpointed"]), min(times["fused"]), difference))
    return rows


def main() -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("width", 320), ("vocabulary", 8192), ("chunk", 1024), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    a = parser.parse_args()
    if a.device == "cpu":
        torch.set_num_threads(1)
    case = Case(a.tokens, a.width, a.vocabulary, getattr(torch, a.dtype), a.device, a.chunk)
    table = Table("entropy", "checkpointed (s)", "fused (s)", "ratio", "largest difference")
    for entropy, theirs, ours, difference in compare(case, a.repeats):
        table.add_row(entropy, f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.2f}", f"{difference:.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
