"""The options of `llmserve serve`, by subject. Names that tritonserver has too mean what they mean there.

What else tritonserver accepts is dealt with in `tritonserver_flags.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llmserve.cli.engine_flags import EngineOptions
from llmserve.cli.text_options import TextOptions
from llmserve.serving.settings import ControlMode

DEFAULT_MAX_INPUT_BYTES = 64 * 1024 * 1024
MODELS, LISTENING, ACCESS = "Models", "Listening", "Access"
METRICS, LOGGING = "Metrics", "Logging"


class CompressionLevel(StrEnum):
    """tritonserver's, as zlib's levels."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @property
    def zlib_level(self) -> int:
        return {"none": 0, "low": 1, "medium": 6, "high": 9}[self.value]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    engine: Annotated[Path | None, typer.Argument(help="Engine directory.", show_default=False)] = None
    model_repository: Annotated[
        list[str] | None,
        typer.Option(
            "--model-repository",
            "--model-store",
            help="Model repository, a directory or the URL of an object store; may be repeated.",
            show_default="the packaged one",
            rich_help_panel=MODELS,
        ),
    ] = None
    service: Annotated[  # read by service_file.py
        list[Path] | None,
        typer.Option(help="Service file of PAI-EAS; its processor_params are read as flags.", rich_help_panel=MODELS),
    ] = None
    model_control_mode: Annotated[
        ControlMode,
        typer.Option(
            help="none: load all at start; poll: also load changes; explicit: load on request.", rich_help_panel=MODELS
        ),
    ] = ControlMode.NONE
    load_model: Annotated[
        list[str] | None,
        typer.Option(
            help="Explicit mode: model to load at start; * is every model; may be repeated.", rich_help_panel=MODELS
        ),
    ] = None
    repository_poll_secs: Annotated[
        float, typer.Option(help="Seconds between two polls; 0: only at start.", min=0, rich_help_panel=MODELS)
    ] = 15
    disable_auto_complete_config: Annotated[
        bool,
        typer.Option(
            "--disable-auto-complete-config",
            help="Refuse incomplete configs.",
            rich_help_panel=MODELS,
        ),
    ] = False
    model_config_name: Annotated[
        str,
        typer.Option(help="Prefer the config <model>/configs/NAME.pbtxt.", show_default=False, rich_help_panel=MODELS),
    ] = ""
    model_load_thread_count: Annotated[
        int, typer.Option(help="Most models that load at the same time.", min=1, rich_help_panel=MODELS)
    ] = 4
    backend_config: Annotated[
        list[str] | None, typer.Option(help="BACKEND,KEY=VALUE; may be repeated.", rich_help_panel=MODELS)
    ] = None
    cache_config: Annotated[
        str, typer.Option(help="local,size=BYTES: a response cache.", show_default=False, rich_help_panel=MODELS)
    ] = ""
    inline_execution: Annotated[
        bool,
        typer.Option(help="Run models that declare brief, pure work on the event loop.", rich_help_panel=MODELS),
    ] = True
    rate_limit: Annotated[
        str,
        typer.Option(
            help="off or execution_count: share resources by the rate_limiter of configs.", rich_help_panel=MODELS
        ),
    ] = "off"
    rate_limit_resource: Annotated[
        list[str] | None,
        typer.Option(help="NAME:COUNT: size of a shared resource; may be repeated.", rich_help_panel=MODELS),
    ] = None
    strict_readiness: Annotated[bool, typer.Option(help="Ready only when every model is.", rich_help_panel=MODELS)] = (
        True
    )
    exit_on_error: Annotated[
        bool, typer.Option(help="Exit when a model does not load at start.", rich_help_panel=MODELS)
    ] = True


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    id: Annotated[str, typer.Option(help="The server's name, as clients see it.", rich_help_panel=LISTENING)] = (
        "llmserve"
    )
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=LISTENING)] = "0.0.0.0"
    http_address: Annotated[
        str,
        typer.Option(help="Address of this port, instead of --host.", show_default=False, rich_help_panel=LISTENING),
    ] = ""
    grpc_address: Annotated[
        str,
        typer.Option(help="Address of this port, instead of --host.", show_default=False, rich_help_panel=LISTENING),
    ] = ""
    metrics_address: Annotated[
        str,
        typer.Option(
            help="Address of this port, instead of --http-address.", show_default=False, rich_help_panel=LISTENING
        ),
    ] = ""
    http_port: Annotated[int, typer.Option(help="0: any free port.", min=0, max=65535, rich_help_panel=LISTENING)] = (
        8000
    )
    grpc_port: Annotated[int, typer.Option(help="0: any free port.", min=0, max=65535, rich_help_panel=LISTENING)] = (
        8001
    )
    metrics_port: Annotated[
        int, typer.Option(help="0: any free port.", min=0, max=65535, rich_help_panel=LISTENING)
    ] = 8002
    frontends: Annotated[
        int,
        typer.Option(
            help="Server processes on the same ports; the engine runs in a process of its own.",
            min=1,
            rich_help_panel=LISTENING,
        ),
    ] = 1
    reuse_http_port: Annotated[
        bool,
        typer.Option(help="Share the HTTP port with other servers of this user.", rich_help_panel=LISTENING),
    ] = False
    reuse_grpc_port: Annotated[bool, typer.Option(help="The same for the gRPC port.", rich_help_panel=LISTENING)] = (
        False
    )
    allow_http: Annotated[bool, typer.Option(help="Listen for HTTP.", rich_help_panel=LISTENING)] = True
    allow_grpc: Annotated[bool, typer.Option(help="Listen for gRPC.", rich_help_panel=LISTENING)] = True
    allow_metrics: Annotated[bool, typer.Option(help="Serve /metrics.", rich_help_panel=LISTENING)] = True
    allow_web_page: Annotated[
        bool, typer.Option(help="Serve the web page at / over HTTP.", rich_help_panel=LISTENING)
    ] = True
    root_path: Annotated[
        str | None,
        typer.Option(
            help="Prefix that HTTP paths may have, such as /llm behind a proxy that keeps it.",
            show_default="none",
            rich_help_panel=LISTENING,
        ),
    ] = None
    http_max_input_size: Annotated[
        int, typer.Option(help="Most bytes of an HTTP body.", min=1, rich_help_panel=LISTENING)
    ] = DEFAULT_MAX_INPUT_BYTES
    request_memory: Annotated[
        int | None,
        typer.Option(
            help="Most bytes of memory for all running requests.",
            min=1,
            show_default="a quarter of the memory",
            rich_help_panel=LISTENING,
        ),
    ] = None
    request_memory_each: Annotated[
        int | None,
        typer.Option(
            help="Most bytes of memory for one request.",
            min=1,
            show_default="a quarter of --request-memory",
            rich_help_panel=LISTENING,
        ),
    ] = None
    http_header_forward_pattern: Annotated[
        str,
        typer.Option(
            help="Headers whose names match become request parameters.", show_default=False, rich_help_panel=LISTENING
        ),
    ] = ""
    grpc_header_forward_pattern: Annotated[
        str, typer.Option(help="The same for gRPC metadata.", show_default=False, rich_help_panel=LISTENING)
    ] = ""
    grpc_infer_response_compression_level: Annotated[
        CompressionLevel,
        typer.Option(help="Compression of gRPC answers.", rich_help_panel=LISTENING),
    ] = CompressionLevel.NONE
    http_use_ssl: Annotated[bool, typer.Option(help="HTTPS only.", rich_help_panel=LISTENING)] = False
    http_use_ssl_mutual: Annotated[
        bool, typer.Option(help="Also require a client certificate.", rich_help_panel=LISTENING)
    ] = False
    http_server_cert: Annotated[
        str, typer.Option(help="PEM: the server's certificate chain.", show_default=False, rich_help_panel=LISTENING)
    ] = ""
    http_server_key: Annotated[
        str,
        typer.Option(help="PEM: the key of the server's certificate.", show_default=False, rich_help_panel=LISTENING),
    ] = ""
    http_root_cert: Annotated[
        str,
        typer.Option(help="PEM: the authority of client certificates.", show_default=False, rich_help_panel=LISTENING),
    ] = ""
    metrics_use_ssl: Annotated[
        bool,
        typer.Option(help="/metrics over HTTPS only, like the HTTP port.", rich_help_panel=LISTENING),
    ] = False
    grpc_use_ssl: Annotated[bool, typer.Option(help="gRPC over TLS only.", rich_help_panel=LISTENING)] = False
    grpc_use_ssl_mutual: Annotated[
        bool, typer.Option(help="Also require a client certificate.", rich_help_panel=LISTENING)
    ] = False
    grpc_server_cert: Annotated[
        str, typer.Option(help="PEM: the server's certificate chain.", show_default=False, rich_help_panel=LISTENING)
    ] = ""
    grpc_server_key: Annotated[
        str,
        typer.Option(help="PEM: the key of the server's certificate.", show_default=False, rich_help_panel=LISTENING),
    ] = ""
    grpc_root_cert: Annotated[
        str,
        typer.Option(help="PEM: the authority of client certificates.", show_default=False, rich_help_panel=LISTENING),
    ] = ""
    grpc_keepalive_time: Annotated[
        int,
        typer.Option(help="Milliseconds of silence until the server pings a client.", min=0, rich_help_panel=LISTENING),
    ] = 7_200_000
    grpc_keepalive_timeout: Annotated[
        int, typer.Option(help="Milliseconds that the client has to answer a ping.", min=1, rich_help_panel=LISTENING)
    ] = 20_000
    grpc_keepalive_permit_without_calls: Annotated[
        bool, typer.Option(help="Also ping clients without a running call.", rich_help_panel=LISTENING)
    ] = False
    grpc_max_connection_age: Annotated[
        int, typer.Option(help="Milliseconds until a connection is closed; 0: never.", min=0, rich_help_panel=LISTENING)
    ] = 0
    grpc_max_connection_age_grace: Annotated[
        int,
        typer.Option(
            help="Milliseconds that its calls may take to end; 0: no limit.", min=0, rich_help_panel=LISTENING
        ),
    ] = 0
    shutdown_delay_secs: Annotated[
        float,
        typer.Option(
            help="Seconds after SIGTERM in which the server is not ready but accepts requests, for load balancers.",
            min=0,
            rich_help_panel=LISTENING,
        ),
    ] = 0
    exit_timeout_secs: Annotated[
        float, typer.Option(help="Seconds that running requests may take to end.", min=0, rich_help_panel=LISTENING)
    ] = 30


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of API keys; every call except health checks requires one.",
            show_default=False,
            rich_help_panel=ACCESS,
        ),
    ] = None
    http_restricted_api: Annotated[
        list[str] | None,
        typer.Option(
            help="API,API:HEADER=VALUE: restrict calls to requests with this header; may be repeated.",
            rich_help_panel=ACCESS,
        ),
    ] = None
    grpc_restricted_protocol: Annotated[
        list[str] | None,
        typer.Option(
            help="The same for gRPC, where the header is triton-grpc-protocol-HEADER.", rich_help_panel=ACCESS
        ),
    ] = None
    cors_allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin (SCHEME://HOST:PORT, localhost, or *) whose web pages may use the HTTP port; may be repeated.",
            rich_help_panel=ACCESS,
        ),
    ] = None
    cors_allow_credentials: Annotated[
        bool,
        typer.Option(
            "--cors-allow-credentials",
            help="Allow these pages to send cookies and the browser's other credentials.",
            rich_help_panel=ACCESS,
        ),
    ] = False
    allow_client_shm: Annotated[
        bool, typer.Option(help="Let clients register shared memory of this machine.", rich_help_panel=ACCESS)
    ] = False


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    metrics_config: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE, such as summary_latencies=true; may be repeated.", rich_help_panel=METRICS),
    ] = None
    metrics_interval_ms: Annotated[
        float,
        typer.Option(help="Milliseconds for which readings of the machine are cached.", min=0, rich_help_panel=METRICS),
    ] = 2000
    allow_cpu_metrics: Annotated[bool, typer.Option(help="Show nv_cpu_*.", rich_help_panel=METRICS)] = True
    allow_gpu_metrics: Annotated[bool, typer.Option(help="Show nv_gpu_*.", rich_help_panel=METRICS)] = True


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    log_verbose: Annotated[
        int, typer.Option(help="Above 0: log each request, and details.", min=0, rich_help_panel=LOGGING)
    ] = 0
    log_info: Annotated[bool, typer.Option(help="Print information.", rich_help_panel=LOGGING)] = True
    log_warning: Annotated[bool, typer.Option(help="Print warnings.", rich_help_panel=LOGGING)] = True
    log_error: Annotated[bool, typer.Option(help="Print errors.", rich_help_panel=LOGGING)] = True
    log_format: Annotated[str, typer.Option(help="default, ISO8601 or json.", rich_help_panel=LOGGING)] = "default"
    log_file: Annotated[
        str, typer.Option(help="Log file, instead of standard error.", show_default=False, rich_help_panel=LOGGING)
    ] = ""
    trace_config: Annotated[
        list[str] | None,
        typer.Option(
            help="Traces: triton,file=PATH, or opentelemetry,url=URL; rate=N, level=TIMESTAMPS, ...; may be repeated.",
            rich_help_panel=LOGGING,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(LogOptions, MetricsOptions, EngineOptions, AccessOptions, TextOptions, ListenOptions, ModelOptions):
    """In the order of the last base first."""
