"""Calls that need a key, without it and with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import grpc
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.compat.observe import TIMEOUT_S, Case, Json, as_json, http_call
from tools.servers import Endpoint

OTHERS = "metadata,model-config,statistics,shared-memory,trace,logging"
FLAGS = (  # health over HTTP is open: both servers are asked for it when they start
    "--model-control-mode=explicit",
    "--http-restricted-api=inference:Infer-Key=v",
    f"--http-restricted-api={OTHERS}:key=a=b",
    "--http-restricted-api=model-repository:admin=w",
    "--grpc-restricted-protocol=inference:infer-key=v",
    f"--grpc-restricted-protocol={OTHERS}:key=a=b",
    "--grpc-restricted-protocol=model-repository,health:admin=w",
)
ROUTES = (
    ("GET", "/v2"), ("GET", "/v2/health/live"), ("GET", "/v2/models/stats"), ("GET", "/v2/models/nope"),
    ("GET", "/v2/models/nope/ready"), ("GET", "/v2/models/nope/config"), ("GET", "/v2/models/nope/versions/1/stats"),
    ("POST", "/v2/models/nope/infer"), ("GET", "/v2/models/nope/infer"), ("POST", "/v2/models/nope/generate"),
    ("POST", "/v2/models/nope/versions/1/generate_stream"), ("GET", "/v2/models/nope/trace/setting"),
    ("POST", "/v2/trace/setting"), ("GET", "/v2/logging"), ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/nope/load"), ("POST", "/v2/repository/models/nope/unload"),
    ("GET", "/v2/systemsharedmemory/status"), ("POST", "/v2/systemsharedmemory/region/r/register"),
    ("POST", "/v2/cudasharedmemory/unregister"), ("GET", "/v2/nothing"),
)  # fmt: skip
RPCS = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
INFER, ADMIN = "triton-grpc-protocol-infer-key", "triton-grpc-protocol-admin"


def http(method: str, path: str, **headers: str) -> Case:
    return Case(lambda endpoint: http_call(endpoint, method, path, None, headers))


def rpc(name: str, *metadata: tuple[str, str]) -> Case:
    def ask(channel: grpc.Channel) -> Json:
        method = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), name)
        request = GetMessageClass(RPCS[name].input_type)()
        if RPCS[name].client_streaming:
            return [as_json(reply) for reply in method(iter([request]), metadata=metadata, timeout=TIMEOUT_S)]
        return as_json(method(request, metadata=metadata, timeout=TIMEOUT_S))

    return Case(_or_status(ask))


def health_check(*metadata: tuple[str, str]) -> Case:
    path = "/grpc.health.v1.Health/Check"
    return Case(_or_status(lambda channel: channel.unary_unary(path)(b"", TIMEOUT_S, metadata).hex()))


def _or_status(ask: Callable[[grpc.Channel], Json]) -> Callable[[Endpoint], Json]:
    def run(endpoint: Endpoint) -> Json:
        with grpc.insecure_channel(endpoint.grpc) as channel:
            try:
                return ask(channel)
            except grpc.RpcError as error:
                return {"status": error.code().name, "error": error.details()}

    return run


CASES: Mapping[str, Case] = {
    **{f"{method} {path} without a key": http(method, path) for method, path in ROUTES},
    "POST infer with the key": http("POST", "/v2/models/nope/infer", **{"INFER-key": "v"}),
    "POST infer with another value": http("POST", "/v2/models/nope/infer", **{"Infer-Key": "V"}),
    "POST infer with the key of others": http("POST", "/v2/models/nope/infer", key="a=b"),
    "GET config with the key": http("GET", "/v2/models/nope/config", key="a=b"),
    **{f"{name} without a key": rpc(name) for name in RPCS},
    "ModelInfer with the key": rpc("ModelInfer", (INFER, "v")),
    "ModelInfer with another value": rpc("ModelInfer", (INFER, "V")),
    "ModelInfer with the key behind another": rpc("ModelInfer", (INFER, "x"), (INFER, "v")),
    "ModelInfer with the key before another": rpc("ModelInfer", (INFER, "v"), (INFER, "x")),
    "ModelInfer with a key without the prefix": rpc("ModelInfer", ("infer-key", "v")),
    "ModelStreamInfer with the key": rpc("ModelStreamInfer", (INFER, "v")),
    "ServerLive with the key": rpc("ServerLive", (ADMIN, "w")),
    "the health service without a key": health_check(),
    "the health service with the key": health_check((ADMIN, "w")),
}
