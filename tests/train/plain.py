"""The update written out: `transformers`' own model, one context at a time, and sums over padded tensors [B, T]."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


def sequences(row: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each context of a row."""
    first, *further = row.get("contexts") or [{"tokens": len(row["response_ids"])}]
    prompts = [row["prompt_ids"], *(context["prompt"] for context in further)]
    ends = list(accumulate([first["tokens"], *(context["tokens"] for context in further)], initial=0))
    return [(prompt, row["response_ids"][a:b]) for prompt, a, b in zip(prompts, ends, ends[1:], strict=False)]


def plain_log_probs(model: Path, rows: list[dict[str, Any]], temperature: float = 1.0) -> tuple[Any, Tensor, Tensor]:
    """`transformers`' own model, and log-probs and entropies [B, T] of the responses, one forward pass per context."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    width = max(len(row["response_ids"]) for row in rows)
    log_probs, entropies = [], []
    for row in rows:
        parts = []
        for prompt, response in sequences(row):
            ids, first, count = torch.tensor(prompt + response), len(prompt), len(response)
            logits = lm(input_ids=ids[None]).logits[0, first - 1 : first - 1 + count] / temperature
            all_log_probs = logits.log_softmax(-1)
            chosen = all_log_probs[torch.arange(count), ids[first:]]
            parts.append(torch.stack([chosen, -(all_log_probs.exp() * all_log_probs).sum(-1)]))
        log_prob, entropy = torch.nn.functional.pad(torch.cat(parts, 1), (0, width - len(row["response_ids"])))
        log_probs.append(log_prob)
        entropies.append(entropy)
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
