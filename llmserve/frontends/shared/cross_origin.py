"""Which pages of other origins may read the answers (CORS): by default none, and nothing is said of it.

Unless the operator says so, nothing is allowed with a browser's own credentials: keys are in headers that a page has to
set by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from llmserve.errors import InvalidArgument, raise_problems
from llmserve.wire.http1.answers import WholeAnswer
from llmserve.wire.http1.request import Request

EVERY, LOCAL = "*", "localhost"
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # hosts that LOCAL stands for, with any port
METHODS = "GET, POST, DELETE, OPTIONS"
MAX_AGE_S = 600  # for which a browser remembers a permission
USUAL_PORTS = {"http": 80, "https": 443}  # which browsers leave out
KINDS, FACTS = ("requests", "tokens"), ("limit", "remaining", "reset")  # of the limits of a key
READABLE = ", ".join(  # headers of answers, besides those that every page may read
    (
        "x-request-id", "request-id", "retry-after", "inference-header-content-length",
        *(f"x-ratelimit-{fact}-{kind}" for kind in KINDS for fact in FACTS),
        *(f"anthropic-ratelimit-{kind}-{fact}" for kind in KINDS for fact in FACTS),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CrossOrigin:
    """`origins` as browsers write them, `LOCAL`, or `EVERY` alone."""

    origins: frozenset[str] = frozenset()
    with_credentials: bool = False

    def headers(self, request: Request) -> dict[str, str]:
        """That every answer to `request` has."""
        if not self.origins:
            return {}
        allowed = self._allowed(request)
        headers = {} if self._is_for_all else {"Vary": "Origin"}  # a cache must not show it to other origins
        if allowed:
            headers |= {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": READABLE}
            headers |= {"Access-Control-Allow-Credentials": "true"} if self.with_credentials else {}
        return headers

    @property
    def _is_for_all(self) -> bool:
        """Whether one answer is for every origin. With credentials browsers want to read their own."""
        return EVERY in self.origins and not self.with_credentials

    def preflight(self, request: Request) -> WholeAnswer | None:
        """The answer to a browser that asks before it sends a page's request; None: it is not that, or no page may.
        A page that may not is told nothing, so its browser does not send the request."""
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
        """Whom the answer is for: an origin, or all of them; "": nobody."""
        origin = request.header(b"origin")
        if origin is None:
            return ""
        if EVERY in self.origins:
            return EVERY if self._is_for_all else origin
        is_allowed = origin in self.origins - {LOCAL} or (LOCAL in self.origins and _is_local(origin))
        return origin if is_allowed else ""


def parse_origins(origins: Sequence[str], flag: str) -> CrossOrigin:
    """Raises `InvalidArgument` with everything that is wrong."""
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
