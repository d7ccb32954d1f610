"""The API reference: OpenAI's routes from the schema that the server answers at /openapi.json, Triton's from its tables
of routes. New routes and fields appear with the next `make docs`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llmserve.frontends.http.inference_api import InferenceApi, triton_routes
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.restrictions import API_OF_PATH, CALLS, Api
from llmserve.frontends.text.application import make_application
from llmserve.serving.core import InferenceCore, ServerSettings

Schema = Mapping[str, Any]
LEFT_OUT = ("/versions/{version}", "/{repository}")  # parts of a path that its shorter form omits
SHOWN_BOUNDS = {
    "minimum": "at least {}", "maximum": "at most {}", "exclusiveMinimum": "above {}", "exclusiveMaximum": "below {}",
    "minItems": "at least {} entries", "maxItems": "at most {} entries", "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
}  # fmt: skip
INTRODUCTION = """# API reference

Generated from the code. For explanations, see [OpenAI's API](../docs/openai.md), [serving](../docs/serve.md)
and the [protocol's extensions](../docs/protocol.md). For access control, see [security](../docs/security.md).
"""


REFUSED = """Other servers have the fields of the type `anything`. This server accepts values that change nothing, and
[refuses the others](../docs/openai.md#what-is-honoured-and-what-is-refused).
"""


def api_reference() -> str:
    core = InferenceCore(ServerSettings(model_repositories=()), {})
    extensions = Extensions()
    document = make_application(core, extensions).openapi()
    routes = triton_routes(InferenceApi(core, extensions, max_input_bytes=0))
    parts = [INTRODUCTION, "## OpenAI's API and related APIs\n", *_operations(document)]
    parts += ["## Request bodies\n", REFUSED, *_schemas(document)]
    parts += ["## Triton's routes\n", _triton_table((method, path) for method, path, _ in routes)]
    parts += ["## Triton's remote procedure calls\n", _rpc_table()]
    return "\n".join(parts)


def _operations(document: Schema) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"### {method.upper()} {path}\n"
            yield f"{_one_line(operation.get('description', ''))}\n"
            if body := operation.get("requestBody"):
                yield f"The body: {_type(body['content']['application/json']['schema'])}.\n"
    yield "Errors of all routes:\n"
    yield _table(("Status", "When"), ((status, text) for status, text in _refusals(document)))


def _refusals(document: Schema) -> list[tuple[str, str]]:
    found = {
        (status, answer["description"])
        for methods in document["paths"].values()
        for operation in methods.values()
        for status, answer in operation["responses"].items()
        if status not in ("200", "422")  # FastAPI's own for an invalid body, which is a 400 here
    }
    return sorted(found)


def _schemas(document: Schema) -> Iterator[str]:
    for name, schema in sorted(document["components"]["schemas"].items()):
        if name in ("HTTPValidationError", "ValidationError"):  # FastAPI's, see above
            continue
        yield f"### {name}\n"
        if text := schema.get("description"):
            yield f"{_one_line(text)}\n"
        if properties := schema.get("properties"):
            required = set(schema.get("required", ()))
            rows = ((f"`{field}`", _type(of), _remarks(of, field in required)) for field, of in properties.items())
            yield _table(("Field", "Type", ""), rows)
        else:
            yield f"{_type(schema)}\n"


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[key]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if isinstance(values := schema.get("additionalProperties"), dict):
        return f"object of {_type(values)}"
    return str(schema.get("type", "anything"))


def _remarks(schema: Schema, is_required: bool) -> str:
    """Whether it is required, its default and bounds, and its description."""
    found = [schema, *schema.get("anyOf", ())]
    bounds = [text.format(_number(one[key])) for one in found for key, text in SHOWN_BOUNDS.items() if key in one]
    default = schema.get("default")
    given = ["required"] if is_required else [f"`{default}` by default"] if default is not None else []
    said = [text] if (text := _one_line(schema.get("description", ""))) else []
    return "; ".join([*given, *bounds, *said])


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else f"{value:.3g}"


def _triton_table(routes: Iterable[tuple[str, str]]) -> str:
    known = list(dict.fromkeys(routes))
    shorter = {(method, one) for method, path in known for one in _shorter(path)}
    rows: list[tuple[str, str, str]] = []
    for method, path in known:
        if (method, path) in shorter:
            continue  # the longer form says that a part can be omitted
        text = path
        for part in LEFT_OUT:
            if (method, path.replace(part, "", 1)) in known and part in path:
                text = text.replace(part, f"[{part}]", 1)
        rows.append((method, f"`{text}`", API_OF_PATH[path].value))
    return _table(("", "Path; parts in brackets are optional", "Group"), rows)


def _shorter(path: str) -> list[str]:
    return [path.replace(part, "", 1) for part in LEFT_OUT if part in path]


def _rpc_table() -> str:
    rows = ((f"`{_service(rpc)}/{rpc}`", api.value) for api in Api for rpc in CALLS[api].rpcs)
    return _table(("Call", "Group"), rows)


def _service(rpc: str) -> str:
    return "grpc.health.v1.Health" if rpc == "Check" else "inference.GRPCInferenceService"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())
