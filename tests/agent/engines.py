"""An engine's side of a host in a process of its own, which imports little."""

import os
from typing import Any

from pipeline.agent.ray_client import RemoteProcesses
from pipeline.agent.ray_hosts import Hosts
from pipeline.config.agent import AgentConfig


class Engine:
    """A Ray actor that opens an episode and is killed then."""

    async def open(self, config: AgentConfig, hosts: Hosts, row: dict[str, Any]) -> tuple[int, str]:
        """Its process id, and what the environment said."""
        self.processes = RemoteProcesses(str(config), config, hosts)
        await self.processes.start()
        self.session = await self.processes.open(row, 7, 30)
        return os.getpid(), str(self.session.opened)
