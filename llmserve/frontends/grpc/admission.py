"""Decides by their metadata which calls are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from grpc import StatusCode

from llmserve.frontends.shared.api_keys import ApiKeys, HeaderOf, Lack
from llmserve.frontends.shared.restrictions import API_OF_RPC, Api, Key, Restrictions
from llmserve.wire.http2.headers import Metadata
from llmserve.wire.http2.messages import BadMessage
from llmserve.wire.http2.method import Method

Refuse: TypeAlias = Callable[[Metadata], BadMessage | None]

CODE_OF_LACK: Mapping[Lack, StatusCode] = {
    Lack.NO_KEY: StatusCode.UNAUTHENTICATED,
    Lack.WRONG_KEY: StatusCode.UNAUTHENTICATED,
    Lack.NO_ADMIN: StatusCode.PERMISSION_DENIED,
}


def restricted(
    methods: Mapping[str, Method], restrictions: Restrictions, keys: ApiKeys | None = None
) -> dict[str, Method]:
    """`methods` by path, each with the check of its API group. Every method belongs to a group."""
    apis = {path: API_OF_RPC[path.rpartition("/")[2]] for path in methods}
    return {path: replace(method, refuse=_refuse(apis[path], restrictions, keys)) for path, method in methods.items()}


def _refuse(api: Api, restrictions: Restrictions, keys: ApiKeys | None) -> Refuse | None:
    """The check of an API group; None if it refuses nothing."""
    key = restrictions.keys.get(api)
    if key is None and keys is None:
        return None

    def refuse(metadata: Metadata) -> BadMessage | None:
        lack = None if keys is None else keys.lack(api, header_of(metadata))
        if lack is not None:
            return BadMessage(CODE_OF_LACK[lack], lack.value)
        return None if key is None else _unless_open(key, metadata)

    return refuse


def _unless_open(key: Key, metadata: Metadata) -> BadMessage | None:
    if key.opens(metadata):
        return None
    return BadMessage(StatusCode.UNAVAILABLE, f"This protocol is restricted, expecting header '{key.header}'")


def header_of(metadata: Metadata) -> HeaderOf:
    """Looks up a header by name; if it is repeated, the first value counts."""
    return lambda name: next((value for key, value in metadata if key == name), None)
