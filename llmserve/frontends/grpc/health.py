"""`grpc.health.v1.Health/Check`, the standard health service: the server's readiness, whatever the service name.

`HealthCheckResponse` has one enum field, so its two messages are written out here instead of carrying generated code.
"""

from __future__ import annotations

from typing import Any

from llmserve.frontends.shared.server_core import Core
from llmserve.wire.http2.method import Method


class HealthCheckResponse(bytes):
    """An encoded message."""

    def SerializeToString(self) -> bytes:  # noqa: N802  # protobuf's
        return self


SERVING = HealthCheckResponse(b"\x08\x01")  # field 1, varint: SERVING
NOT_SERVING = HealthCheckResponse(b"\x08\x02")


def health_methods(core: Core) -> dict[str, Method]:
    async def check(request: bytes, context: Any) -> HealthCheckResponse:
        return SERVING if core.ready() else NOT_SERVING

    return {"/grpc.health.v1.Health/Check": Method(check, bytes)}
