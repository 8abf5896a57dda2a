"""The experts of a mixture's tokens: noted while an engine generates, and replayed while the trainer learns.

A router chooses the k experts of a token by its k largest logits. Two computations round differently, and may choose
different experts if two logits are close. This changes a log-prob far more than rounding does. With
`rollout.replay_routes` the engine writes the experts of each token into the column `routes`, and the routers of the
policy take these instead of their own. The weights of the experts are still the trainer's, with gradients
(routing replay: Ma et al. 2025, arXiv 2510.11370).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.architecture import ROUTERS
from pipeline.rows import UNROUTED


class Routers:
    """The routers of a model, in the order of its layers.

    Routes are [T, W] int16: for each of T tokens the k experts of the first layer, then of the next. W is 0 for a model
    without routers of a known class.

    Args:
        lm: the model, before FSDP shards it.
    """

    def __init__(self, lm: nn.Module) -> None:
        routers: list[Any] = [module for module in lm.modules() if type(module).__name__ in ROUTERS]
        self.width = sum(router.top_k for router in routers)
        self.replays = True
        """False for a frozen model, whose routers always choose: its experts are others than the policy's."""
        self._experts = min((router.num_experts for router in routers), default=0)
        self._replayed: Tensor | None = None
        self._noted: list[Tensor] | None = None
        self._counts: list[Tensor] = []
        start = 0
        for router in routers:
            part = slice(start, start + router.top_k)
            # Expert parallelism puts a hook of its own after these, which keeps the experts of a rank.
            router.register_forward_hook(partial(self._after, part), prepend=True)
            start = part.stop

    def replay(self, routes: Tensor | None) -> None:
        """Let the routers take `routes` [T, W] in all passes of these T tokens, until the next call.

        So a layer that is computed again in the backward pass takes the same experts. Entries `UNROUTED` are left to
        the router. None leaves all to the routers.

        Raises ValueError if the routes are of another model.
        """
        self._counts = []
        if routes is None or not self.replays:
            self._replayed = None
            return
        if routes.shape[1] != self.width:
            raise ValueError(
                f"the column 'routes' has {routes.shape[1]} experts for each token, and this model has {self.width} "
                "(layers x experts of a token); the rows were made with another model"
            )
        if len(routes) and not (routes.min() >= UNROUTED and routes.max() < self._experts):
            raise ValueError(
                f"the column 'routes' names the experts {routes.min()} to {routes.max()}, and this model has "
                f"{self._experts}, from 0; the rows were made with another model"
            )
        self._replayed = routes

    def differing(self) -> tuple[float, int]:
        """Return, for the passes since the last call of `replay`, how many of the replayed experts a router would not
        have chosen, and the number of replayed experts."""
        if not self._counts or self._replayed is None:
            return 0.0, 0
        return float(torch.stack(self._counts).sum()), int((self._replayed != UNROUTED).sum())

    def note(self) -> None:
        """Note the experts of the next pass."""
        self._noted = []

    def noted(self) -> Tensor:
        """Return the experts [T, W] int16 of the pass since `note`, and note no more."""
        noted, self._noted = self._noted or [], None
        return torch.cat(noted, dim=1).to(torch.int16)

    def _after(self, part: slice, router: Any, given: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Forward hook of a router, which returns logits [T, experts], weights [T, k] and experts [T, k]."""
        logits, weights, experts, *others = output
        if self._replayed is not None:
            wanted = self._replayed[:, part].long()
            known = wanted != UNROUTED
            if len(self._counts) * wanted.shape[1] < self.width:  # not again in the backward pass
                self._counts.append((known & ~(wanted[:, :, None] == experts[:, None]).any(-1)).sum())
            experts = torch.where(known, wanted, experts)
            weights = _weights(router, logits, experts).to(weights.dtype)
        if self._noted is not None:
            self._noted.append(experts)
        return logits, weights, experts, *others


def _weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """[T, k] float32, the weights of chosen experts, as the router computes them."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, experts)
    # Mixtral's router has no such setting.
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights
