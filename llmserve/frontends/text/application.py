"""The FastAPI application: routes and their schema. It has neither sockets nor limits of its own."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel

from llmserve import __version__
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.server_core import Core
from llmserve.frontends.text.answers.log_probs import TokenTexts
from llmserve.frontends.text.anthropic.messages import Messages
from llmserve.frontends.text.batches.jobs import Jobs
from llmserve.frontends.text.batches.routes import Batches, Files
from llmserve.frontends.text.batches.store import Store
from llmserve.frontends.text.llama_cpp.routes import LlamaCpp
from llmserve.frontends.text.ollama.routes import Ollama
from llmserve.frontends.text.openai.adapters import LoraAdapters
from llmserve.frontends.text.openai.background import Background
from llmserve.frontends.text.openai.chat import Chat
from llmserve.frontends.text.openai.completions import Completions
from llmserve.frontends.text.openai.embeddings import Embeddings
from llmserve.frontends.text.openai.invocations import Invocations
from llmserve.frontends.text.openai.models import Models
from llmserve.frontends.text.openai.rerank import Rerank
from llmserve.frontends.text.openai.responses import Responses
from llmserve.frontends.text.openai.stored_responses import StoredResponses
from llmserve.frontends.text.requests.ensembles import VECTORS, Ensembles
from llmserve.frontends.text.requests.messages import Conversations
from llmserve.frontends.text.requests.validation import BodyRoute
from llmserve.frontends.text.state import ApiState

Endpoint = Callable[..., Awaitable[Response]]
SUMMARY = "The models of this server through OpenAI's API, with what vLLM's clients expect besides."


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(BaseModel):
    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorDocument, "description": text}
    for status, text in (
        (400, "The request cannot be answered; the message lists all reasons."),
        (401, "The server requires an API key."),
        (403, "The server's operator has restricted this group of calls."),
        (404, "There is no such model."),
        (408, "The body has stopped coming."),
        (413, "The request is too large."),
        (429, "Too many requests wait; Retry-After says when to come back."),
        (500, "A fault of the server or of the model."),
        (503, "The server is starting or stopping."),
        (504, "A deadline is over."),
    )
}


def make_application(core: Core, extensions: Extensions, store: Store | None = None) -> FastAPI:
    """Takes a moment; the event loop need not be running. `store`: of files and batches."""
    app = FastAPI(
        title="llmserve", version=__version__, summary=SUMMARY, docs_url=None, redoc_url=None,  # they need a CDN
        openapi_url="/openapi.json", responses=ERRORS, separate_input_output_schemas=False,
    )  # fmt: skip
    app.router.route_class = BodyRoute
    app.router.redirect_slashes = False
    app.state.refuses_unknown_fields = extensions.text.refuses_unknown_fields
    ensembles = Ensembles(core, extensions.text)
    embedders = Ensembles(core, extensions.text, VECTORS)
    state = ApiState(ensembles, extensions, Conversations(ensembles), TokenTexts(ensembles), embedders)
    app.state.jobs = None if store is None else Jobs(store, app, extensions)
    files, batches = Files(state, store), Batches(state, app.state.jobs)
    models, ollama, llama_cpp = Models(state), Ollama(state), LlamaCpp(state)
    chat, completions, embeddings = Chat(state), Completions(state), Embeddings(state)
    stored = StoredResponses(extensions.text.stored_responses)
    responses = Responses(state, stored, Background(extensions.background))
    get: tuple[tuple[str, Endpoint], ...] = (
        ("/v1/models", models.list),
        ("/v1/models/{model}", models.retrieve),
        ("/v1/models/{owner}/{name}", models.retrieve_owned),
        ("/v1/responses/{response_id}", responses.retrieve),
        ("/v1/files", files.list),
        ("/v1/files/{file_id}", files.retrieve),
        ("/v1/files/{file_id}/content", files.content),
        ("/v1/batches", batches.list),
        ("/v1/batches/{batch_id}", batches.retrieve),
        ("/tokenizer_info", models.tokenizer_info),
        ("/props", llama_cpp.props),
        ("/api/tags", ollama.tags),
        ("/api/ps", ollama.running),
        ("/api/version", ollama.version),
    )
    post: tuple[tuple[str, Endpoint], ...] = (
        ("/v1/completions", completions.create),
        ("/v1/chat/completions", chat.create),
        ("/v1/responses", responses.create),
        ("/v1/responses/{response_id}/cancel", responses.cancel),
        ("/v1/files", files.create),
        ("/v1/batches", batches.create),
        ("/v1/batches/{batch_id}/cancel", batches.cancel),
        ("/v1/messages", Messages(state).create),
        ("/v1/messages/count_tokens", Messages(state).count_tokens),
        ("/v1/embeddings", embeddings.create),
        ("/v1/rerank", Rerank(state).create),
        *_of_vllm(models, LoraAdapters(state), Invocations(chat, completions, embeddings)),
        *_of_llama_cpp(llama_cpp, responses),
        ("/api/chat", ollama.chat),
        ("/api/generate", ollama.generate),
        ("/api/show", ollama.show),
        ("/api/embed", embeddings.embed),
    )
    delete: tuple[tuple[str, Endpoint], ...] = (
        ("/v1/responses/{response_id}", responses.delete),
        ("/v1/files/{file_id}", files.delete),
    )
    for method, routes in (("GET", get), ("POST", post), ("DELETE", delete)):
        _add_routes(app, method, routes)
    return app


def _of_vllm(models: Models, adapters: LoraAdapters, invocations: Invocations) -> tuple[tuple[str, Endpoint], ...]:
    return (
        ("/v1/load_lora_adapter", adapters.load),
        ("/v1/unload_lora_adapter", adapters.unload),
        ("/v1/chat/completions/batch", invocations.chat.create_several),
        ("/invocations", invocations.create),
        ("/tokenize", models.tokenize),
        ("/detokenize", models.detokenize),
    )


def _of_llama_cpp(llama_cpp: LlamaCpp, responses: Responses) -> tuple[tuple[str, Endpoint], ...]:
    """llama.cpp's, and how many tokens a request has."""
    return (
        ("/v1/responses/input_tokens", responses.input_tokens),
        ("/completion", llama_cpp.completion),
        ("/apply-template", llama_cpp.apply_template),
        ("/v1/chat/completions/input_tokens", llama_cpp.count_chat),
    )


def _add_routes(app: FastAPI, method: str, routes: Sequence[tuple[str, Endpoint]]) -> None:
    for path, endpoint in routes:
        name = "_".join([*re.findall(r"\w+", path), *([] if method == "GET" else [method.lower()])])
        app.add_api_route(path, endpoint, methods=[method], name=name, response_model=None)
