"""`llmserve serve --frontends N`: servers on the same ports, clients of one engine in its own process.

The kernel gives each connection to one of the servers (SO_REUSEPORT). This process loads no model. It starts the engine
and the servers, restarts servers that die, adds up their metrics, and stops them at the end.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.cli.serve_options import ServeOptions
from llmserve.cli.server import METRICS, started_line
from llmserve.cli.stop_signals import StopSignals, unless
from llmserve.engine.remote.process import ProcessEngine, RestartRule
from llmserve.errors import InvalidArgument, Unavailable, raise_problems
from llmserve.frontends.shared.restrictions import VARIABLES
from llmserve.serving.observe.several import added_up
from llmserve.serving.threads import in_daemon_thread
from llmserve.wire.http1.answers import Answer, WholeAnswer
from llmserve.wire.http1.request import Request
from llmserve.wire.http1.server import serve
from llmserve.wire.listener import claim_port, hold_port

if TYPE_CHECKING:
    from llmserve.backends.tensorrtllm.parameters import ModelParameters

SERVE = (sys.executable, "-P", "-m", "llmserve.cli.owned_server")  # -P: no modules of the working directory
LOOPBACK = "127.0.0.1"
SCRAPE_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 1 << 24  # output of models arrives in the same stream
READ_ALREADY = frozenset(("engine", "service", "frontends"))  # options that are not passed to the servers as flags

logger = logging.getLogger(__name__)


def serve_by_several(options: ServeOptions) -> int:
    """Serve, and return the exit code. Raises `InvalidArgument` with all options that require a single server."""
    from llmserve.cli.serve import engine_elsewhere, gate_rule, make_extensions, run, server_settings

    raise_problems(InvalidArgument, f"--frontends {options.frontends}", _problems(options))
    secrets = {name: os.environ[name] for name in VARIABLES if name in os.environ}  # every server reads them itself
    make_extensions(options).close()  # checks, and sets up the log
    gate_rule(options)
    elsewhere = engine_elsewhere(options) is not None
    cores = len(os.sched_getaffinity(0))
    if options.frontends > cores:
        logger.warning("--frontends %d: this machine has %d cores; more servers than cores only cost memory",
                       options.frontends, cores)  # fmt: skip
    engine = None if elsewhere else find_engine(server_settings(options))
    return run(FrontEnds(options, engine, secrets).run())


def _problems(options: ServeOptions) -> list[str]:
    from llmserve.serving.settings import ControlMode

    given = {
        "--engine-process: the engine has a process of its own already": options.engine_process,
        f"--model-control-mode {options.model_control_mode}: models are loaded at start only": (
            options.model_control_mode != ControlMode.NONE
        ),
        "--batch-dir: jobs belong to one server": options.batch_dir is not None,
        "--allow-client-shm: memory is registered with one server": options.allow_client_shm,
        "--rate-limit: resources are counted by each server": options.rate_limit != "off",
        "--trace-config with a file: each server would write it": any(
            text.startswith(("triton,", "file=")) for text in options.trace_config or ()
        ),
    }
    return [f"{text}; leave it out, or use one server" for text, is_given in given.items() if is_given]


class _NotStarted(Exception):
    """A server did not become ready. The message is its output."""


def find_engine(settings: Any) -> ModelParameters:
    """Parameters of the only engine in the repositories. Raises errors of models' configs, and `InvalidArgument` for
    models that several servers do not support."""
    from llmserve.backends.tensorrtllm.parameters import ModelParameters
    from llmserve.cli.backends import BackendSettings, make_backends
    from llmserve.cli.pipelines import ENGINE_BACKEND
    from llmserve.serving.config.rollout_rules import PARAMETER as ROLLOUT
    from llmserve.serving.loading.loader import prepare
    from llmserve.serving.loading.repository import list_models, open_repository, read_model

    repositories = [open_repository(location) for location in settings.model_repositories]
    found: dict[Path, ModelParameters] = {}
    problems = []
    try:
        backends = make_backends(BackendSettings())
        for name in list_models(repositories).places:
            prepared = prepare(read_model(name, repositories, settings.config_name), backends, settings)
            config = prepared.config
            if config.HasField("sequence_batching"):
                problems.append(f"model '{name}' batches sequences, whose requests would reach different servers")
            if ROLLOUT in config.parameters:
                problems.append(f"model '{name}' has rules for rollouts, which belong to one server")
            if config.backend == ENGINE_BACKEND:
                version = prepared.source.path / prepared.versions[-1]
                parameters = ModelParameters.read(config, prepared.source.path, version)
                found[parameters.engine_dir] = parameters
    finally:
        for repository in repositories:
            repository.close()
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        problems.append(f"the models must use one engine, but they use {len(found)}: {names}")
    raise_problems(InvalidArgument, "--frontends", problems)
    return next(iter(found.values()))


def flags(options: ServeOptions) -> list[str]:
    """The command line for these options."""
    default = ServeOptions()
    return [
        text
        for each in fields(options)
        if each.name not in READ_ALREADY and getattr(options, each.name) != getattr(default, each.name)
        for text in _flag(each.name.replace("_", "-"), getattr(options, each.name))
    ] + ([str(options.engine.absolute())] if options.engine else [])


def _flag(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--no-{name}"
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flag(name, item)
    else:
        yield f"--{name}={value.value if isinstance(value, Enum) else value}"


@dataclass(slots=True, eq=False)
class FrontEnd:
    """A server's process, which may be restarted."""

    command: Sequence[str]
    secrets: Mapping[str, str] = field(repr=False)  # environment variables removed from this process
    process: asyncio.subprocess.Process | None = None
    metrics_port: int = 0  # 0: not ready

    async def start(self) -> list[str]:
        """Start it, and return its output until it is ready. Raises `Unavailable` with the output if it ends before."""
        # A separate session: the terminal's Ctrl-C is for this process, which forwards it once.
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **self.secrets},
            limit=MAX_LINE_BYTES,
        )
        assert self.process.stdout is not None
        said: list[str] = []
        while data := await self.process.stdout.readline():
            line = data.decode(errors="replace").rstrip("\n")
            if line.startswith(f"Started {METRICS} at "):
                self.metrics_port = int(line.rpartition(":")[2])
                return said
            said.append(line)
        code = await self.process.wait()
        raise Unavailable("\n".join([*said, f"a server has ended with exit code {code} before it was ready"]))

    async def ended(self) -> int:
        """Wait for its end and return the exit code. Its output is dropped, because every server prints the same."""
        if self.process is None:
            return 0
        assert self.process.stdout is not None
        while await self.process.stdout.read(65536):
            pass
        self.metrics_port = 0
        return await self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def scrape(self) -> str:
        """Its metrics; empty if it does not answer. Blocking."""
        if not self.metrics_port:
            return ""
        connection = http.client.HTTPConnection(LOOPBACK, self.metrics_port, timeout=SCRAPE_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException) as error:
            logger.warning("a server's metrics cannot be read: %s", error)
            return ""
        finally:
            connection.close()


class FrontEnds:
    """The process that starts and stops the servers."""

    def __init__(self, options: ServeOptions, engine: ModelParameters | None, secrets: Mapping[str, str]) -> None:
        """`secrets`: environment variables with keys and restrictions."""
        self._options = options
        self._engine = engine
        self._secrets = secrets
        self._front_ends: list[FrontEnd] = []
        self._signals = StopSignals()

    async def run(self) -> int:
        """Run until a signal. Returns the exit code: 0 after a drain, 1 if a server did not start or none is left."""
        with self._signals.installed():
            async with AsyncExitStack() as stack:
                try:
                    if not await unless(self._signals.drain, self._start(stack)):
                        return 0
                    return 0 if await self._keep() else 1
                except _NotStarted as error:
                    print(error, flush=True)
                    return 1
                finally:
                    await self._stop()

    async def _start(self, stack: AsyncExitStack) -> None:
        """Start everything until every server is ready. Raises `_NotStarted` if one fails, after all have tried."""
        held = HeldPorts(self._options)
        stack.callback(held.close)
        lines = await self._start_metrics(stack)
        options = held.options
        if self._engine is not None:
            engine = await in_daemon_thread(partial(_open_engine, self._engine), "llmserve-load-engine")
            stack.push_async_callback(asyncio.to_thread, engine.close)
            options = replace(options, engine_socket=engine.socket)
        command = [*SERVE, *flags(_of_one_server(options))]
        self._front_ends = [FrontEnd(command, self._secrets) for _ in range(options.frontends)]
        starts = await asyncio.gather(*(each.start() for each in self._front_ends), return_exceptions=True)
        said: list[list[str]] = []
        for start in starts:
            if isinstance(start, BaseException):
                raise _NotStarted(str(start)) from start
            said.append(start)
        print("\n".join([*said[0], *lines]), flush=True)

    async def _start_metrics(self, stack: AsyncExitStack) -> list[str]:
        """Start the port of all servers' metrics, and return the line that reports it."""
        from llmserve.cli.serve import listen_settings

        listen = listen_settings(self._options)
        if listen.metrics is None:
            return []
        host, port = listen.metrics.host, listen.metrics.port
        server = await serve(self._answer, host, port, flag="--metrics-port", tls=listen.metrics_tls)
        stack.push_async_callback(server.stop)
        return [started_line(METRICS, host, server.port, listen.metrics_tls)]

    async def _answer(self, request: Request) -> Answer:
        text = ""
        if request.path == "/metrics":
            scrapes = await asyncio.gather(*(asyncio.to_thread(each.scrape) for each in self._front_ends))
            text = added_up(scrapes)
        return WholeAnswer(text.encode(), content_type="text/plain; charset=utf-8")

    async def _keep(self) -> bool:
        """Restart each server that ends, until a signal (True) or until none is left (False)."""
        keepers = [asyncio.create_task(self._keep_one(each)) for each in self._front_ends]
        drain = asyncio.create_task(self._signals.drain.wait())
        all_gone = asyncio.gather(*keepers, return_exceptions=True)
        either: list[asyncio.Future[Any]] = [drain, all_gone]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return drain.done()
        finally:
            for task in (drain, *keepers):
                task.cancel()
            await asyncio.gather(drain, all_gone, return_exceptions=True)

    async def _keep_one(self, front_end: FrontEnd) -> None:
        rule, since = RestartRule(), time.monotonic()
        while True:
            code = await front_end.ended()
            pause_s = rule.next_pause_s(time.monotonic() - since)
            if pause_s is None:
                logger.error("a server has ended %d times in a row; the others continue without it", rule.most)
                return
            logger.error("a server has ended with exit code %d, and its connections with it; it is started again", code)
            await asyncio.sleep(pause_s)
            since = time.monotonic()
            try:
                await front_end.start()
            except Unavailable as error:
                logger.error("%s", error)

    async def _stop(self) -> None:
        """Stop all servers. A second signal stops them at once."""
        for each in self._front_ends:
            each.stop()
        ends = asyncio.gather(*(each.ended() for each in self._front_ends))
        hurry = asyncio.create_task(self._signals.hurry.wait())
        either: list[asyncio.Future[Any]] = [ends, hurry]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if hurry.done():
            for each in self._front_ends:
                each.stop()
        hurry.cancel()
        await ends


def _open_engine(parameters: ModelParameters) -> ProcessEngine:
    from llmserve.cli.backends import ENGINE_PROCESS

    return ProcessEngine(ENGINE_PROCESS, parameters.engine_dir, parameters.tokenizer_dir, parameters.engine)


class HeldPorts:
    """The ports of HTTP and gRPC: free ones if the flag is 0, reserved until the servers have ended."""

    def __init__(self, options: ServeOptions) -> None:
        """Raises `Unavailable` if one is in use."""
        self._sockets: list[socket.socket] = []
        host = options.http_address or options.host
        ports: dict[str, Any] = {}
        try:
            if options.allow_http:
                ports["http_port"] = self._held(host, options.http_port, "--http-port")
            if options.allow_grpc:
                ports["grpc_port"] = self._held(options.grpc_address or options.host, options.grpc_port, "--grpc-port")
        except Unavailable:
            self.close()
            raise
        self.options = replace(options, reuse_http_port=True, reuse_grpc_port=True, **ports)

    def _held(self, host: str, port: int, flag: str) -> int:
        with claim_port(host, port, flag) as alone:  # no other process listens
            number = int(alone.getsockname()[1])
        self._sockets.append(hold_port(host, number, flag, shared=True))
        return number

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def _of_one_server(options: ServeOptions) -> ServeOptions:
    """Options of one server: metrics on loopback, no engine flags, no stored responses (other servers lack them)."""
    from llmserve.cli.serve import OF_THE_ENGINE

    of_engine: dict[str, Any] = dict.fromkeys(OF_THE_ENGINE) if options.cluster or options.engine_socket else {}
    return replace(
        options,
        frontends=1,
        allow_metrics=True,
        metrics_address=LOOPBACK,
        metrics_port=0,
        metrics_use_ssl=False,
        stored_responses=0,
        **of_engine,
    )
