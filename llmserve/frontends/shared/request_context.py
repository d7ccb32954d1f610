"""What is known of the request that is being answered, for logs, traces and the headers of its answer.

Whoever answers it, and the tasks that he starts, find it here; threads do not. Nothing in it is secret, nor what was
asked.
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
    name: str  # what is asked for: method and path, or the RPC
    header: HeaderOf = field(repr=False)
    keys: ApiKeys | None = field(default=None, repr=False)
    id: str = ""  # "": the client gave none, and needs none
    model: str = ""  # "": not known yet, or none
    trace_id: str = ""  # hexadecimal; "": no spans are made of it
    began_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def owner(self) -> KeyOwner | None:
        """Of the key that it came with. Looked up anew: for those that are logged, or name an adapter."""
        return None if self.keys is None else self.keys.owner_of(self.header)

    @property
    def key(self) -> str:
        """The name of its key; "" without one."""
        return "" if (owner := self.owner) is None else owner.name

    def fields(self) -> dict[str, str]:
        """As logs name them."""
        found = {"request_id": self.id, "model": self.model, "key": self.key, "trace_id": self.trace_id}
        return {name: shown(value) for name, value in found.items() if value}


_current: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def current_request() -> RequestContext | None:
    return _current.get()


def enter_request(context: RequestContext) -> None:
    """From here on this task answers it."""
    _current.set(context)


def name_model(model: str) -> None:
    """It has turned out what the request is for."""
    if (context := _current.get()) is not None:
        context.model = model


def enter_part(model: str) -> None:
    """From here on this task answers one of several requests that came together."""
    if (context := _current.get()) is not None:
        _current.set(replace(context, model=model, began_ns=time.monotonic_ns()))


def shown(text: str) -> str:
    """A client's words as they may stand in a log: some of them, on one line."""
    text = text[:MAX_SHOWN]
    return text if text.isprintable() else ascii(text)[1:-1]


def given_id(header: HeaderOf) -> str:
    """The client's, when it is short and has no strange characters; "": it gave none."""
    given = header(REQUEST_ID)
    return given if isinstance(given, str) and VALID_ID.fullmatch(given) else ""


def made_id() -> str:
    return f"req_{secrets.token_hex(12)}"
