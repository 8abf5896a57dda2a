"""The update written out: `transformers`' own model, one row at a time, and sums over padded tensors [B, T]."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


def plain_log_probs(model: Path, rows: list[dict[str, Any]], temperature: float = 1.0) -> tuple[Any, Tensor, Tensor]:
    """`transformers`' own model, and log-probs and entropies [B, T] of the responses, one forward pass per row."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    width = max(len(row["response_ids"]) for row in rows)
    log_probs, entropies = [], []
    for row in rows:
        ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
        first, count = len(row["prompt_ids"]), len(row["response_ids"])
        logits = lm(input_ids=ids[None]).logits[0, first - 1 : first - 1 + count] / temperature
        all_log_probs = logits.log_softmax(-1)
        chosen = all_log_probs[torch.arange(count), ids[first:]]
        pad = (0, width - count)
        log_probs.append(torch.nn.functional.pad(chosen, pad))
        entropies.append(torch.nn.functional.pad(-(all_log_probs.exp() * all_log_probs).sum(-1), pad))
    return lm, torch.stack(log_probs), torch.stack(entropies)


def padded(rows: list[dict[str, Any]], name: str) -> Tensor:
    width = max(len(row["response_ids"]) for row in rows)
    return torch.tensor([list(map(float, row[name])) + [0.0] * (width - len(row[name])) for row in rows])


def aggregate(values: Tensor, mask: Tensor, mode: str, divisor: float) -> Tensor:
    """[B, T] to one number, as the modes are defined; sequences without a token are left out."""
    kept = mask.sum(1) > 0
    values, mask = (values * mask)[kept], mask[kept]
    return {
        "token-mean": values.sum() / mask.sum(),
        "token-sum": values.sum(),
        "seq-mean-token-sum": values.sum(1).mean(),
        "seq-mean-token-sum-norm": (values.sum(1) / divisor).mean(),
        "seq-mean-token-mean": (values.sum(1) / mask.sum(1)).mean(),
    }[mode]


def gradient_norm(*modules: torch.nn.Module) -> float:
    """Of all parameters together."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
