"""The gate in front of elastic engine pools, and of replays."""

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pipeline.rollout.policy_source import PolicySource


class Gate:
    """A stage that passes chunks on, in order, once the policy store admits them; for elastic pools and replays."""

    def __init__(self, policy: "PolicySource"):
        self._policy = policy

    async def __call__(self, table: pa.Table) -> pa.Table:
        split, chunk, version = (table[name][0].as_py() for name in ("split", "chunk", "iteration"))
        await self._policy.admit(split, chunk, version)
        return table
