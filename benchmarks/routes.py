"""The gap between trainer and engine in a mixture of experts, with and without replay of the engine's experts.

    slipstream tiny --out models/mixture --experts 16 --data data/countdown-1/sft_train.parquet
    python -m benchmarks.routes --model models/mixture --data data/countdown-1/train.parquet

The engine hf samples the same prompts in float32 and in bfloat16. The trainer computes the tokens' log-probs twice, in
the type of the engine, with packed rows: by the experts of its own routers, and by the experts of the engine.
"""

from dataclasses import replace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support import begun, options, sampled, settings
from pipeline.generation import Generation
from pipeline.models.batch import TokenBatch
from pipeline.models.packing import pack
from pipeline.models.policy import Policy, load_policy
from pipeline.models.sharing import Passes
from pipeline.rows import UNROUTED
from pipeline.sampling import Sampling


def gaps(policy: Policy, prompts: list[list[int]], made: list[Generation], replays: bool) -> tuple[np.ndarray, float]:
    """Return the gap of each token to the engine, and the share of the engine's experts that the pass did not take."""
    rows = TokenBatch.of(prompts, [one.token_ids for one in made])
    routes = [one.routes for one in made if one.routes is not None]
    if not routes:
        raise SystemExit("benchmarks.routes: the model has no experts that can be replayed")
    rows.routes = np.concatenate(routes)
    inputs = pack(rows, [[row] for row in range(len(rows))], packed=True)
    wanted = inputs.routes
    assert wanted is not None
    policy.routers.note()
    with torch.no_grad():
        found = policy(**(inputs.arguments | ({} if replays else {"routes": None}))).log_probs.float().numpy()
    layers = len(wanted), -1, policy.lm.config.get_text_config().num_experts_per_tok
    same = (wanted.view(layers)[..., None] == policy.routers.noted().view(layers)[..., None, :]).any(-1).view_as(wanted)
    known = wanted != UNROUTED
    engine = np.concatenate([one.log_probs for one in made])
    return np.abs(found - engine[inputs.token_index]), float((known & ~same).sum() / known.sum())


def main() -> None:
    """Sample in both types, and print a table."""
    args = options("routes", __doc__ or "")
    table = Table("type", "experts", "differing", "mean gap", "largest gap")
    for dtype in ("float32", "bfloat16"):
        config = settings(args, "rollout.name=hf", "rollout.replay_routes=true", f"rollout.dtype={dtype}")
        prompts, engine = begun(config)
        made = sampled(engine, prompts, Sampling.of(config.rollout, config.data.max_response_length, "train"))
        policy = load_policy(replace(config.model, dtype=dtype)).eval()
        Passes.of(policy, "always")
        for replays in (False, True):
            gap, share = gaps(policy, prompts, made, replays)
            name = "of the engine" if replays else "of the trainer"
            table.add_row(dtype, name, f"{share:.3%}", f"{gap.mean():.1e}", f"{gap.max():.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
