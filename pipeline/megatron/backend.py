"""Passes of micro-batches by Megatron's schedules, with its gradient buffers and its distributed optimiser (ZeRO-1).

Weights do not move: each rank has its part of its stage's layers, and the ranks of a data-parallel group have
the same. They divide the optimiser's state, and the sum of gradients, among themselves.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from pipeline.config.learner import OptimConfig
from pipeline.megatron.checkpoint import load_training_state, set_weights, training_state
from pipeline.megatron.device import on_device
from pipeline.megatron.policy import MegatronPolicy, read
from pipeline.models.backend import FsdpBackend, Result
from pipeline.models.head import HeadOutput
from pipeline.models.packing import MicroBatch
from pipeline.models.schedule import from_last, moved


class MegatronBackend(FsdpBackend):
    """Passes and optimiser of a `MegatronPolicy`. Every call is a collective of all ranks.

    Args:
        policy: this rank's stage.
        config: settings of the optimiser.
        device: this rank's device.

    Raises ValueError as `read` does.
    """

    strategy = "megatron"

    def __init__(self, policy: MegatronPolicy, config: OptimConfig, device: torch.device) -> None:
        self._stage, self._device = policy.stage, device
        with on_device():
            buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
            self._buffers = DistributedDataParallel(policy.inner.config, buffers, policy.inner)
            settings = OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=0.0,
                bf16=policy.inner.config.params_dtype == torch.bfloat16,
                params_dtype=policy.inner.config.params_dtype,
                use_distributed_optimizer=True,
            )
            optimizer = get_megatron_optimizer(settings, [self._buffers])
        for group in optimizer.param_groups:
            # Megatron's own schedule would apply the factor.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        self.optimizers: list[Any] = getattr(optimizer, "chained_optimizers", None) or [optimizer]
        """One for all parameters but experts, and one for experts, if the model has some."""
        # Masters keep what bfloat16 weights are rounded from.
        set_weights(self.optimizers, read(policy, policy.lm.name_or_path))
        super().__init__(policy, None)
        self.optimizer: Any = optimizer

    def run(
        self,
        batches: Sequence[MicroBatch],
        forward: Callable[..., Any],
        loss: Callable[[MicroBatch, Any], tuple[Tensor, Result]],
    ) -> list[Result | None]:
        """See `FsdpBackend.run`. Gradients are summed over ranks in `scale`, once per step."""
        results: list[Result | None] = []

        def step(coming: Iterator[MicroBatch], _: Any) -> tuple[Any, Any]:
            batch = next(coming)
            output = forward(batch)

            def found(_: Any) -> tuple[Tensor, Tensor, None]:
                value, result = loss(batch, output)
                results.append(result)
                return value, torch.tensor(1, dtype=torch.int, device=self._device), None

            return output.log_probs if isinstance(output, HeadOutput) else output, found

        with on_device():
            self._pass(step, batches, forward_only=False)
        return results or [None] * len(batches)

    def predict(
        self, batches: Sequence[MicroBatch], forward: Callable[..., Any]
    ) -> Iterator[tuple[MicroBatch, HeadOutput]]:
        """See `StagedBackend.predict`."""
        passed: list[MicroBatch] = []
        outputs: list[HeadOutput] = []

        def step(coming: Iterator[MicroBatch], _: Any) -> tuple[Any, Any]:
            batch = next(coming)
            passed.append(batch)
            output = forward(batch)
            if self._stage.last:
                outputs.append(moved(output, torch.device("cpu")))
            return output.log_probs if isinstance(output, HeadOutput) else output, lambda *_, **__: None

        with on_device():
            self._pass(step, batches, forward_only=True)
        yield from zip(passed, from_last(outputs, self._stage, self._device), strict=True)

    def zero(self) -> None:
        """Clear the gradients."""
        self._buffers.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Sum the gradients over ranks, and multiply them by `factor`; once per step."""
        with on_device():
            finalize_model_grads([self._buffers], None)
            self._buffers.scale_gradients(factor)

    def clip(self, max_norm: float) -> float:
        """See `FsdpBackend.clip`."""
        with on_device():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if max_norm < norm < math.inf:
                for part in self.optimizers:
                    for parameter in part.get_parameters():
                        if (gradient := _gradient(parameter)) is not None:
                            gradient.mul_(max_norm / (norm + 1e-6))
        return norm

    def step(self) -> None:
        """Take an optimiser step."""
        with on_device():
            self.optimizer.step_with_ready_grads()

    def checkpoint_bytes(self) -> int:
        """See `KeepsState` of `train/own_state.py`."""
        # Averages and masters are float32.
        owned = [one.parameter for one in self._module.held() if one.owned]
        return sum(parameter.numel() * (parameter.element_size() + 3 * 4) for parameter in owned)

    def training_state(self, to_load: bool = False) -> dict[str, Any]:
        """See `KeepsState`."""
        with on_device():
            return training_state(self._module, self.optimizers, to_load)

    def load_training_state(self, state: dict[str, Any]) -> None:
        """See `KeepsState`."""
        with on_device():
            load_training_state(self._module, self.optimizers, state)

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """See `FsdpBackend.computing_in`."""
        config = self._module.inner.config
        # The type of the hidden states that a stage expects.
        before, config.pipeline_dtype = config.pipeline_dtype, dtype
        try:
            with super().computing_in(dtype):
                yield
        finally:
            config.pipeline_dtype = before

    def _pass(self, step: Callable[..., Any], batches: Sequence[MicroBatch], forward_only: bool) -> None:
        if not batches:
            # Without stages Megatron's schedule passes at least one.
            return
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[self._buffers],
            num_microbatches=len(batches),
            # Sizes are sent with each micro-batch.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def _gradient(parameter: Any) -> Tensor | None:
    """Return the gradient with which Megatron's optimiser steps."""
    found: Tensor | None = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if found is None else found
