"""`llmserve serve`: serves an engine through the packaged pipelines, or any Triton model repository."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmserve.cli.access import exposures, grpc_restrictions, http_restrictions, make_api_keys
from llmserve.cli.dataclass_command import DataclassCommand
from llmserve.cli.encryption import files_without_effect, grpc_tls, http_tls, metrics_tls
from llmserve.cli.engine_flags import speculation_flag
from llmserve.cli.help import GroupedHelpCommand
from llmserve.cli.old_flags import Translation, say_without_effect
from llmserve.cli.ports import check_ports
from llmserve.cli.serve_options import ServeOptions
from llmserve.cli.service_file import read_services
from llmserve.cli.termination import EndPastThreads
from llmserve.cli.text_options import text_settings
from llmserve.cli.tritonserver_flags import translate
from llmserve.errors import InvalidArgument, Unsupported, raise_problems

if TYPE_CHECKING:
    from llmserve.cli.backends import OpenEngine
    from llmserve.cli.server import Listen
    from llmserve.engine.directory.gate_record import GateRule
    from llmserve.frontends.shared.extension_state import Extensions
    from llmserve.serving.settings import ServerSettings

# Requests leave no cycles, but running requests have enough objects to trigger the garbage collector all the time.
# Full collections are rare: with 16,000 open calls, one takes 75 ms, in which the event loop does nothing else.
COLLECTOR_THRESHOLDS = (5_000, 10, 100)

logger = logging.getLogger(__name__)


class ServeCommand(GroupedHelpCommand):
    """Also accepts tritonserver's command line."""

    most_used = (
        "model_repository", "host", "http_port", "grpc_port", "served_model_name", "api_keys", "batch_dir", "threads",
        "max_kv_tokens", "log_verbose",
    )  # fmt: skip

    def translated(self, args: Sequence[str]) -> Translation:
        given = read_services(args)
        done = translate(given.arguments)
        return Translation(
            with_any_suite(done.arguments), given.without_effect + done.without_effect, given.problems + done.problems
        )


def with_any_suite(arguments: Sequence[str]) -> list[str]:
    """Insert the value ANY_SUITE after a `--require-gate` that is followed by a flag, an engine or nothing."""
    from llmserve.engine.directory.artifact import MANIFEST_FILE
    from llmserve.engine.directory.gate_record import ANY_SUITE

    found: list[str] = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue="-"):
        found.append(argument)
        if argument == "--require-gate" and (
            following.startswith("-") or os.sep in following or Path(following, MANIFEST_FILE).is_file()
        ):
            found.append(ANY_SUITE)
    return found


def serve(options: ServeOptions) -> None:
    """Serve models over gRPC (8001), HTTP (8000) and metrics (8002), as Triton does."""
    check_ports(options)
    if options.frontends > 1:
        from llmserve.cli.front_ends import serve_by_several

        raise typer.Exit(serve_by_several(options))
    # imported here: the other commands need neither gRPC nor HTTP
    from llmserve.cli.backends import make_backends, parse_backend_settings
    from llmserve.cli.server import ServerProcess

    extensions = make_extensions(options)
    for exposure in exposures(options, extensions):
        logger.warning(exposure)
    settings = server_settings(options)
    backend_settings = parse_backend_settings(options.backend_config or ())
    say_without_effect(backend_settings.unread())
    gate, elsewhere = gate_rule(options), engine_elsewhere(options)
    process = ServerProcess(
        settings,
        make_backends(
            backend_settings,
            gate,
            elsewhere,
            verify_every_s=0.0 if elsewhere else options.verify_engine_every,
            memory=extensions.requests,
        ),
        listen_settings(options),
        options.exit_timeout_secs,
        options.shutdown_delay_secs,
        options.exit_on_error,
        extensions,
    )
    raise typer.Exit(run(process.run()))


command = DataclassCommand(ServeOptions, serve)


def run(process: Coroutine[Any, Any, int]) -> int:
    """Run a server's process, and return the exit code."""
    import uvloop

    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    gc.freeze()  # imported objects are permanent
    end = EndPastThreads()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        end.code = runner.run(process)
    return end.code


def make_extensions(options: ServeOptions) -> Extensions:
    """The state that front ends share. It also applies the log flags."""
    from llmserve.cli.request_memory import request_memory
    from llmserve.cli.tracing import make_tracer
    from llmserve.frontends.shared.api_keys import HEADERS
    from llmserve.frontends.shared.cross_origin import parse_origins
    from llmserve.frontends.shared.extension_state import Extensions
    from llmserve.frontends.shared.forwarded_headers import ForwardedHeaders
    from llmserve.frontends.shared.log_settings import FORMATS, LogControl, LogFile, LogSettings
    from llmserve.frontends.shared.shared_memory import SharedMemory

    if options.log_format not in FORMATS:
        raise InvalidArgument(f"--log-format {options.log_format}: known formats are {', '.join(FORMATS)}")
    settings = LogSettings(
        log_file=options.log_file,
        log_info=options.log_info,
        log_warning=options.log_warning,
        log_error=options.log_error,
        log_verbose_level=options.log_verbose,
        log_format=options.log_format,
    )
    tracer = make_tracer(options.trace_config or ())
    if options.log_file:
        try:
            logging.basicConfig(handlers=[LogFile(options.log_file)], force=True)
        except OSError as error:
            raise InvalidArgument(f"--log-file {options.log_file} cannot be written: {error}") from error
    logs = LogControl(settings, logger=logging.getLogger("llmserve"), handlers=logging.getLogger().handlers)
    http, grpc = http_restrictions(options), grpc_restrictions(options)
    keys = make_api_keys(options)
    if options.cors_allow_credentials and not options.cors_allow_origin:
        raise InvalidArgument("--cors-allow-credentials is for pages of other origins; add --cors-allow-origin")
    forward, secret = ForwardedHeaders.matching, http.headers() | grpc.headers() | (HEADERS if keys else frozenset())
    return Extensions(
        memory=SharedMemory(allowed=options.allow_client_shm),
        tracer=tracer,
        logs=logs,
        http_headers=forward(options.http_header_forward_pattern, "--http-header-forward-pattern", secret),
        grpc_headers=forward(options.grpc_header_forward_pattern, "--grpc-header-forward-pattern", secret),
        http_restrictions=http,
        grpc_restrictions=grpc,
        api_keys=keys,
        cross_origin=replace(
            parse_origins(options.cors_allow_origin or (), "--cors-allow-origin"),
            with_credentials=options.cors_allow_credentials,
        ),
        root_path=root_path(options.root_path or ""),
        requests=request_memory(options.request_memory, options.request_memory_each),
        text=text_settings(options),
        grpc_compression=options.grpc_infer_response_compression_level.zlib_level,
    )


def check_chat_template(given: Path | None) -> None:
    """Raises `InvalidArgument` unless it is a file or the name of a built-in template."""
    from llmserve.stages.named_templates import NAMES

    if given is not None and not given.is_file() and str(given) not in NAMES:
        names = ", ".join(NAMES)
        raise InvalidArgument(
            f"--chat-template {given} is not a file; give a file with a Jinja template, or one of {names}"
        )


def root_path(text: str) -> str:
    """The path without a slash at its end. Raises `InvalidArgument`."""
    path = text.rstrip("/")
    if path and (not path.startswith("/") or "//" in path or not path.isascii() or "?" in path or "%" in path):
        raise InvalidArgument(f"--root-path {text}: expected a path such as /llm")
    return path


def server_settings(options: ServeOptions) -> ServerSettings:
    from llmserve.cli.pipelines import engine_parameters
    from llmserve.serving.instruments.metrics_settings import parse_metrics_config
    from llmserve.serving.schedulers.response_cache import parse_cache_config
    from llmserve.serving.settings import ALL_MODELS, ControlMode, ServerSettings

    names = tuple(options.load_model or ())
    if names and options.model_control_mode != ControlMode.EXPLICIT:
        raise InvalidArgument("--load-model needs --model-control-mode explicit: in other modes every model is loaded")
    if ALL_MODELS in names and len(names) > 1:
        raise InvalidArgument(f"--load-model {ALL_MODELS} is every model; leave the others out")
    check_chat_template(options.chat_template)
    repositories = find_repositories(options.engine, options.model_repository or ())
    models = {path.name for each in repositories for path in Path(each).glob("*/")}
    limits = {
        "num_threads": options.threads,
        "max_tokens_in_paged_kv_cache": options.max_kv_tokens,
        "kv_cache_free_gpu_mem_fraction": options.kv_cache_fraction,
        "kv_cache_dir": None if options.kv_cache_dir is None else options.kv_cache_dir.absolute(),
        "kv_cache_disk_size": options.kv_cache_disk_size,
        "speculation": None if options.speculation is None else speculation_flag(options.speculation).words(),
        "draft_engine": None if options.draft_engine is None else options.draft_engine.absolute(),
        "separate_process": "true" if options.engine_process else None,
        "adapters": parse_adapters(
            options.adapter or (), {*models, *(options.served_model_name or ())}, options.adapters
        ),
        "adapter_folder": None if options.adapters is None else options.adapters.absolute(),
        "max_adapters": options.max_adapters,
        "adapter_memory": options.adapter_memory,
    }
    given = {key: str(value) for key, value in limits.items() if value is not None}
    return ServerSettings(
        model_repositories=repositories,
        parameters_for=partial(
            engine_parameters,
            options.engine,
            given,
            allows_templates=options.allow_chat_template,
            template=options.chat_template,
        ),
        parameter_overrides=parse_parameters(options.parameter or ()),
        control_mode=options.model_control_mode,
        load_at_start=names,
        poll_s=options.repository_poll_secs,
        strict_readiness=options.strict_readiness,
        load_threads=options.model_load_thread_count,
        auto_complete=not options.disable_auto_complete_config,
        config_name=options.model_config_name,
        cache_bytes=parse_cache_config(options.cache_config) if options.cache_config else 0,
        inline_execution=options.inline_execution,
        rate_limit=options.rate_limit,
        rate_limit_resources=tuple(options.rate_limit_resource or ()),
        metrics=parse_metrics_config(
            options.metrics_config or (),
            interval_ms=options.metrics_interval_ms,
            cpu=options.allow_cpu_metrics,
            gpu=options.allow_gpu_metrics,
        ),
        server_name=options.id,
    )


# Options that belong to the engine's process.
OF_THE_ENGINE = (
    "threads", "max_kv_tokens", "kv_cache_fraction", "kv_cache_dir", "kv_cache_disk_size", "speculation",
    "draft_engine", "max_adapters", "adapter_memory",
)  # fmt: skip


def engine_elsewhere(options: ServeOptions) -> OpenEngine | None:
    """A function that opens a client of an engine at a socket or in a cluster. None: engines run here."""
    given = {"--engine-socket": options.engine_socket, "--cluster": options.cluster}
    flags = [name for name, value in given.items() if value]
    if not flags:
        return None
    flags += ["--engine-process"] if options.engine_process else []
    if len(flags) > 1:
        raise InvalidArgument(f"{' and '.join(flags)}: with {flags[0]} no engine runs here; leave one out")
    names = [name for name in (*OF_THE_ENGINE, "verify_engine_every") if getattr(options, name)]
    say_without_effect([f"--{name.replace('_', '-')} (with {flags[0]})" for name in names])
    return socket_opener(options.engine_socket) if options.engine_socket else cluster_opener(options.cluster)


def socket_opener(path: Path) -> OpenEngine:
    from llmserve.engine.open import open_at_socket

    return partial(open_at_socket, path.absolute())


def cluster_opener(cluster: str) -> OpenEngine:
    from llmserve.cluster.address import parse_address

    address = parse_address(cluster)
    if find_spec("dynamo") is None:
        raise Unsupported("--cluster requires NVIDIA Dynamo, in its own environment: see docs/cluster.md")
    os.environ.setdefault("DYN_LOG", "error")  # read when Dynamo is imported; it logs several lines a request otherwise
    from llmserve.cluster.client import open_cluster

    return partial(open_cluster, address)


def gate_rule(options: ServeOptions) -> GateRule | None:
    """The rule that engines must meet. The records of `options.engine` are checked now, its files when it opens."""
    from llmserve.engine.directory.artifact import EngineDirectory
    from llmserve.engine.directory.gate_record import ANY_SUITE, GateRule, GateSubject, require_record
    from llmserve.sealed_log import Verifier

    suites, keys = tuple(options.require_gate or ()), options.gate_key or ()
    if not suites:
        if keys:
            raise InvalidArgument("--gate-key has no effect without --require-gate; add --require-gate SUITE")
        return None
    if ANY_SUITE in suites and len(suites) > 1:
        raise InvalidArgument(f"--require-gate {ANY_SUITE} names no suite, and the others do; leave one of them out")
    rule = GateRule(() if suites == (ANY_SUITE,) else suites, Verifier.load(*keys) if keys else None)
    if options.engine is not None:
        require_record(GateSubject.engine(EngineDirectory.open(options.engine)), rule)
    return rule


def listen_settings(options: ServeOptions) -> Listen:
    from llmserve.cli.server import Address, Listen
    from llmserve.wire.http2.keepalive import ConnectionLimits

    if not (options.allow_http or options.allow_grpc):
        raise InvalidArgument("nothing to listen on: allow one of HTTP and gRPC")
    http_host = options.http_address or options.host
    say_without_effect(files_without_effect(options))
    return Listen(
        http=Address(http_host, options.http_port, options.reuse_http_port) if options.allow_http else None,
        grpc=(
            Address(options.grpc_address or options.host, options.grpc_port, options.reuse_grpc_port)
            if options.allow_grpc
            else None
        ),
        metrics=Address(options.metrics_address or http_host, options.metrics_port) if options.allow_metrics else None,
        max_input_bytes=options.http_max_input_size,
        grpc_limits=ConnectionLimits(
            ping_after_s=options.grpc_keepalive_time / 1000,
            ping_timeout_s=options.grpc_keepalive_timeout / 1000,
            pings_without_calls=options.grpc_keepalive_permit_without_calls,
            max_age_s=options.grpc_max_connection_age / 1000,
            max_age_grace_s=options.grpc_max_connection_age_grace / 1000,
        ),
        grpc_tls=grpc_tls(options),
        http_tls=http_tls(options),
        metrics_tls=metrics_tls(options),
        web_page=options.allow_web_page,
    )


def find_repositories(engine: Path | None, repositories: Sequence[str]) -> tuple[Path | str, ...]:
    """The repositories to serve. Also checks the engine directory, so that a wrong path is reported first."""
    from llmserve.cli.pipelines import packaged_repository
    from llmserve.engine.directory.artifact import EngineDirectory

    if engine is None and not repositories:
        raise InvalidArgument("nothing to serve: give an engine directory, or --model-repository DIR")
    for location in repositories:
        if (Path(location) / "config.pbtxt").is_file():
            parent = Path(location).absolute().parent
            raise InvalidArgument(f"--model-repository {location} is a model's own folder; give its parent: {parent}")
    pools = engine is not None and bool(EngineDirectory.open(engine).info().pooling)
    return tuple(repositories) or (packaged_repository(pools=pools),)


def parse_adapters(texts: Sequence[str], models: Collection[str], folder: Path | None = None) -> str | None:
    """NAME=DIR texts as the value of the model's parameter. No NAME, and no directory in `folder`, may be the name of
    one of `models`."""
    found: dict[str, str] = {}
    problems = [
        f"--adapters {folder}: a model has the name {name}; rename the directory"
        for name in sorted(models)
        if folder is not None and (folder / name).is_dir()
    ]
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            problems.append(f"--adapter {text}: expected NAME=DIR")
        elif name in found:
            problems.append(f"--adapter {name} is given twice")
        elif name in models:
            problems.append(f"--adapter {name}: a model has this name; give the adapter another one")
        found[name] = str(Path(path).absolute())
    raise_problems(InvalidArgument, "adapters", problems)
    return json.dumps(found) if found else None


def parse_parameters(parameters: Sequence[str]) -> dict[str, dict[str, str]]:
    """Model -> parameter -> value."""
    overrides: dict[str, dict[str, str]] = {}
    for text in parameters:
        name, dot, rest = text.partition(".")
        key, equals, value = rest.partition("=")
        if not (name and dot and key and equals):
            raise InvalidArgument(f"--parameter {text}: expected MODEL.KEY=VALUE, such as tensorrt_llm.num_threads=2")
        overrides.setdefault(name, {})[key] = value
    return overrides
