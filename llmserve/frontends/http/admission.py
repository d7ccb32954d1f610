"""Which requests are answered at all, decided by their headers: their bodies are not read before."""

from __future__ import annotations

from llmserve.frontends.http.error_answers import TEXT, refused
from llmserve.frontends.http.routes import Guard
from llmserve.frontends.shared.restrictions import Api, Key, Restrictions
from llmserve.wire.http1.answers import WholeAnswer
from llmserve.wire.http1.request import Request

FORBIDDEN = 403
# A page that a browser shows can send a POST to any port that its machine reaches, loopback included, and needs no
# permission for it. These calls let it run code and read memory there.
NOT_FOR_PAGES = frozenset((Api.MODEL_REPOSITORY, Api.SHARED_MEMORY))


def guard_of(api: Api, restrictions: Restrictions) -> Guard | None:
    """What refuses requests of a group; None: nothing does."""
    key = restrictions.keys.get(api)
    if key is not None:
        return lambda request: _unless_open(key, request)
    return _unless_of_a_page if api in NOT_FOR_PAGES else None


def _unless_open(key: Key, request: Request) -> WholeAnswer | None:
    if key.opens_for(request.header(key.header.lower().encode())):
        return None
    return refused(f"This API is restricted, expecting header '{key.header}'", FORBIDDEN, TEXT)


def _unless_of_a_page(request: Request) -> WholeAnswer | None:
    if request.header(b"origin") is None:
        return None
    problem = "This API is not for web pages; restrict it to a header (--http-restricted-api) that yours sends"
    return refused(problem, FORBIDDEN, TEXT)
