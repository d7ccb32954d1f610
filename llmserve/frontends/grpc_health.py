"""`grpc.health.v1.Health/Check`, the standard health service: the server's readiness, whatever the service name.

`HealthCheckResponse` has one enum field, so its two messages are written out here instead of carrying generated code.
"""

from __future__ import annotations

from typing import Any

import grpc

from llmserve.frontends.door import Core

SERVING = b"\x08\x01"  # field 1, varint: SERVING
NOT_SERVING = b"\x08\x02"


def health_handler(core: Core) -> grpc.GenericRpcHandler:
    async def check(request: bytes, context: Any) -> bytes:
        return SERVING if core.ready() else NOT_SERVING

    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )
