"""The writing half of the API, and the two requests of a follower: the server's state and an experiment's events."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_args

from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler

from dray.code.archive import MAX_ARCHIVE_BYTES
from dray.config.search import CHANGEABLE
from dray.config.yaml_file import MAX_BYTES
from dray.errors import ConfigError
from dray.experiment.requests import Decided
from dray.serve import logs
from dray.serve.answers import BadInput, answer, number
from dray.serve.auth import CALLER
from dray.serve.control import ACTIVE, API, Control, Submitted, Verb
from dray.serve.draft import Draft
from dray.serve.experiments import experiment_path
from dray.serve.in_directory import InDirectory
from dray.serve.keys import Attempt, Keys
from dray.serve.news import News
from dray.serve.outside import outside
from dray.serve.quota import check_priority
from dray.serve.refusals import NotSubmitted, is_running
from dray.serve.requests import PACKED, ServedTrials, unpack_code
from dray.serve.tokens import STATE, Tokens, account
from dray.storage.disk import scratch
from dray.text import one_line

T = TypeVar("T")

SUBMITTERS = 8
"""Most slow requests performed at once: imports of models, deletions from an object store."""
READERS = 4  # most journals read at once
REQUESTERS = 8  # most requests to searches that wait for an answer at once
MAX_TAGS, MAX_TAG, MAX_NOTES = 50, 100, 100_000  # most tags, and most characters of a tag and of the notes


class Api:
    """The handlers of requests that change experiments in the results directory."""

    def __init__(self, control: Control, results: Path, tokens: Tokens) -> None:
        self._control, self._results, self._tokens = control, results, tokens
        # Separate pools: the verbs use asyncio's, and must not wait for user code or a slow disk.
        self._submitters = ThreadPoolExecutor(SUBMITTERS, "dray-submit")
        self._readers = ThreadPoolExecutor(READERS, "dray-events")
        self._requesters = ThreadPoolExecutor(REQUESTERS, "dray-requests")
        self._news = News(lambda path, after: _call(self._readers, logs.events_after, control, path, after))
        self._keys = Keys(results / STATE)

    def routes(self) -> list[web.RouteDef]:
        """The routes of these requests."""
        one = f"{API}/experiments/{{name}}"
        return [
            web.get(f"{API}/status", self._status),
            web.get(f"{API}/token", self._token),
            web.get(f"{API}/tokens", self._all_tokens),
            web.post(f"{API}/experiments", self._submit),
            web.patch(one, self._patch),
            web.delete(one, self._delete),
            *(web.post(f"{one}/{verb}", self._acting(verb)) for verb in get_args(Verb)),
            web.post(f"{one}/extend", self._extend),
            web.post(f"{one}/fork", self._fork),
            web.post(f"{one}/trials", self._add_trial),
            web.post(f"{one}/trials/{{trial:\\d{{1,9}}|best}}/fork", self._fork_trial),
            web.post(f"{one}/trials/{{trial:\\d{{1,9}}|best}}/stop", self._stop_trial),
            web.get(f"{one}/events", self._events),
        ]

    async def end_polls(self, app: web.Application) -> None:
        """Answer the requests that wait for events, because the server is ending; an aiohttp signal."""
        await self._news.end()

    async def close(self, app: web.Application) -> None:
        """Close the file of keys; an aiohttp signal."""
        self._keys.close()

    async def _status(self, request: web.Request) -> web.StreamResponse:
        return answer(asdict(await asyncio.to_thread(self._control.status)))

    async def _token(self, request: web.Request) -> web.StreamResponse:
        token = request[CALLER]
        return answer(account(token, await asyncio.to_thread(self._control.use, token.owner)))

    async def _all_tokens(self, request: web.Request) -> web.StreamResponse:
        def read() -> list[dict[str, Any]]:
            found = self._tokens.all().values()
            return [
                {**account(each, self._control.use(each.owner)), "created": each.created, "revoked": each.revoked}
                for each in found
            ]

        return answer({"tokens": await asyncio.to_thread(read)})

    def _acting(self, verb: Verb) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            async def act(attempt: Attempt) -> tuple[int, Any]:
                return 200, asdict(await asyncio.to_thread(self._control.act, request.match_info["name"], verb))

            return await self._once(request, b"", act)  # a stop that is sent twice ends it at once

        return handle

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        if not request.content_type.startswith("multipart/"):
            raise BadInput("must be multipart/form-data, with config (a YAML file's text) and code (a .tar.gz)")
        stack = contextlib.ExitStack()
        received = stack.enter_context(scratch("submit"))
        code = received / "code"
        packed = code.with_suffix(PACKED)
        try:
            config, owner = await _form(request, packed, "config"), request[CALLER].owner

            async def submit(attempt: Attempt) -> tuple[int, Any]:
                submitted = await _call(self._submitters, self._submitted, config, code, owner, attempt)
                return 201, asdict(submitted)

            return await self._once(request, config.encode() + await asyncio.to_thread(_digest, packed), submit)
        finally:
            self._submitters.submit(stack.close)  # it may remove thousands of files

    async def _once(
        self, request: web.Request, sent: bytes, perform: Callable[[Attempt], Awaitable[tuple[int, Any]]]
    ) -> web.StreamResponse:
        status, value = await self._keys.once(request, request[CALLER].name, sent, perform)
        return answer(value, status=status)

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

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        name, change = request.match_info["name"], change_of(await _body(request))
        if "priority" in change:
            check_priority(request[CALLER].owner, request[CALLER].quota, change["priority"])
        return answer(asdict(await asyncio.to_thread(self._control.change, name, change)))

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        path = experiment_path(self._results, request.match_info["name"])
        await _call(self._submitters, _delete, self._control, path)
        return web.Response(status=204)

    async def _extend(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        for name in ("max_trials", "max_length"):
            _whole(body, name)
        if not body or set(body) - {"max_trials", "max_length", *CHANGEABLE}:
            raise BadInput(f"give some of max_trials, max_length, {', '.join(CHANGEABLE)}, and nothing else")
        if isinstance(body.get("prices"), str):  # the path of a file, which would be read here
            raise BadInput('prices must be prices by slot type, such as {"A100": 2.9}, not a file')

        async def extend(attempt: Attempt) -> tuple[int, Any]:
            return 200, asdict(await asyncio.to_thread(self._control.extend, request.match_info["name"], body))

        return await self._once(request, _encoded(body), extend)

    async def _fork(self, request: web.Request) -> web.StreamResponse:
        path, body = experiment_path(self._results, request.match_info["name"]), await _body(request)
        if set(body) - {"config"} or not isinstance(config := body.get("config", {}), dict | str):
            raise BadInput("give config: fields to change with their values, or a whole YAML file as text")
        token = request[CALLER]

        async def forked(attempt: Attempt) -> tuple[int, Any]:
            is_owner = token.scope == "operate" or _owner(self._control, path.name) == token.owner
            draft = Draft(config=config, forked=path, is_owner=is_owner)
            return 201, asdict(await _call(self._submitters, self._submit_fork, draft, token.owner, attempt))

        return await self._once(request, _encoded(body), forked)

    async def _add_trial(self, request: web.Request) -> web.StreamResponse:
        stack, code = contextlib.ExitStack(), None
        try:
            if request.content_type.startswith("multipart/"):
                code = stack.enter_context(scratch("trial")) / "code"
                body = _object(await _form(request, code.with_suffix(PACKED), "trial"))
            else:
                body = await _body(request)
            sent = _encoded(body) + (
                b"" if code is None else await asyncio.to_thread(_digest, code.with_suffix(PACKED))
            )
            patch = body.pop("patch", None)
            if not isinstance(patch, str | None):
                raise BadInput("patch must be the text of a unified diff")
            hparams, has_code = _hparams(body), patch is not None or code is not None
            return await self._request(
                request,
                sent,
                lambda trials: trials.add_trial(hparams, patch=patch, code=code),
                self._submitters if has_code else None,
            )
        finally:
            self._submitters.submit(stack.close)  # it may remove thousands of files

    async def _fork_trial(self, request: web.Request) -> web.StreamResponse:
        trial, body = request.match_info["trial"], await _body(request)
        sent = _encoded(body)
        at = str(body.pop("at", "best"))
        hparams = _hparams(body)
        return await self._request(request, sent, lambda trials: trials.fork_trial(trial, at=at, hparams=hparams))

    async def _stop_trial(self, request: web.Request) -> web.StreamResponse:
        trial = request.match_info["trial"]
        return await self._request(request, b"", lambda trials: trials.stop_trial(trial))

    async def _request(
        self,
        request: web.Request,
        sent: bytes,
        verb: Callable[[ServedTrials], Decided],
        pool: ThreadPoolExecutor | None = None,
    ) -> web.StreamResponse:
        path = experiment_path(self._results, request.match_info["name"])

        async def perform(attempt: Attempt) -> tuple[int, Any]:
            return 200, await _call(pool or self._requesters, lambda: verb(ServedTrials(self._control, path, attempt)))

        return await self._once(request, sent, perform)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        name, after = request.match_info["name"], number(request, "after")
        path, wait_s = experiment_path(self._results, name), number(request, "wait_s")
        return answer(await self._news.after(path, after, wait_s))


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
    except BadInput:
        raise
    except (ValueError, HttpProcessingError) as error:  # aiohttp's
        raise BadInput(f"the form can't be read: {one_line(error)}") from None


async def _read_parts(request: web.Request, packed: Path, name: str) -> str:
    config: str | None = None
    async for part in await request.multipart():
        if not isinstance(part, BodyPartReader) or part.name not in (name, "code"):
            raise BadInput(f"only {name} and code are expected")
        if part.name == "code":
            with packed.open("wb") as file:
                async for chunk in _chunks(part, MAX_ARCHIVE_BYTES):
                    file.write(chunk)
        else:
            try:
                config = b"".join([chunk async for chunk in _chunks(part, MAX_BYTES)]).decode()
            except UnicodeDecodeError as error:
                raise BadInput(f"{name} is not UTF-8 text: {error}") from None
    if config is None or not packed.exists():
        raise BadInput(f"{name if config is None else 'code'} is missing")
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
        raise BadInput(f"the body is not JSON: {error}") from None


def _object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise BadInput(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadInput("the body must be a JSON object")
    return body


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


def _hparams(body: Mapping[str, Any]) -> dict[str, Any]:
    if set(body) - {"hparams"} or not isinstance(hparams := body.get("hparams", {}), dict):
        raise BadInput("give hparams: hyperparameters with their values; for a fork also at: best, latest or a batch")
    return hparams


def _owner(control: Control, name: str) -> str | None:
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


def change_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The changes to `dray.serve.control.Share`, tags and notes in a request's body; `BadInput` if they are invalid."""
    known = ("priority", "weight", "max_slots", "tags", "notes")
    if unknown := [name for name in body if name not in known]:
        raise BadInput(f"{unknown[0][:40]} can't be changed; only {', '.join(known)} can")
    change: dict[str, Any] = {}
    if "priority" in body:
        change["priority"] = _whole(body, "priority", most=99)
    if "weight" in body:
        change["weight"] = _weight(body["weight"])
    if "max_slots" in body:
        change["max_slots"] = None if body["max_slots"] is None else _whole(body, "max_slots")
    if (tags := body.get("tags")) is not None:
        good = isinstance(tags, list) and all(isinstance(tag, str) and 0 < len(tag) <= MAX_TAG for tag in tags)
        if not good or len(tags) > MAX_TAGS:
            raise BadInput(f"tags must be a list of at most {MAX_TAGS} texts, each of 1 to {MAX_TAG} characters")
        change["tags"] = tuple(dict.fromkeys(tags))
    if (notes := body.get("notes")) is not None:
        if not isinstance(notes, str) or len(notes) > MAX_NOTES:
            raise BadInput(f"notes must be text of at most {MAX_NOTES:,} characters")
        change["notes"] = notes
    return change


def _whole(body: Mapping[str, Any], name: str, *, most: int = 1_000_000_000) -> int | None:
    """A field that must be a positive integer, or None if it is missing; `BadInput` if it is anything else."""
    if name not in body:
        return None
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        limits = f"from 1 to {most}" if most < 1000 else "from 1"
        raise BadInput(f"{name} must be an integer {limits}, got {value!r:.40}")
    return value


def _weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1_000_000:
        raise BadInput(f"weight must be a number > 0, at most 1000000, got {value!r:.40}")
    return float(value)
