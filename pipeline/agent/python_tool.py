"""A tool that runs Python code of the model: `agent.tools=[pipeline.agent.python_tool:python]`.

Each call runs in its own process in the sandbox of `pipeline/reward/sandbox/`: without network, without write access to
files of this machine, and within `LIMITS`. The tool does not load if the machine cannot isolate the code.
"""

from pipeline.agent import ToolError, tool
from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import runner

LIMITS = SandboxConfig(timeout_s=10, total_timeout_s=20, output_kb=64)

try:
    runner.resolve(LIMITS)
except runner.SandboxError as error:
    raise ValueError(f"the tool python runs code in isolation alone, which does not work here: {error}") from None


@tool(timeout_s=90)
def python(code: str) -> str:
    """Run a Python program and read what it prints. Each call is a new program.

    Args:
        code: the program; it must print what you want to see.
    """
    outcome = runner.run(code, "", LIMITS)
    text = outcome.stdout + outcome.stderr
    if outcome.ended != "exit":
        raise ToolError(f"{outcome.failure}\n{text}" if text else outcome.failure)
    if text:
        return text
    return outcome.failure or "(the program printed nothing)"
