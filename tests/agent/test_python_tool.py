"""The tool that runs code of the model."""

from typing import Any

import pytest

from pipeline.agent.errors import PolicyMistake
from pipeline.agent.processes import Processes
from pipeline.config.agent import AgentConfig
from tests.agent.test_processes import ROW, run


def test_code_runs_in_the_sandbox_and_its_failures_are_for_the_model() -> None:
    async def play(processes: Processes) -> None:
        loaded = await processes.start()
        assert loaded.forks and loaded.timeouts == {"python": 90}
        session = await processes.open(ROW, 1, 60)

        async def said(code: Any) -> str:
            return await session.call("python", {"code": code}, 90)

        assert await said("print(6 * 7)") == "42\n"
        assert await said("x = 1") == "(the program printed nothing)"
        assert "ZeroDivisionError" in await said("print(1); 1 / 0")
        assert "Error" in await said("open('/etc/mark', 'w')")
        assert "Error" in await said("import socket; socket.create_connection(('127.0.0.1', 1))")
        with pytest.raises(PolicyMistake, match="output limit exceeded"):
            await said("while True: print('x' * 1000)")
        assert await said("import os; os._exit(3)") == "exit status 3"

    run(AgentConfig(tools=["pipeline.agent.python_tool:python"]), play)
