"""The options of `llmserve serve`, by subject. Options that tritonserver also has mean the same.

`tritonserver_flags.py` handles tritonserver's other flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from llmserve.cli.dataclass_command import argument, option
from llmserve.cli.engine_flags import EngineOptions
from llmserve.cli.text_options import TextOptions
from llmserve.serving.settings import ControlMode

DEFAULT_MAX_INPUT_BYTES = 64 * 1024 * 1024
model_option = partial(option, panel="Models")
listen_option = partial(option, panel="Listening")
access_option = partial(option, panel="Access")
metrics_option = partial(option, panel="Metrics")
log_option = partial(option, panel="Logging")


class CompressionLevel(StrEnum):
    """tritonserver's levels of compression."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @property
    def zlib_level(self) -> int:
        return {"none": 0, "low": 1, "medium": 6, "high": 9}[self.value]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    engine: Path | None = argument(None, "Engine directory.")
    model_repository: list[str] | None = model_option(
        None,
        "Model repository, a directory or the URL of an object store; may be repeated.",
        "--model-repository",
        "--model-store",
        show_default="the packaged one",
    )
    service: list[Path] | None = model_option(
        None, "Service file of PAI-EAS; its processor_params are read as flags."
    )  # read by service_file.py
    model_control_mode: ControlMode = model_option(
        ControlMode.NONE, "none: load all at start; poll: also load changes; explicit: load on request."
    )
    load_model: list[str] | None = model_option(
        None, "Explicit mode: model to load at start; * is every model; may be repeated."
    )
    repository_poll_secs: float = model_option(15, "Seconds between two polls; 0: only at start.", min=0)
    disable_auto_complete_config: bool = model_option(
        False, "Refuse incomplete configs.", "--disable-auto-complete-config"
    )
    model_config_name: str = model_option("", "Prefer the config <model>/configs/NAME.pbtxt.")
    model_load_thread_count: int = model_option(4, "Maximum number of models that load at the same time.", min=1)
    backend_config: list[str] | None = model_option(None, "BACKEND,KEY=VALUE; may be repeated.")
    cache_config: str = model_option("", "local,size=BYTES: a response cache.")
    inline_execution: bool = model_option(True, "Run models that declare brief, pure work on the event loop.")
    rate_limit: str = model_option("off", "off or execution_count: share resources by the rate_limiter of configs.")
    rate_limit_resource: list[str] | None = model_option(
        None, "NAME:COUNT: size of a shared resource; may be repeated."
    )
    strict_readiness: bool = model_option(True, "Ready only when every model is.")
    exit_on_error: bool = model_option(True, "Exit when a model does not load at start.")


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    id: str = listen_option("llmserve", "The server's name, as clients see it.")
    host: str = listen_option("0.0.0.0", "Address to listen on.")
    http_address: str = listen_option("", "Address of this port, instead of --host.")
    grpc_address: str = listen_option("", "Address of this port, instead of --host.")
    metrics_address: str = listen_option("", "Address of this port, instead of --http-address.")
    http_port: int = listen_option(8000, "0: any free port.", min=0, max=65535)
    grpc_port: int = listen_option(8001, "0: any free port.", min=0, max=65535)
    metrics_port: int = listen_option(8002, "0: any free port.", min=0, max=65535)
    frontends: int = listen_option(
        1, "Server processes on the same ports; the engine runs in a process of its own.", min=1
    )
    reuse_http_port: bool = listen_option(False, "Share the HTTP port with other servers of this user.")
    reuse_grpc_port: bool = listen_option(False, "The same for the gRPC port.")
    allow_http: bool = listen_option(True, "Listen for HTTP.")
    allow_grpc: bool = listen_option(True, "Listen for gRPC.")
    allow_metrics: bool = listen_option(True, "Serve /metrics.")
    allow_web_page: bool = listen_option(True, "Serve the web page at / over HTTP.")
    root_path: str | None = listen_option(
        None,
        "Optional prefix of HTTP paths, such as /llm behind a proxy that does not strip it.",
        show_default="none",
    )
    http_max_input_size: int = listen_option(DEFAULT_MAX_INPUT_BYTES, "Maximum size of an HTTP body in bytes.", min=1)
    request_memory: int | None = listen_option(
        None, "Maximum memory of all running requests in bytes.", min=1, show_default="a quarter of the memory"
    )
    request_memory_each: int | None = listen_option(
        None, "Maximum memory of one request in bytes.", min=1, show_default="a quarter of --request-memory"
    )
    http_header_forward_pattern: str = listen_option("", "Headers whose names match become request parameters.")
    grpc_header_forward_pattern: str = listen_option("", "The same for gRPC metadata.")
    grpc_infer_response_compression_level: CompressionLevel = listen_option(
        CompressionLevel.NONE, "Compression of gRPC answers."
    )
    http_use_ssl: bool = listen_option(False, "HTTPS only.")
    http_use_ssl_mutual: bool = listen_option(False, "Also require a client certificate.")
    http_server_cert: str = listen_option("", "PEM: the server's certificate chain.")
    http_server_key: str = listen_option("", "PEM: the key of the server's certificate.")
    http_root_cert: str = listen_option("", "PEM: the authority of client certificates.")
    metrics_use_ssl: bool = listen_option(False, "/metrics over HTTPS only, like the HTTP port.")
    grpc_use_ssl: bool = listen_option(False, "gRPC over TLS only.")
    grpc_use_ssl_mutual: bool = listen_option(False, "Also require a client certificate.")
    grpc_server_cert: str = listen_option("", "PEM: the server's certificate chain.")
    grpc_server_key: str = listen_option("", "PEM: the key of the server's certificate.")
    grpc_root_cert: str = listen_option("", "PEM: the authority of client certificates.")
    grpc_keepalive_time: int = listen_option(
        7_200_000, "Milliseconds of silence until the server pings a client.", min=0
    )
    grpc_keepalive_timeout: int = listen_option(20_000, "Milliseconds that the client has to answer a ping.", min=1)
    grpc_keepalive_permit_without_calls: bool = listen_option(False, "Also ping clients without a running call.")
    grpc_max_connection_age: int = listen_option(0, "Milliseconds until a connection is closed; 0: never.", min=0)
    grpc_max_connection_age_grace: int = listen_option(
        0, "Milliseconds that its calls have to finish; 0: no limit.", min=0
    )
    shutdown_delay_secs: float = listen_option(
        0, "Seconds after SIGTERM in which the server is not ready but accepts requests, for load balancers.", min=0
    )
    exit_timeout_secs: float = listen_option(30, "Seconds that running requests have to finish.", min=0)


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    api_keys: Path | None = access_option(None, "YAML file of API keys; every call except health checks requires one.")
    http_restricted_api: list[str] | None = access_option(
        None, "API,API:HEADER=VALUE: restrict calls to requests with this header; may be repeated."
    )
    grpc_restricted_protocol: list[str] | None = access_option(
        None, "The same for gRPC, where the header is triton-grpc-protocol-HEADER."
    )
    cors_allow_origin: list[str] | None = access_option(
        None, "Origin (SCHEME://HOST:PORT, localhost, or *) whose web pages may use the HTTP port; may be repeated."
    )
    cors_allow_credentials: bool = access_option(
        False, "Allow these pages to send cookies and the browser's other credentials.", "--cors-allow-credentials"
    )
    allow_client_shm: bool = access_option(False, "Let clients register shared memory of this machine.")


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    metrics_config: list[str] | None = metrics_option(
        None, "KEY=VALUE, such as summary_latencies=true; may be repeated."
    )
    metrics_interval_ms: float = metrics_option(
        2000, "How many milliseconds readings of the machine are cached.", min=0
    )
    allow_cpu_metrics: bool = metrics_option(True, "Show nv_cpu_*.")
    allow_gpu_metrics: bool = metrics_option(True, "Show nv_gpu_*.")


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    log_verbose: int = log_option(0, "Above 0: log each request, and details.", min=0)
    log_info: bool = log_option(True, "Print information.")
    log_warning: bool = log_option(True, "Print warnings.")
    log_error: bool = log_option(True, "Print errors.")
    log_format: str = log_option("default", "default, ISO8601 or json.")
    log_file: str = log_option("", "Log file, instead of standard error.")
    trace_config: list[str] | None = log_option(
        None, "Traces: triton,file=PATH, or opentelemetry,url=URL; rate=N, level=TIMESTAMPS, ...; may be repeated."
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(LogOptions, MetricsOptions, EngineOptions, AccessOptions, TextOptions, ListenOptions, ModelOptions):
    """All options; those of the last base class come first."""
