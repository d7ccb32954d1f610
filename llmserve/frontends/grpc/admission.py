"""Which calls are served at all, decided by their metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from grpc import StatusCode

from llmserve.frontends.shared.restrictions import API_OF_RPC, Key, Restrictions
from llmserve.wire.http2.headers import Metadata
from llmserve.wire.http2.messages import BadMessage
from llmserve.wire.http2.method import Method


def restricted(methods: Mapping[str, Method], restrictions: Restrictions) -> dict[str, Method]:
    """`methods` by path, each with what opens it. Every one belongs to a group."""
    apis = {path: API_OF_RPC[path.rpartition("/")[2]] for path in methods}
    return {
        path: _opened_by(restrictions.keys[api], method) if (api := apis[path]) in restrictions.keys else method
        for path, method in methods.items()
    }


def _opened_by(key: Key, method: Method) -> Method:
    def refuse(metadata: Metadata) -> BadMessage | None:
        if key.opens(metadata):
            return None
        return BadMessage(StatusCode.UNAVAILABLE, f"This protocol is restricted, expecting header '{key.header}'")

    return replace(method, refuse=refuse)
