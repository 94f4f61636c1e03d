"""The writing half of the API, and the two requests of a follower: the server's state and an experiment's events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler
from typing_extensions import TypedDict

from dray.code.archive import MAX_ARCHIVE_BYTES
from dray.config.yaml_file import MAX_BYTES
from dray.errors import ConfigError, Invalid
from dray.experiment.requests import Decided
from dray.serve import logs
from dray.serve.answers import answer, encoded
from dray.serve.auth import CALLER
from dray.serve.control import ACTIVE, API, Control, Status, Submitted, Verb
from dray.serve.draft import Draft
from dray.serve.experiments import experiment_path
from dray.serve.given import Change, EventsQuery, Extension, Fork, NewTrial, TrialFork, extension_of, parsed, query_of
from dray.serve.keys import Attempt, Keys
from dray.serve.long_polling import LongPolling
from dray.serve.outside import outside
from dray.serve.quota import check_priority
from dray.serve.refusals import NotSubmitted, is_running
from dray.serve.requests import PACKED, ServedTrials, unpack_code
from dray.serve.tokens import STATE, Account, DatedAccount, Tokens, account, dated_account
from dray.serve.verbs.in_directory import InDirectory
from dray.storage.disk import scratch
from dray.text import one_line

T = TypeVar("T")

SUBMITTERS = 8
"""Most slow requests performed at once: imports of models, deletions from an object store."""
READERS = 4  # most journals read at once
REQUESTERS = 8  # most requests to searches that wait for an answer at once


class Api:
    """The handlers of requests that change experiments in the results directory."""

    def __init__(self, control: Control, results: Path, tokens: Tokens) -> None:
        self._control, self._results, self._tokens = control, results, tokens
        # Separate pools: the verbs use asyncio's, and must not wait for user code or a slow disk.
        self._submitters = ThreadPoolExecutor(SUBMITTERS, "dray-submit")
        self._readers = ThreadPoolExecutor(READERS, "dray-events")
        self._requesters = ThreadPoolExecutor(REQUESTERS, "dray-requests")
        self._events = LongPolling(lambda path, after: _call(self._readers, logs.events_after, control, path, after))
        self._keys = Keys(results / STATE)

    def routes(self) -> list[web.RouteDef]:
        """The routes of these requests."""
        one = f"{API}/experiments/{{name}}"
        trial = f"{one}/trials/{{trial}}"
        return [
            web.get(f"{API}/status", _answering(self.status)),
            web.get(f"{API}/token", _answering(self.token)),
            web.get(f"{API}/tokens", _answering(self.all_tokens)),
            web.post(f"{API}/experiments", _answering(self.submit, status=201)),
            web.patch(one, _answering(self.patch)),
            web.delete(one, self.delete),
            web.post(f"{one}/stop", _answering(self.stop)),
            web.post(f"{one}/pause", _answering(self.pause)),
            web.post(f"{one}/activate", _answering(self.activate)),
            web.post(f"{one}/kill", _answering(self.kill)),
            web.post(f"{one}/extend", _answering(self.extend)),
            web.post(f"{one}/fork", _answering(self.fork, status=201)),
            web.post(f"{one}/trials", _answering(self.add_trial)),
            web.post(f"{trial}/fork", _answering(self.fork_trial)),
            web.post(f"{trial}/stop", _answering(self.stop_trial)),
            web.get(f"{one}/events", _answering(self.events)),
        ]

    async def end_polls(self, app: web.Application) -> None:
        """Answer the requests that wait for events, because the server is ending; an aiohttp signal."""
        await self._events.end()

    async def close(self, app: web.Application) -> None:
        """Close the file of keys; an aiohttp signal."""
        self._keys.close()

    async def status(self, request: web.Request) -> Status:
        """The server and its cluster"""
        return await asyncio.to_thread(self._control.status)

    async def token(self, request: web.Request) -> Account:
        """The request's token, and what is left of its quota"""
        token = request[CALLER]
        return account(token, await asyncio.to_thread(self._control.use, token.owner))

    async def all_tokens(self, request: web.Request) -> AllTokens:
        """All tokens but the server's own, for the scope operate"""

        def read() -> list[DatedAccount]:
            return [dated_account(each, self._control.use(each.owner)) for each in self._tokens.all().values()]

        return {"tokens": await asyncio.to_thread(read)}

    async def stop(self, request: web.Request) -> Submitted:
        """Let running trials save a checkpoint, and end the experiment's process; a second time, at once"""
        return await self._act(request, "stop")

    async def pause(self, request: web.Request) -> Submitted:
        """Like stop, also for queued experiments; activate resumes the experiment"""
        return await self._act(request, "pause")

    async def activate(self, request: web.Request) -> Submitted:
        """Run an experiment in any state again, from where its journal ends"""
        return await self._act(request, "activate")

    async def kill(self, request: web.Request) -> Submitted:
        """End the experiment's process at once"""
        return await self._act(request, "kill")

    async def _act(self, request: web.Request, verb: Verb) -> Submitted:
        async def act(attempt: Attempt) -> Submitted:
            return await asyncio.to_thread(self._control.act, request.match_info["name"], verb)

        return await self._once(request, act)  # a stop that is sent twice ends it at once

    async def submit(self, request: web.Request) -> Submitted:
        """Submit an experiment"""
        if not request.content_type.startswith("multipart/"):
            raise Invalid("must be multipart/form-data, with config (a YAML file's text) and code (a .tar.gz)")
        stack = contextlib.ExitStack()
        received = stack.enter_context(scratch("submit"))
        code = received / "code"
        packed = code.with_suffix(PACKED)
        try:
            config, owner = await _form(request, packed, "config"), request[CALLER].owner

            async def submit(attempt: Attempt) -> Submitted:
                return await _call(self._submitters, self._submitted, config, code, owner, attempt)

            return await self._once(request, submit, config.encode() + await asyncio.to_thread(_digest, packed))
        finally:
            self._submitters.submit(stack.close)  # it may remove thousands of files

    async def _once(
        self, request: web.Request, perform: Callable[[Attempt], Awaitable[T]], sent: bytes | None = None
    ) -> T:
        """The answer, as JSON, to a request that may be sent again. `sent`: what was sent; by default, its body."""
        sent = await request.read() if sent is None else sent

        async def as_json(attempt: Attempt) -> Any:
            return json.loads(encoded(await perform(attempt)))

        return cast("T", await self._keys.once(request, request[CALLER].name, sent, as_json))

    def _submitted(self, config: str, code: Path, owner: str, attempt: Attempt) -> Submitted:
        outside(unpack_code, code)
        try:
            return self._control.submit(Draft(config=config), code, owner, attempt.id)
        except ConfigError as error:
            # The path of the code on the server means nothing to the user.
            raise ConfigError([(field, _without(what, code)) for field, what in error.faults], error.source) from None

    def _submit_fork(self, draft: Draft, owner: str, attempt: Attempt) -> Submitted:
        with draft.code() as code:
            return self._control.submit(draft, code, owner, attempt.id)

    async def patch(self, request: web.Request, body: Change) -> Submitted:
        """Change an experiment's share of the slots, its tags or its notes; other fields keep their values"""
        change = body.given
        if "priority" in change:
            check_priority(request[CALLER].owner, request[CALLER].quota, body.priority)
        if "tags" in change:
            change["tags"] = tuple(dict.fromkeys(body.tags))
        return await asyncio.to_thread(self._control.change, request.match_info["name"], change)

    async def delete(self, request: web.Request) -> web.Response:
        """Delete an experiment and its checkpoints, including those in an object store"""
        path = experiment_path(self._results, request.match_info["name"])
        await _call(self._submitters, _delete, self._control, path)
        return web.Response(status=204)

    async def extend(self, request: web.Request, body: Extension) -> Submitted:
        """Queue an experiment again, finished or not, with more or longer trials, or with other limits"""
        wanted = extension_of(body)

        async def extend(attempt: Attempt) -> Submitted:
            return await asyncio.to_thread(self._control.extend, request.match_info["name"], wanted)

        return await self._once(request, extend)

    async def fork(self, request: web.Request, body: Fork) -> Submitted:
        """Submit the experiment's code again, with a changed config"""
        path, token = experiment_path(self._results, request.match_info["name"]), request[CALLER]

        async def forked(attempt: Attempt) -> Submitted:
            is_owner = token.scope == "operate" or _owner_of(self._control, path.name) == token.owner
            draft = Draft(config=body.config, forked=path, is_owner=is_owner)
            return await _call(self._submitters, self._submit_fork, draft, token.owner, attempt)

        return await self._once(request, forked)

    async def add_trial(self, request: web.Request) -> Decided:
        """Add a trial beyond max_trials; an experiment that has ended goes on"""
        stack, code, sent = contextlib.ExitStack(), None, None
        try:
            if request.content_type.startswith("multipart/"):
                code = stack.enter_context(scratch("trial")) / "code"
                text = await _form(request, code.with_suffix(PACKED), "trial")
                sent = text.encode() + await asyncio.to_thread(_digest, code.with_suffix(PACKED))
                body = parsed(NewTrial, _object(text))
            else:
                body = parsed(NewTrial, await _body(request))
            hparams, patch = body.hparams, body.patch
            return await self._ask(
                request,
                lambda trials: trials.add_trial(hparams, patch=patch, code=code),
                sent,
                self._submitters if patch is not None or code is not None else None,
            )
        finally:
            self._submitters.submit(stack.close)  # it may remove thousands of files

    async def fork_trial(self, request: web.Request, body: TrialFork) -> Decided:
        """Start a trial from a checkpoint of another one; an experiment that has ended goes on"""
        trial = request.match_info["trial"]
        return await self._ask(request, lambda trials: trials.fork_trial(trial, at=str(body.at), hparams=body.hparams))

    async def stop_trial(self, request: web.Request) -> Decided:
        """Stop a trial; the search continues with the others"""
        trial = request.match_info["trial"]
        return await self._ask(request, lambda trials: trials.stop_trial(trial))

    async def _ask(
        self,
        request: web.Request,
        verb: Callable[[ServedTrials], Decided],
        sent: bytes | None = None,
        pool: ThreadPoolExecutor | None = None,
    ) -> Decided:
        path = experiment_path(self._results, request.match_info["name"])

        async def perform(attempt: Attempt) -> Decided:
            return await _call(pool or self._requesters, lambda: verb(ServedTrials(self._control, path, attempt)))

        return await self._once(request, perform, sent)

    async def events(self, request: web.Request, query: EventsQuery) -> logs.Events:
        """The lines of the experiment's log after an offset; can wait for new ones"""
        path = experiment_path(self._results, request.match_info["name"])
        return await self._events.after(path, query.after, query.wait_s)


class AllTokens(TypedDict):
    tokens: list[DatedAccount]


def _answering(respond: Callable[..., Awaitable[Any]], *, status: int = 200) -> Handler:
    """A handler that gives a method what its request has, and sends its answer as JSON."""
    takes = get_type_hints(respond)

    @functools.wraps(respond)
    async def handle(request: web.Request) -> web.StreamResponse:
        given = dict[str, Any]()
        if "query" in takes:
            given["query"] = query_of(takes["query"], request)
        if "body" in takes:
            given["body"] = parsed(takes["body"], await _body(request))
        return answer(await respond(request, **given), status=status)

    return handle


async def _call(pool: ThreadPoolExecutor, function: Callable[..., T], *given: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *given)


def _without(what: str, code: Path) -> str:
    """An error message, with paths made relative to the model directory."""
    for place in {str(code), str(code.resolve())}:
        what = what.replace(f"{place}/", "").replace(place, "the model directory")
    return what


async def _form(request: web.Request, packed: Path, name: str) -> str:
    """The text with a name in a form; its code goes to the file `packed`."""
    try:
        return await _read_parts(request, packed, name)
    except Invalid:
        raise
    except (ValueError, HttpProcessingError) as error:  # aiohttp's
        raise Invalid(f"the form can't be read: {one_line(error)}") from None


async def _read_parts(request: web.Request, packed: Path, name: str) -> str:
    config: str | None = None
    async for part in await request.multipart():
        if not isinstance(part, BodyPartReader) or part.name not in (name, "code"):
            raise Invalid(f"only {name} and code are expected")
        if part.name == "code":
            with packed.open("wb") as file:
                async for chunk in _chunks(part, MAX_ARCHIVE_BYTES):
                    file.write(chunk)
        else:
            try:
                config = b"".join([chunk async for chunk in _chunks(part, MAX_BYTES)]).decode()
            except UnicodeDecodeError as error:
                raise Invalid(f"{name} is not UTF-8 text: {error}") from None
    if config is None or not packed.exists():
        raise Invalid(f"{name if config is None else 'code'} is missing")
    return config


async def _chunks(part: BodyPartReader, limit: int) -> AsyncIterator[bytes]:
    size = 0
    while chunk := await part.read_chunk(1 << 18):
        size += len(chunk)
        if size > limit:
            raise web.HTTPRequestEntityTooLarge(limit, size, text=f"{part.name} has more than {limit:,} bytes")
        yield chunk


async def _body(request: web.Request) -> dict[str, Any]:
    """A request's body, which must be a JSON object."""
    try:
        return _object(await request.text() if request.can_read_body else "{}")
    except (LookupError, UnicodeDecodeError) as error:  # the former for an unknown charset
        raise Invalid(f"the body is not JSON: {error}") from None


def _object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise Invalid(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Invalid("the body must be a JSON object")
    return body


def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


def _owner_of(control: Control, name: str) -> str | None:
    """The owner of an experiment; None if it was not submitted to the server."""
    try:
        return control.experiment(name).owner
    except NotSubmitted:
        return None


def _delete(control: Control, path: Path) -> None:
    """Delete an experiment, also one that was not submitted. `WrongState` if it is active."""
    with contextlib.suppress(NotSubmitted):
        state = control.experiment(path.name).state
        if state in ACTIVE:
            raise is_running(path.name, state)
    InDirectory(str(path)).delete()
