"""The text APIs on the HTTP port. Their application is created in a thread at the first request.

Without such requests, a server starts faster and does not load their libraries into memory.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from llmserve.frontends.http.asgi import AsgiAnswer
from llmserve.frontends.http.mounts import Mount
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.server_core import Core
from llmserve.frontends.text.answers.failures import UNAUTHORIZED, Failure, failed, failure_of
from llmserve.frontends.text.answers.limits import limit_headers
from llmserve.frontends.text.batches.store import Store
from llmserve.frontends.text.routes import PATHS, PREFIXES, canonical
from llmserve.wire.http1.answers import Answer, WholeAnswer
from llmserve.wire.http1.request import Request

if TYPE_CHECKING:
    from fastapi import FastAPI

FILES = "/v1/files"
MAX_BODY_BYTES = 4 * 1024 * 1024  # about a million tokens of text; it is parsed in one piece


def in_openais_words(request: Request, status: int, problem: str) -> WholeAnswer:
    code = "invalid_api_key" if status == UNAUTHORIZED else None
    return failed(request.path, Failure(status, problem, code=code))


def text_apis(core: Core, extensions: Extensions, max_input_bytes: int) -> Mount:
    front_end = TextFrontEnd(core, extensions, max_input_bytes=max_input_bytes)
    return Mount(PATHS, front_end.answer, prefixes=PREFIXES, refuse=in_openais_words, canonical=canonical)


class TextFrontEnd:
    def __init__(self, core: Core, extensions: Extensions, *, max_input_bytes: int) -> None:
        self._core = core
        self._extensions = extensions
        self._max_body_bytes = min(max_input_bytes, MAX_BODY_BYTES)
        self._max_file_bytes = max_input_bytes
        self._making: asyncio.Future[FastAPI] | None = None
        folder = extensions.text.batch_dir
        self._store = None if folder is None else Store.open(folder)
        if self._store is not None:
            extensions.closing.callback(self._store.close)
            resuming = asyncio.get_running_loop().create_task(self._resume(self._store))
            extensions.background.add(resuming)
            resuming.add_done_callback(extensions.background.discard)

    async def answer(self, request: Request) -> Answer:
        try:
            application = await self._application()
        except Exception as error:  # border: an incomplete installation
            return failed(request.path, failure_of(error))
        most = self._max_file_bytes if request.path == FILES else self._max_body_bytes
        if self._extensions.api_keys is None:
            return AsgiAnswer(application, request, most)
        headers = partial(limit_headers, self._core, self._extensions, request)
        return AsgiAnswer(application, request, most, headers)

    async def _application(self) -> FastAPI:
        if self._making is None:
            self._making = asyncio.get_running_loop().run_in_executor(None, self._make)
        return await asyncio.shield(self._making)

    def _make(self) -> FastAPI:
        from llmserve.frontends.text.application import make_application

        return make_application(self._core, self._extensions, self._store)

    async def _resume(self, store: Store) -> None:
        """Resume batches that another process left. Their requests are retried until the models are loaded."""
        if await asyncio.to_thread(store.unfinished):
            application = await self._application()
            application.state.jobs.resume()
