"""The text APIs on the HTTP port: their application is made in a thread when the first request comes.

A server that nobody asks for them neither starts later because of them nor holds their libraries in memory.
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
from llmserve.wire.http1.answers import Answer, WholeAnswer
from llmserve.wire.http1.request import Request

if TYPE_CHECKING:
    from fastapi import FastAPI

FILES = "/v1/files"
MAX_BODY_BYTES = 4 * 1024 * 1024  # about a million tokens of text; it is parsed in one piece
PATHS = (  # method, path; `restrictions.py` says which group each is of
    ("GET", "/openapi.json"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/models/{owner}/{name}"),  # of a name with a slash
    ("GET", "/tokenizer_info"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/batch"),
    ("POST", "/invocations"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/files"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("GET", "/v1/batches"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/completion"),
    ("POST", "/apply-template"),
    ("GET", "/props"),
    ("POST", "/v1/chat/completions/input_tokens"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/show"),
    ("POST", "/api/embed"),
)
PREFIXES = (
    "/v1/", "/api/", "/tokenize", "/detokenize", "/tokenizer_info", "/openapi.json", "/completion", "/apply-template",
    "/props", "/invocations",
)  # fmt: skip


ROOTS = frozenset(prefix.strip("/") for prefix in PREFIXES)
WITHOUT_VERSION = frozenset(path.split("/")[2] for _, path in PATHS if path.startswith("/v1/"))


def canonical(path: str) -> str:
    """What a path means whose client has a base URL with a slash at its end, without /v1, or with it twice."""
    segments = [segment for segment in path.split("/") if segment]
    while segments[:2] == ["v1", "v1"]:
        del segments[0]
    if segments and segments[0] in WITHOUT_VERSION:
        segments.insert(0, "v1")
    return "/" + "/".join(segments) if segments and segments[0] in ROOTS else path


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
        except Exception as error:  # border: an installation that lacks something
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
        """Batches that another process has left: their requests are asked again until the models are there."""
        if await asyncio.to_thread(store.unfinished):
            application = await self._application()
            application.state.jobs.resume()
