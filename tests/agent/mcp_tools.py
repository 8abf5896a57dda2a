"""An MCP server of the tests, with good tools and bad ones: `stdio` or a port, and `few` for the good ones alone."""

import os
import subprocess
import sys
import time
from typing import Any

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

OUTPUT = os.dup(1)  # the server itself sends what is printed to standard error
server = MCPServer("shop")
basket: list[str] = []


@server.tool()
def price(fruit: str, pieces: int = 1) -> str:
    """What pieces of a fruit cost."""
    if fruit != "apple":
        raise ToolError(f"there is no {fruit}")
    return f"{3 * pieces} in {os.environ.get('CURRENCY', 'nothing')}"


@server.tool()
def add(fruits: list[str]) -> list[str]:
    """Put fruits into the basket of this connection."""
    basket.extend(fruits)
    return basket


@server.tool(structured_output=False)
def picture() -> list[Any]:
    """A picture of a pear."""
    return ["a pear", Image(data=b"png", format="png")]


@server.tool()
def variables() -> str:
    """Names of the variables of the environment."""
    return " ".join(os.environ)


@server.tool()
def process() -> str:
    """The number of the process."""
    return str(os.getpid())


@server.tool()
def leave(code: int) -> str:
    """End the server."""
    print("out of fruit", file=sys.stderr, flush=True)
    os._exit(code)


@server.tool()
def sleep() -> str:
    """Never return."""
    # What it starts must end with it.
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)
    return ""


@server.tool()
def shout(line: int) -> str:
    """Print a gigabyte: in lines of so many bytes, or as the result."""
    if not line:
        return "x" * (1 << 25)
    part = b"x" * (1 << 20) if line < 0 else b"x" * line + b"\n"
    for _ in range((1 << 30) // len(part)):
        os.write(OUTPUT, part)
    return ""


if __name__ == "__main__":
    for name in ("picture", "variables", "process", "leave", "sleep", "shout") if "few" in sys.argv else ():
        server.remove_tool(name)
    if sys.argv[1] == "stdio":
        server.run()
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
