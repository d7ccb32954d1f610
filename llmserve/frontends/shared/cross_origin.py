"""Cross-origin access (CORS): which pages of other origins may read the answers. The default is none, without headers.

Unless the operator allows it, requests with a browser's own credentials are not permitted: keys are in headers that a
page must set itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from llmserve.errors import InvalidArgument, raise_problems
from llmserve.wire.http1.answers import WholeAnswer
from llmserve.wire.http1.request import Request

EVERY, LOCAL = "*", "localhost"
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # hosts that LOCAL allows, with any port
METHODS = "GET, POST, DELETE, OPTIONS"
MAX_AGE_S = 600  # how long a browser may cache a permission
USUAL_PORTS = {"http": 80, "https": 443}  # ports that browsers omit
KINDS, FACTS = ("requests", "tokens"), ("limit", "remaining", "reset")  # of a key's limits
READABLE = ", ".join(  # headers of answers, in addition to those that every page may read
    (
        "x-request-id", "request-id", "retry-after", "inference-header-content-length",
        *(f"x-ratelimit-{fact}-{kind}" for kind in KINDS for fact in FACTS),
        *(f"anthropic-ratelimit-{kind}-{fact}" for kind in KINDS for fact in FACTS),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CrossOrigin:
    """`origins` are in the form that browsers send, `LOCAL`, or only `EVERY`."""

    origins: frozenset[str] = frozenset()
    with_credentials: bool = False

    def headers(self, request: Request) -> dict[str, str]:
        """The headers of every answer to `request`."""
        if not self.origins:
            return {}
        allowed = self._allowed(request)
        headers = {} if self._is_for_all else {"Vary": "Origin"}  # a cache must not return it to other origins
        if allowed:
            headers |= {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": READABLE}
            headers |= {"Access-Control-Allow-Credentials": "true"} if self.with_credentials else {}
        return headers

    @property
    def _is_for_all(self) -> bool:
        """Whether one answer fits every origin. With credentials, browsers require their own origin in it."""
        return EVERY in self.origins and not self.with_credentials

    def preflight(self, request: Request) -> WholeAnswer | None:
        """The answer to a preflight request; None if it is none, or if no page is allowed. The answer to a page that
        is not allowed grants nothing, so its browser does not send the request."""
        if request.method != "OPTIONS" or not self.origins or request.header(b"origin") is None:
            return None
        if request.header(b"access-control-request-method") is None:
            return None
        if not self._allowed(request):
            return WholeAnswer()
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        if wanted := request.header(b"access-control-request-headers"):
            headers["Access-Control-Allow-Headers"] = wanted
        return WholeAnswer(headers=headers)

    def _allowed(self, request: Request) -> str:
        """The value of Access-Control-Allow-Origin: an origin, or `EVERY`; "": not allowed."""
        origin = request.header(b"origin")
        if origin is None:
            return ""
        if EVERY in self.origins:
            return EVERY if self._is_for_all else origin
        is_allowed = origin in self.origins - {LOCAL} or (LOCAL in self.origins and _is_local(origin))
        return origin if is_allowed else ""


def parse_origins(origins: Sequence[str], flag: str) -> CrossOrigin:
    """Raises `InvalidArgument` with all problems."""
    problems = [
        f"{origin}: expected SCHEME://HOST or SCHEME://HOST:PORT in lower case, {LOCAL} for pages of this machine, or "
        f"{EVERY} for every page"
        for origin in origins
        if origin not in (EVERY, LOCAL) and not _is_origin(origin)
    ]
    if EVERY in origins and len(set(origins)) > 1:
        problems.append(f"{EVERY} allows every page; leave the others out")
    raise_problems(InvalidArgument, f"{flag} is wrong", problems)
    return CrossOrigin(frozenset(origins))


def _is_local(origin: str) -> bool:
    return _is_origin(origin) and urlsplit(origin).hostname in LOOPBACK


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return False
    host = parts.hostname or ""
    name = f"[{host}]" if ":" in host else host
    if parts.scheme not in USUAL_PORTS or parts.port == USUAL_PORTS[parts.scheme]:
        return False
    return bool(host) and text == f"{parts.scheme}://{name}{port}"
