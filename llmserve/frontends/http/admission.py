"""Decides by their headers which requests are refused, before their bodies are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from llmserve.frontends.http.error_answers import TEXT, refused
from llmserve.frontends.http.routes import Guard
from llmserve.frontends.shared.api_keys import FOR_ADMINS, ApiKeys, HeaderOf, Lack
from llmserve.frontends.shared.restrictions import Api, Key, Restrictions
from llmserve.wire.http1.answers import WholeAnswer
from llmserve.wire.http1.request import Request

UNAUTHORIZED, FORBIDDEN = 401, 403
STATUS_OF_LACK: Mapping[Lack, int] = {
    Lack.NO_KEY: UNAUTHORIZED,
    Lack.WRONG_KEY: UNAUTHORIZED,
    Lack.NO_ADMIN: FORBIDDEN,
}
CHALLENGE = {"WWW-Authenticate": "Bearer"}
# A web page in a browser can send a POST to any port that its machine reaches, loopback included, without permission.
# With these calls it could run code, read memory, and write others' requests to files.
NOT_FOR_PAGES = FOR_ADMINS


Refuse: TypeAlias = Callable[[Request, int, str], WholeAnswer]  # makes an answer from a status and a problem


def in_tritons_words(request: Request, status: int, problem: str) -> WholeAnswer:
    return refused(problem, status, TEXT)


def guard_of(
    api: Api, restrictions: Restrictions, keys: ApiKeys | None = None, refuse: Refuse = in_tritons_words
) -> Guard | None:
    """The guard that refuses requests of an API group; None if it refuses none."""
    key = restrictions.keys.get(api)
    guards: list[Guard] = []
    if keys is not None:
        guards.append(partial(_unless_known, keys, api, refuse=refuse))
    if key is not None:
        guards.append(partial(_unless_open, key, refuse=refuse))
    elif api in NOT_FOR_PAGES:
        guards.append(_unless_of_a_page)
    if len(guards) < 2:
        return guards[0] if guards else None
    return lambda request: next(filter(None, (guard(request) for guard in guards)), None)


def header_of(request: Request) -> HeaderOf:
    return lambda name: request.header(name.encode())


def _unless_known(keys: ApiKeys, api: Api, request: Request, *, refuse: Refuse) -> WholeAnswer | None:
    lack = keys.lack(api, header_of(request))
    if lack is None:
        return None
    status = STATUS_OF_LACK[lack]
    answer = refuse(request, status, lack.value)
    return replace(answer, headers={**answer.headers, **CHALLENGE}) if status == UNAUTHORIZED else answer


def _unless_open(key: Key, request: Request, *, refuse: Refuse) -> WholeAnswer | None:
    if key.opens_for(request.header(key.header.lower().encode())):
        return None
    return refuse(request, FORBIDDEN, f"This API is restricted, expecting header '{key.header}'")


def _unless_of_a_page(request: Request) -> WholeAnswer | None:
    if request.header(b"origin") is None:
        return None
    problem = "This API refuses web pages. To allow yours, require a header that it sends (--http-restricted-api)"
    return refused(problem, FORBIDDEN, TEXT)
