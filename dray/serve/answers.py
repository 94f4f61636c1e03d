"""The API's responses: JSON, also for errors."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from dray.errors import ConfigError, ExperimentError, Invalid, NoExperiment
from dray.serve.refusals import WrongState
from dray.storage import StorageError, StorageFull
from dray.storage.errors import is_full
from dray.text import fields_of, one_line
from searchers.errors import DamagedFile, JournalError
from searchers.records import number_to_json

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Encoded(Generic[T]):
    """An answer of this type that is JSON already. `wait_s`: the seconds for which it stays the same, if known."""

    body: bytes
    wait_s: float | None = None


class KeyUsed(ValueError):
    """An idempotency key was sent with another request before; the message is one line."""


def answer(value: Any, *, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(body=encoded(value), status=status, content_type="application/json", charset="utf-8")


def encoded(value: Any) -> bytes:
    """JSON, short. Numbers that are not finite become "nan", "inf" and "-inf"."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"), default=_fields).encode()
    except ValueError:  # seldom
        return json.dumps(_plain(value), separators=(",", ":")).encode()


def _fields(value: Any) -> Any:
    return fields_of(value) if is_dataclass(value) else str(value)


def refuse(status: int, why: str, faults: Sequence[tuple[str, str]] = ()) -> web.Response:
    """An error response. `faults` are the errors of a config, as pairs of a field and a message."""
    return answer({"error": why, **({"faults": [list(fault) for fault in faults]} if faults else {})}, status=status)


def _plain(value: Any) -> Any:
    match value:
        case str() | int() | float() | None:
            return number_to_json(value)
        case Mapping():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return _plain(_fields(value))


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions into responses: 400 for bad input, 404 for unknown names, 409 for a wrong state."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:  # a redirection
            raise
        if isinstance(error, web.HTTPNotFound):
            return refuse(404, f"there is no {request.path[:200]}; /api/v1/openapi.json says what there is")
        return refuse(error.status, error.text or error.reason)
    except ConfigError as error:
        return refuse(400, str(error).partition("\n")[0].rstrip(":"), error.faults)
    except Invalid as error:
        return refuse(400, str(error))
    except KeyUsed as error:
        return refuse(422, str(error))
    except RecursionError:
        return refuse(400, "it is nested too deeply")
    except NoExperiment as error:
        return refuse(404, str(error))
    except (WrongState, JournalError, DamagedFile) as error:
        return refuse(409, str(error))
    except StorageError as error:
        return refuse(502, str(error))
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG and request.method != "POST":  # no file has such a name
            return refuse(404, f"there is no {request.path[:200]}")
        if (full := is_full(error)) is None:
            return refuse(507, f"the server can't read or write a file: {one_line(error)}")
        if isinstance(full, StorageFull):
            return refuse(507, one_line(full.strerror))
        where = f" {written}" if (written := full.filename2 or full.filename) else ""
        return refuse(507, f"can't write{where} on the server: {full.strerror}; free some space, and try again")
    except ExperimentError as error:
        return refuse(500, one_line(error))
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return refuse(500, "the server failed at this request; its log says why")
