"""Our CPU engine on an event loop of its own, for fakes that are called from any thread."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

from llmserve.core import GenerateRequest, TokenEvent
from llmserve.engine.inflight import InflightEngine

OnEvent = Callable[[TokenEvent], bool]  # False: the rest is not wanted


class EngineHost:
    def __init__(self, engine: InflightEngine) -> None:
        self.engine = engine
        self._event_s = float(os.environ.get("FAKE_TRTLLM_EVENT_S", "0"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, request: GenerateRequest, on_event: OnEvent) -> Future[None]:
        """Cancel the returned future to cancel the request."""
        return asyncio.run_coroutine_threadsafe(self._run(request, on_event), self._loop)

    async def _run(self, request: GenerateRequest, on_event: OnEvent) -> None:
        async with aclosing(self.engine.submit(request)) as stream:
            async for event in stream:
                await asyncio.sleep(self._event_s)
                if not on_event(event):
                    return

    def statistics(self) -> dict[str, Any]:
        """As tensorrt_llm's IterationStats.to_json_str spells them."""
        stats = self.engine.stats()
        return {
            "timestamp": "01-01-2026 00:00:00.000000",
            "iter": stats.iteration,
            "iterLatencyMS": 1.0,
            "numNewActiveRequests": 0,
            "numActiveRequests": stats.num_active_requests,
            "numQueuedRequests": stats.num_waiting_requests,
            "numCompletedRequests": 0,
            "maxNumActiveRequests": stats.max_num_active_requests,
            "gpuMemUsage": 12345678,
            "cpuMemUsage": 2345,
            "pinnedMemUsage": 345,
            "kvCacheStats": {
                "maxNumBlocks": stats.max_num_blocks,
                "freeNumBlocks": stats.free_num_blocks,
                "usedNumBlocks": stats.used_num_blocks,
                "tokensPerBlock": stats.tokens_per_block,
                "allocTotalBlocks": 0,
                "allocNewBlocks": 0,
                "reusedBlocks": stats.reused_blocks,
                "missedBlocks": stats.missed_blocks,
                "cacheHitRate": 0.0,
            },
            "inflightBatchingStats": {
                "numScheduledRequests": stats.num_scheduled_requests,
                "numContextRequests": stats.num_context_requests,
                "numGenRequests": stats.num_gen_requests,
                "numPausedRequests": stats.num_paused_requests,
                "numCtxTokens": stats.num_ctx_tokens,
                "microBatchId": 0,
                "avgNumDecodedTokensPerIter": 1.0,
            },
        }

    def statistics_text(self) -> str:
        return json.dumps(self.statistics())

    def close(self) -> None:
        self.engine.close()
        asyncio.run_coroutine_threadsafe(_end_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
