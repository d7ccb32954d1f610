"""The paths of the text APIs, and their endpoints. Importable without FastAPI."""

from __future__ import annotations

ROUTES = (  # HTTP method, path, and endpoint: an API of the application and its method. Groups: `restrictions.py`
    ("GET", "/openapi.json", ""),  # FastAPI's own
    ("GET", "/v1/models", "models.list"),
    ("GET", "/v1/models/{model}", "models.retrieve"),
    ("GET", "/v1/models/{owner}/{name}", "models.retrieve_owned"),  # for names with a slash
    ("GET", "/tokenizer_info", "models.tokenizer_info"),
    ("POST", "/v1/completions", "completions.create"),
    ("POST", "/v1/chat/completions", "chat.create"),
    ("POST", "/v1/chat/completions/batch", "chat.create_several"),
    ("POST", "/invocations", "invocations.create"),
    ("POST", "/v1/responses", "responses.create"),
    ("GET", "/v1/responses/{response_id}", "responses.retrieve"),
    ("DELETE", "/v1/responses/{response_id}", "responses.delete"),
    ("POST", "/v1/responses/{response_id}/cancel", "responses.cancel"),
    ("GET", "/v1/files", "files.list"),
    ("POST", "/v1/files", "files.create"),
    ("GET", "/v1/files/{file_id}", "files.retrieve"),
    ("DELETE", "/v1/files/{file_id}", "files.delete"),
    ("GET", "/v1/files/{file_id}/content", "files.content"),
    ("GET", "/v1/batches", "batches.list"),
    ("POST", "/v1/batches", "batches.create"),
    ("GET", "/v1/batches/{batch_id}", "batches.retrieve"),
    ("POST", "/v1/batches/{batch_id}/cancel", "batches.cancel"),
    ("POST", "/v1/messages", "messages.create"),
    ("POST", "/v1/messages/count_tokens", "messages.count_tokens"),
    ("POST", "/v1/embeddings", "embeddings.create"),
    ("POST", "/v1/rerank", "rerank.create"),
    ("POST", "/v1/load_lora_adapter", "adapters.load"),
    ("POST", "/v1/unload_lora_adapter", "adapters.unload"),
    ("POST", "/tokenize", "models.tokenize"),
    ("POST", "/detokenize", "models.detokenize"),
    ("POST", "/completion", "llama_cpp.completion"),
    ("POST", "/apply-template", "llama_cpp.apply_template"),
    ("GET", "/props", "llama_cpp.props"),
    ("POST", "/v1/chat/completions/input_tokens", "llama_cpp.count_chat"),
    ("POST", "/v1/responses/input_tokens", "responses.input_tokens"),
    ("GET", "/api/tags", "ollama.tags"),
    ("GET", "/api/ps", "ollama.running"),
    ("GET", "/api/version", "ollama.version"),
    ("POST", "/api/chat", "ollama.chat"),
    ("POST", "/api/generate", "ollama.generate"),
    ("POST", "/api/show", "ollama.show"),
    ("POST", "/api/embed", "embeddings.embed"),
)
PATHS = tuple((method, path) for method, path, _ in ROUTES)
PREFIXES = (
    "/v1/", "/api/", "/tokenize", "/detokenize", "/tokenizer_info", "/openapi.json", "/completion", "/apply-template",
    "/props", "/invocations",
)  # fmt: skip
ROOTS = frozenset(prefix.strip("/") for prefix in PREFIXES)
WITHOUT_VERSION = frozenset(path.split("/")[2] for _, path in PATHS if path.startswith("/v1/"))


def canonical(path: str) -> str:
    """The correct path for a client whose base URL ends with a slash, lacks /v1, or has it twice."""
    segments = [segment for segment in path.split("/") if segment]
    while segments[:2] == ["v1", "v1"]:
        del segments[0]
    if segments and segments[0] in WITHOUT_VERSION:
        segments.insert(0, "v1")
    return "/" + "/".join(segments) if segments and segments[0] in ROOTS else path
