"""The FastAPI application: routes and their schema. It has no sockets or limits of its own."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI
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
from llmserve.frontends.text.routes import ROUTES
from llmserve.frontends.text.state import ApiState

SUMMARY = "The models of this server through OpenAI's API, with the extensions that vLLM's clients expect."


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
        (400, "The request is invalid; the message lists all problems."),
        (401, "The server requires an API key."),
        (403, "The server's operator has restricted this group of calls."),
        (404, "The model does not exist."),
        (408, "The request body stopped arriving."),
        (413, "The request is too large."),
        (429, "Too many requests are waiting; Retry-After says when to try again."),
        (500, "The server or the model failed."),
        (503, "The server is starting or stopping."),
        (504, "A deadline has passed."),
    )
}


def make_application(core: Core, extensions: Extensions, store: Store | None = None) -> FastAPI:
    """This is slow, and does not need a running event loop. `store`: files and batches."""
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
    chat, completions, embeddings = Chat(state), Completions(state), Embeddings(state)
    stored = StoredResponses(extensions.text.stored_responses)
    apis = {
        "models": Models(state),
        "chat": chat,
        "completions": completions,
        "embeddings": embeddings,
        "rerank": Rerank(state),
        "responses": Responses(state, stored, Background(extensions.background)),
        "files": Files(state, store),
        "batches": Batches(state, app.state.jobs),
        "invocations": Invocations(chat, completions, embeddings),
        "adapters": LoraAdapters(state),
        "messages": Messages(state),
        "llama_cpp": LlamaCpp(state),
        "ollama": Ollama(state),
    }
    for method, path, answered_by in ROUTES:
        api, _, endpoint = answered_by.partition(".")
        if endpoint:
            name = "_".join([*re.findall(r"\w+", path), *([] if method == "GET" else [method.lower()])])
            app.add_api_route(path, getattr(apis[api], endpoint), methods=[method], name=name, response_model=None)
    return app
