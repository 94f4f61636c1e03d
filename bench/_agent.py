"""A server of dray, and an agent that uses it through ``dray mcp``, for the benchmarks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp import Client
from mcp.client.stdio import StdioServerParameters

from dray.serve.client import Server, Unreachable

UP_S = 120.0


def environment(home: Path) -> dict[str, str]:
    """The variables of processes whose results directory is `home`."""
    left_out = ("DRAY_SERVER", "DRAY_SERVER_TOKEN", "RAY_ADDRESS", "DRAY_STORAGE")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {"DRAY_HOME": str(home)}


@contextlib.contextmanager
def serving(home: Path, port: int) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """``dray serve`` within the block: a client of its API, and its process."""
    home.mkdir(parents=True, exist_ok=True)
    with (home.parent / "serve.log").open("ab") as log:
        command = [sys.executable, "-m", "dray.cli", "serve", "--port", str(port)]
        process = subprocess.Popen(command, env=environment(home), stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + UP_S
        while (server := _up(home)) is None:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"dray serve has not come up:\n{(home.parent / 'serve.log').read_text()}")
            time.sleep(0.2)
        yield server, process
    finally:
        process.terminate()
        process.wait(120)


def _up(home: Path) -> Server | None:
    with contextlib.suppress(Unreachable):
        return Server.find(home)
    return None


@dataclass(frozen=True)
class Call:
    """A call of a tool, and its answer."""

    tool: str
    given: dict[str, Any]
    text: str
    is_error: bool
    seconds: float


@dataclass
class Agent:
    """Calls tools, and keeps the calls."""

    client: Client
    calls: list[Call] = field(default_factory=list)

    async def __call__(self, tool: str, **given: Any) -> Call:
        began = time.perf_counter()
        result = await self.client.call_tool(tool, given)
        text = "".join(each.text for each in result.content if each.type == "text")
        text = text.removeprefix(f"Error executing tool {tool}: ")
        self.calls.append(Call(tool, given, text, bool(result.is_error), time.perf_counter() - began))
        return self.calls[-1]


@contextlib.asynccontextmanager
async def agent(home: Path, **variables: str) -> AsyncIterator[Agent]:
    """An agent that has started ``dray mcp``, over standard input and output, with these further variables."""
    command, given = [sys.executable, "-m", "dray.cli", "mcp"], environment(home) | variables
    async with Client(StdioServerParameters(command=command[0], args=command[1:], env=given)) as client:
        yield Agent(client)
