"""Sends requests over Triton's gRPC, streaming, to the ensemble of any llmserve or Triton server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass

from llmserve.benchmark.records import LoadRequest, Record
from llmserve.client import AsyncClient, Parameter
from llmserve.errors import LlmserveError, Unavailable


@dataclass(frozen=True, slots=True)
class GrpcEndpoint:
    client: AsyncClient
    parameters: Mapping[str, Parameter]  # additional inputs of the model

    async def ask(self, request: LoadRequest, record: Record) -> None:
        # the type checker cannot exclude that parameters repeat the client's own arguments
        answer = self.client.generate(request.prompt, max_tokens=request.max_tokens, **self.parameters)  # type: ignore[arg-type]
        try:
            async with aclosing(answer) as deltas:
                async for delta in deltas:
                    if delta.text:
                        record.arrived.append(time.perf_counter())
                    if delta.completion_tokens:
                        record.prompt_tokens = delta.prompt_tokens
                        record.cached_tokens = delta.cached_tokens
                        record.drafted_tokens, record.accepted_tokens = delta.drafted_tokens, delta.accepted_tokens
                        record.completion_tokens = delta.completion_tokens
        except LlmserveError as error:
            is_unreachable = isinstance(error, Unavailable) and not record.arrived
            record.fail(f"gRPC {error.code.value}", str(error), is_unreachable=is_unreachable)

    async def close(self) -> None:
        await self.client.close()
