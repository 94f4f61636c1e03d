"""The protocol: the SDK's client over stdio and HTTP; the list of tools, the docs, the skill."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from dray.agents import docs, server
from dray.agents.answers import MOST_BYTES
from dray.agents.local import LocalTools
from dray.serve import tokens
from dray.serve.quota import Quota
from tests.agents.conftest import text_of
from tests.cli.conftest import dray
from tests.cli.said import Said
from tests.docs.pages import PAGES, ROOT
from tests.serve.conftest import TOKEN, Served
from tests.serve.test_api import CONFIG

__all__ = ["dray"]

NAMES = {name for name in dir(LocalTools) if not name.startswith("_")}


def in_process(use: Callable[[Client], Any]) -> Any:
    async def run() -> Any:
        async with Client(server.make(LocalTools(server.found))) as client:
            return await use(client)

    return asyncio.run(run())


# --------------------------------------------------------------------------------------------------- tools and docs
def test_every_tool_says_what_it_does_and_whether_it_only_reads() -> None:
    tools = {each.name: each for each in in_process(lambda client: client.list_tools()).tools}
    assert tools.keys() == NAMES
    for name, tool in tools.items():
        assert tool.description, name
        for argument in tool.input_schema.get("properties", {}):
            assert f"{argument}: " in tool.description, (name, argument)
    writing = {name for name, tool in tools.items() if not tool.annotations.read_only_hint}
    verbs = ("extend", "fork", "pause", "activate", "stop")
    of_experiments = {f"{verb}_experiment" for verb in verbs}
    assert writing == {"submit", "bisect", "add_trial", "fork_trial", "stop_trial", *of_experiments}


def test_the_skill_and_the_page_name_the_tools_that_there_are() -> None:
    for page, needs in (("mcp.md", NAMES), ("agents.md", set())):
        named = set(re.findall(r"`([a-z]+_[a-z]+|describe|submit|wait|bisect)`", PAGES[page])) - {"max_trials"}
        assert needs <= named <= NAMES, page
    assert len(PAGES["agents.md"].encode()) <= MOST_BYTES
    assert PAGES["agents.md"].startswith("---\nname: dray\ndescription: ")
    assert "](" not in PAGES["agents.md"]  # as a file elsewhere, it can only name pages


def test_the_command_prints_the_skill(dray: Callable[..., Said]) -> None:
    assert dray("agents", "skill").out == PAGES["agents.md"]


def test_docs_are_resources_in_pieces_that_fit() -> None:
    async def read(client: Client) -> None:
        found = {str(each.uri) for each in (await client.list_resources()).resources}
        assert found == {f"dray://docs/{name}" for name in docs.titles()}
        for name in docs.titles():
            for uri in (f"dray://docs/{name}", *(f"dray://docs/{name}/{each}" for each in docs.sections(name))):
                [content] = (await client.read_resource(uri)).contents
                assert len(content.text.encode()) <= MOST_BYTES, uri
        [rungs] = (await client.read_resource("dray://docs/steering/forks")).contents
        assert rungs.text.startswith("## Forks\n")
        with pytest.raises(MCPError, match="has no section 'none'; its sections are: start, forks"):
            await client.read_resource("dray://docs/steering/none")

    in_process(read)
    assert (
        "there is no page 'x'; the pages are: agents, "
        in in_process(lambda client: text_of(client, "read_docs", {"page": "x"}))[0]
    )
    assert "".join(docs.sections("search").values()) == PAGES["search.md"]


def test_all_pages_can_be_read() -> None:
    assert {f"{name}.md" for name in docs.titles()} == PAGES.keys() - {"README.md"}
    assert docs.titles()["config"] == "The experiment file"


# --------------------------------------------------------------------------------------------------------------- HTTP
@pytest.fixture
def url(up: Served) -> Iterator[str]:
    """``dray mcp --http``, in a thread."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        app = server.make_for_http().streamable_http_app(
            stateless_http=True, json_response=True, transport_security=server.security("127.0.0.1")
        )
        probe.listen()
        running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [probe]})
        thread.start()
        yield f"http://127.0.0.1:{port}/mcp"
        running.should_exit = True
        thread.join()


def over_http(url: str, token: str, use: Callable[[Client], Any]) -> Any:
    async def run() -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=None) as http_client,
            Client(streamable_http_client(url, http_client=http_client)) as client,
        ):
            return await use(client)

    return asyncio.run(run())


def test_agents_elsewhere_use_the_servers_token(url: str, up: Served) -> None:
    def submit(client: Client) -> Any:
        files = {"model_def.py": "class DigitsTrial(PyTorchTrial): ...\n"}
        return text_of(client, "submit", {"config": CONFIG, "files": files})

    text, is_error = over_http(url, TOKEN, submit)
    assert not is_error, text
    assert json.loads(text)["name"] == "digits-1"
    tools = {each.name: each for each in over_http(url, TOKEN, lambda client: client.list_tools()).tools}
    assert tools.keys() == NAMES - {"bisect"}  # the repository is not here
    assert "directory" not in tools["submit"].input_schema["properties"]


def test_configs_name_no_files_of_this_machine(
    url: str, up: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_STORAGE", str(tmp_path / "mine"))
    secret = tmp_path / "secret.yaml"
    secret.write_text("a5ecret\n")
    code = {"model_def.py": "class DigitsTrial(PyTorchTrial): ...\n"}

    async def use(client: Client) -> list[tuple[str, bool]]:
        above = f"{'../' * 20}{secret}"
        given: list[dict[str, Any]] = [{"config": name, "files": code} for name in (str(secret), above)]
        given.append({"config": CONFIG, "files": code})
        return [await text_of(client, "submit", each) for each in given]

    *wrong, (_, is_error) = over_http(url, TOKEN, use)
    for text, is_wrong in wrong:
        assert is_wrong
        assert "there is no file" in text
        assert "a5ecret" not in text
    assert not is_error
    assert "mine" not in (up.results / "digits-1" / "experiment.yaml").read_text()


def test_a_token_can_do_no_more_here_than_at_the_server(url: str, up: Served) -> None:
    token = tokens.create(up.results, "reader", "read", Quota())

    async def use(client: Client) -> list[tuple[str, bool]]:
        files = {"model_def.py": "class DigitsTrial(PyTorchTrial): ...\n"}
        given: list[tuple[str, dict[str, Any]]] = [("get_budget", {}), ("submit", {"config": CONFIG, "files": files})]
        return [await text_of(client, tool, arguments) for tool, arguments in given]

    (budget, _), (refused, is_error) = over_http(url, token, use)
    assert json.loads(budget)["token"]["name"] == "reader"
    assert is_error
    assert "scope" in refused
    assert up.control.experiments() == []


def test_many_agents_that_wait_do_not_delay_others(url: str, digits: Path, up: Served) -> None:
    up.control.put("digits-1", "RUNNING")

    async def use(client: Client) -> None:
        waits = [asyncio.create_task(text_of(client, "wait", {"experiment": "1"})) for _ in range(50)]
        await asyncio.sleep(0)
        _, is_error = await text_of(client, "get_budget", {})
        assert not is_error
        assert not any(each.done() for each in waits)
        up.control.put("digits-1", "COMPLETED")
        await asyncio.gather(*waits)

    over_http(url, TOKEN, use)


def post(url: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=30)
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    given = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    connection.request("POST", "/mcp", json.dumps(body), {**given, **headers})
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def test_requests_without_the_token_and_from_other_pages_are_refused(url: str) -> None:
    mine = {"Authorization": f"Bearer {TOKEN}"}
    assert post(url)[0] == 401
    assert post(url, Authorization="Bearer other")[0] == 401
    assert post(url, **mine, Host="evil.example:80")[0] == 421
    assert post(url, **mine, Origin="http://evil.example")[0] == 403
    status, body = post(url, **mine, Origin="http://localhost:3000")
    assert (status, b"list_experiments" in body) == (200, True)


@pytest.mark.parametrize("given", ["x", "0", "host", "host:", "1:99999"])
def test_an_address_that_is_none_is_one_error(given: str, dray: Callable[..., Said]) -> None:
    said = dray("mcp", "--http", given)
    assert (said.code, said.err) == (
        2,
        f"dray: --http {given}: must be PORT or HOST:PORT, such as 8700 or 127.0.0.1:8700\n",
    )


def test_http_needs_a_server_and_other_machines_a_token(results: Path, dray: Callable[..., Said]) -> None:
    assert "no dray server is up; start it with: dray serve" in dray("mcp", "--http", "8700").err
    assert "at 0.0.0.0, other machines can reach the server" in dray("mcp", "--http", "0.0.0.0:8700").err


def test_a_port_in_use_is_one_error(up: Served, dray: Callable[..., Said]) -> None:
    said = dray("mcp", "--http", str(up.port))
    assert said.code == 2
    assert said.err.startswith(f"dray: --http {up.port}: can't listen there: Address already in use")
    assert said.err.count("\n") == 1


# -------------------------------------------------------------------------------------------------------------- stdio
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.long)])
def test_an_agent_starts_the_command(mode: str, digits: Path, tmp_path: Path) -> None:
    given = StdioServerParameters(
        command=sys.executable, args=["-m", "dray.cli", "mcp"], env={"DRAY_HOME": str(digits.parent)}, cwd=ROOT
    )

    async def run() -> None:
        async with Client(given, mode=mode) as client:
            assert {each.name for each in (await client.list_tools()).tools} == NAMES
            text, is_error = await text_of(client, "describe", {"experiment": "1"})
            assert not is_error
            assert json.loads(text)["name"] == "digits-1"
            text, is_error = await text_of(client, "describe", {"experiment": "9"})
            assert is_error
            assert "'9' is no experiment on the server" in text

    asyncio.run(run())
