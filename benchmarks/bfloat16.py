"""The effect of the weights' type on AdamW's steps: the share of the weights that moves, and the distance.

    python -m benchmarks.bfloat16 --model models/tiny-sft-1

Weights of a model take steps with gradients of random sign, which agree in three of four steps. Three types are
compared: float32, bfloat16 as the product trains it, and pure bfloat16, with weights and averages in that type, as
torch trains it.
"""

import argparse

import torch
from torch import nn

from pipeline.config.learner import OptimConfig
from pipeline.config.model import ModelConfig
from pipeline.models.policy import load_policy
from pipeline.train.optim import LOW, build_optimizer, joined

RATES = (1e-6, 1e-5, 1e-4)


def moved(model: str, dtype: str, alone: bool, lr: float, steps: int) -> tuple[float, float, float]:
    """Measure the share of the weights that the steps change, their mean distance, and the bytes of state a weight."""
    policy = load_policy(ModelConfig(path=model, dtype=dtype)).bfloat16().to(getattr(torch, dtype))
    optimizer = build_optimizer(policy, OptimConfig(lr=lr, weight_decay=0.0))
    if alone:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0, fused=True)
    matrices = [parameter for parameter in policy.parameters() if parameter.ndim == 2]
    before = [parameter.detach().double() for parameter in matrices]
    generator = torch.Generator().manual_seed(0)
    signs = [torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1 for parameter in matrices]
    for _ in range(steps):
        for parameter, sign in zip(matrices, signs, strict=True):
            agree = torch.rand(parameter.shape, generator=generator) < 0.75
            parameter.grad = torch.where(agree, sign, -sign).to(parameter.dtype)
        optimizer.step()

    def whole(parameter: nn.Parameter) -> torch.Tensor:
        state = optimizer.state[parameter]
        return (joined(parameter.detach(), state[LOW]) if LOW in state else parameter.detach()).double()

    distances = [(whole(parameter) - old).abs() for parameter, old in zip(matrices, before, strict=True)]
    count = sum(parameter.numel() for parameter in matrices)
    state = sum(value.nbytes for part in optimizer.state.values() for name, value in part.items() if name != "step")
    return (
        sum(int((distance > 0).sum()) for distance in distances) / count,
        sum(float(distance.sum()) for distance in distances) / count,
        state / count,
    )


def main() -> None:
    """Print one line for each type and rate."""
    parser = argparse.ArgumentParser(description="Which share of the weights AdamW moves in each type.")
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    for lr in RATES:
        for name, dtype, alone in (
            ("float32", "float32", False),
            ("bfloat16", "bfloat16", False),
            ("bfloat16 alone", "bfloat16", True),
        ):
            share, distance, state = moved(options.model, dtype, alone, lr, options.steps)
            print(
                f"lr {lr:g}  {name:14}  weights that moved {share:7.2%}, mean distance {distance:.2e}, state "
                f"{state:.0f} bytes a weight",
                flush=True,
            )


if __name__ == "__main__":
    main()
