"""grpcio's server in front of another one: `python -m tools.client_soak.relay HOST:PORT`.

It prints its port, and serves until SIGTERM. Streams are forwarded unchanged, so a client uses grpcio's wire and gets
the same answers.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

SERVICE = "inference.GRPCInferenceService"
STREAM = "ModelStreamInfer"


async def main(target: str) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with grpc.aio.insecure_channel(target) as channel:
        onward = channel.stream_stream(f"/{SERVICE}/{STREAM}")

        async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for response in onward(requests):
                yield response

        server = grpc.aio.server()
        handlers = {STREAM: grpc.stream_stream_rpc_method_handler(stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        print(server.add_insecure_port("127.0.0.1:0"), flush=True)
        await server.start()
        await stopped.wait()
        await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
