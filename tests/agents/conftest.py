"""An agent: a client of the SDK's, in this process, on a server without Ray."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.server.mcpserver import MCPServer

from dray.agents import server as agents
from dray.agents.answers import MOST_BYTES
from dray.agents.local import LocalTools
from dray.records.numbering import take_number
from dray.serve import address
from tests.report.simulated import simulated
from tests.serve.conftest import Served, results, served, up

__all__ = ["results", "served", "up"]

TRIALS = 24


async def text_of(client: Client, tool: str, given: dict[str, Any]) -> tuple[str, bool]:
    """A tool's answer, and whether it is an error."""
    result = await client.call_tool(tool, given)
    [content] = result.content
    assert content.type == "text"
    assert len(content.text.encode()) <= MOST_BYTES
    return content.text, bool(result.is_error)


@dataclass
class Agent:
    """Calls one tool at a time."""

    tools: LocalTools

    @cached_property
    def server(self) -> MCPServer:
        return agents.make(self.tools)

    def text(self, tool: str, **given: Any) -> tuple[str, bool]:
        async def call() -> tuple[str, bool]:
            async with Client(self.server) as client:
                return await text_of(client, tool, given)

        return asyncio.run(call())

    def __call__(self, tool: str, **given: Any) -> Any:
        """The answer's JSON."""
        text, is_error = self.text(tool, **given)
        assert not is_error, text
        return json.loads(text)

    def error(self, tool: str, **given: Any) -> str:
        text, is_error = self.text(tool, **given)
        assert is_error, text
        return text.removeprefix(f"Error executing tool {tool}: ")


@pytest.fixture(autouse=True)
def _no_server_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (address.URL, address.TOKEN, "DRAY_STORAGE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def agent() -> Agent:
    return Agent(LocalTools(agents.found))


@pytest.fixture
def digits(up: Served) -> Path:
    """One with an experiment, number 1, ``digits-1``, an ASHA search that has ended."""
    path = simulated(up.results / "digits-1", TRIALS).path
    take_number(path)
    up.control.put("digits-1", "COMPLETED", tags=("baseline",))
    return path
