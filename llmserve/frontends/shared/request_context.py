"""The context of the current request, for logs, traces and the headers of its answer.

It is available in the task that answers the request and in tasks started there, but not in threads. Its fields for
logs contain no secrets and no content of the request.
"""

from __future__ import annotations

import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from llmserve.frontends.shared.api_keys import ApiKeys, HeaderOf, KeyOwner

REQUEST_ID = "x-request-id"  # header, and gRPC metadata
MAX_SHOWN = 256  # characters
VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(slots=True)
class RequestContext:
    name: str  # method and path, or the RPC
    header: HeaderOf = field(repr=False)
    keys: ApiKeys | None = field(default=None, repr=False)
    id: str = ""  # "": the client gave none, and none is required
    model: str = ""  # "": unknown or none
    trace_id: str = ""  # hexadecimal; "": no spans are recorded
    began_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def owner(self) -> KeyOwner | None:
        """The owner of the request's key. Each access looks it up; only logs and requests for adapters need it."""
        return None if self.keys is None else self.keys.owner_of(self.header)

    @property
    def key(self) -> str:
        """The name of the request's key; "" without a key."""
        return "" if (owner := self.owner) is None else owner.name

    def fields(self) -> dict[str, str]:
        """The known values under their names in logs."""
        found = {"request_id": self.id, "model": self.model, "key": self.key, "trace_id": self.trace_id}
        return {name: shown(value) for name, value in found.items() if value}


_current: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def current_request() -> RequestContext | None:
    return _current.get()


def enter_request(context: RequestContext) -> None:
    """Make `context` the current request of this task."""
    _current.set(context)


def name_model(model: str) -> None:
    """Set the model of the current request."""
    if (context := _current.get()) is not None:
        context.model = model


def enter_part(model: str) -> None:
    """Make one of several requests of a call the current request of this task."""
    if (context := _current.get()) is not None:
        _current.set(replace(context, model=model, began_ns=time.monotonic_ns()))


def shown(text: str) -> str:
    """A client's text in a safe form for logs: shortened, on one line."""
    text = text[:MAX_SHOWN]
    return text if text.isprintable() else ascii(text)[1:-1]


def given_id(header: HeaderOf) -> str:
    """The client's request id, if it is short and has only usual characters; else ""."""
    given = header(REQUEST_ID)
    return given if isinstance(given, str) and VALID_ID.fullmatch(given) else ""


def made_id() -> str:
    return f"req_{secrets.token_hex(12)}"
