"""Restricted APIs: the groups of calls that an operator can restrict, and the header that allows a group.

`CALLS` assigns every call of both protocols to a group. A call without a group cannot be served.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from llmserve.errors import InvalidArgument, raise_problems

GRPC_PREFIX = "triton-grpc-protocol-"  # prefix of the header that allows a group over gRPC
VARIABLES = (  # secrets in the environment, which the server removes from it
    "LLMSERVE_HTTP_RESTRICTED_API", "LLMSERVE_GRPC_RESTRICTED_PROTOCOL", "LLMSERVE_API_KEY", "LLMSERVE_ADMIN_API_KEY",
)  # fmt: skip
MEMORY_KINDS = ("System", "Cuda")
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")  # values that every client can send and no proxy changes


class Api(StrEnum):
    """API groups, with their names in Triton."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


@dataclass(frozen=True, slots=True)
class Calls:
    rpcs: Sequence[str]
    paths: Sequence[str]  # for all HTTP methods


def _of_model(*ends: str) -> tuple[str, ...]:
    return tuple(f"/v2/models/{{model}}{version}{end}" for version in ("", "/versions/{version}") for end in ends)


def _of_repository(*ends: str) -> tuple[str, ...]:
    return tuple(f"/v2/repository{name}{end}" for name in ("", "/{repository}") for end in ends)


def _of_memory(*kinds: str) -> tuple[str, ...]:
    register = "/region/{region}/register"
    ends = ("/status", "/region/{region}/status", register, "/region/{region}/unregister", "/unregister")
    return tuple(f"/v2/{kind}{end}" for kind in kinds for end in ends)


CALLS: Mapping[Api, Calls] = {
    Api.HEALTH: Calls(
        ("ServerLive", "ServerReady", "ModelReady", "Check"),
        ("/v2/health/live", "/v2/health/ready", "/health", "/ping", *_of_model("/ready")),
    ),
    Api.METADATA: Calls(
        ("ServerMetadata", "ModelMetadata"),
        (
            *("/v2", *_of_model(""), "/openapi.json", "/tokenizer_info", "/v1/models", "/v1/models/{model}"),
            "/v1/models/{owner}/{name}",
            *("/version", "/props", "/api/tags", "/api/ps", "/api/version", "/api/show"),
        ),
    ),
    Api.INFERENCE: Calls(
        ("ModelInfer", "ModelStreamInfer"),
        (
            *_of_model("/infer", "/generate", "/generate_stream"),
            *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"),
            *("/completion", "/apply-template", "/v1/chat/completions/input_tokens", "/v1/responses/input_tokens"),
            *(
                "/v1/responses/{response_id}",
                "/v1/responses/{response_id}/cancel",
                "/v1/files",
                "/v1/files/{file_id}",
                "/v1/files/{file_id}/content",
            ),
            *("/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"),
            *("/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank"),
            *("/api/chat", "/api/generate", "/api/embed", "/v1/chat/completions/batch", "/invocations"),
        ),
    ),
    Api.SHARED_MEMORY: Calls(
        tuple(f"{kind}SharedMemory{verb}" for kind in MEMORY_KINDS for verb in ("Status", "Register", "Unregister")),
        _of_memory(*(f"{kind.lower()}sharedmemory" for kind in MEMORY_KINDS)),
    ),
    Api.MODEL_CONFIG: Calls(("ModelConfig",), _of_model("/config")),
    Api.MODEL_REPOSITORY: Calls(
        ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
        (
            *_of_repository("/index", "/models/{model}/load", "/models/{model}/unload"),
            *("/v2/repository/rollouts", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
            *(f"/v2/repository/models/{{model}}/rollout{end}" for end in ("", "/start", "/promote", "/abort")),
        ),
    ),
    Api.STATISTICS: Calls(("ModelStatistics",), ("/v2/models/stats", *_of_model("/stats"), "/metrics")),
    Api.TRACE: Calls(("TraceSetting",), ("/v2/trace/setting", "/v2/models/{model}/trace/setting")),
    Api.LOGGING: Calls(("LogSettings",), ("/v2/logging",)),
}
API_OF_RPC = {rpc: api for api, calls in CALLS.items() for rpc in calls.rpcs}
API_OF_PATH = {path: api for api, calls in CALLS.items() for path in calls.paths}


@dataclass(frozen=True, slots=True)
class Key:
    """The header that a request must have. No message or representation contains its value."""

    header: str  # in the operator's spelling
    value: bytes = field(repr=False)

    def opens_for(self, given: str | bytes | None) -> bool:
        """Compares in constant time for values of the right length."""
        found = given.encode("utf-8", "surrogateescape") if isinstance(given, str) else given
        return found is not None and hmac.compare_digest(found, self.value)

    def opens(self, headers: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether the headers contain the value; of several headers with this name, the first counts."""
        name = self.header.lower()
        return self.opens_for(next((value for key, value in headers if key == name), None))


@dataclass(frozen=True, slots=True)
class Restrictions:
    """The keys of restricted groups. Other groups are open to everybody."""

    keys: Mapping[Api, Key] = field(default_factory=dict)

    def headers(self) -> frozenset[str]:
        """The names of the headers in lower case. Their values must not be passed on."""
        return frozenset(key.header.lower() for key in self.keys.values())


def parse_restrictions(options: Iterable[str], flag: str, *, kind: str, prefix: str = "") -> Restrictions:
    """Parse the options `API[,API...]:HEADER=VALUE` of one flag; `kind` is Triton's word for a group there.

    Raises one `InvalidArgument` with the problems of all options, without values.
    """
    keys: dict[Api, Key] = {}
    problems: list[str] = []
    for option in options:
        names, _, setting = option.partition(":")
        header, _, value = setting.partition("=")
        if not (names and header and value):
            problems.append("option format is '<api>[,<api>...]:<header>=<value>'")
            continue
        if not HEADER_NAME.fullmatch(header):
            problems.append(f"'{header}' is not the name of a header")
        if not HEADER_VALUE.fullmatch(value):
            problems.append(f"the value of '{header}' is not valid in a header: use trimmed, printable ASCII")
        for name in names.split(","):
            if name not in list(Api):
                problems.append(f"unknown restricted {kind} '{name}'; known: {', '.join(Api)}")
            elif Api(name) in keys:
                problems.append(f"restricted {kind} '{name}' can not be specified in multiple config groups")
            else:
                keys[Api(name)] = Key(prefix + header, value.encode("utf-8", "surrogateescape"))
    raise_problems(InvalidArgument, flag, problems)
    return Restrictions(keys)
