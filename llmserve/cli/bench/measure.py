"""Runs `llmserve bench`: one load after the other, each reported when it is over."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from llmserve import __version__
from llmserve.benchmark.calibration import asked_writer, counted_writer
from llmserve.benchmark.http_client import Server, parse_server
from llmserve.benchmark.load import Load, run_load
from llmserve.benchmark.openai_endpoint import OpenAiEndpoint, only_model, refusal, unreachable
from llmserve.benchmark.records import Endpoint, LoadRequest, Record
from llmserve.benchmark.summary import Summary, summarize
from llmserve.benchmark.workload import Given, Synthetic, Writer
from llmserve.cli.bench.options import BenchOptions, Protocol
from llmserve.cli.bench.plan import BenchPlan, plan_of
from llmserve.cli.bench.report import drawn_sweep, report, sweep_report
from llmserve.cli.output_file import check_writable, write_file
from llmserve.errors import LlmserveError, Unavailable

HTTP_URL, GRPC_URL = "localhost:8000", "localhost:8001"
SECRET = ("api_key",)  # options that are left out of reports


class Target(NamedTuple):
    endpoint: Endpoint
    name: str  # for people
    failure: Callable[[Record], LlmserveError]  # the command's error for a failed request


def measure_and_report(options: BenchOptions) -> None:
    """Raises `LlmserveError` if nothing could be measured."""
    plan = plan_of(options)
    for path in filter(None, (options.json, options.plot)):
        check_writable(path)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        summaries = runner.run(_measure(options, plan))
    if len(plan.loads) > 1:
        typer.echo(sweep_report(plan, summaries))
    if options.json is not None:
        write_file(options.json, json.dumps(_document(options, plan, summaries), indent=2) + "\n")
    if options.plot is not None:
        write_file(options.plot, drawn_sweep(plan, summaries))
    if summaries[-1].was_given_up:
        raise Unavailable("the server is gone: many requests in a row could not connect")
    if not any(summary.answered for summary in summaries):
        raise LlmserveError("no request has been answered")


async def _measure(options: BenchOptions, plan: BenchPlan) -> list[Summary]:
    """Summaries of all loads that were started. Each is printed when it is over."""
    target = await _target(options, plan)
    try:
        generator = np.random.default_rng(options.seed)
        requests = (await _workload(options, plan, target)).requests(generator)
        typer.echo(f"{target.name}; {_described(options, plan)}")
        await _warm_up(options.warmup, target, requests, plan.loads[0])
        summaries = []
        for load, point in zip(plan.loads, plan.points, strict=True):
            with _Progress(f"{plan.swept} {point:g}", load) as progress:
                run = await run_load(target.endpoint, _prepared(requests, load), load, progress.told)
            summaries.append(summarize(run, plan.objectives))
            typer.echo(f"\n{report(f'{plan.swept} {point:g}', summaries[-1], plan.objectives)}")
            if run.was_given_up or run.was_interrupted:
                break
        return summaries
    finally:
        await target.endpoint.close()


async def _target(options: BenchOptions, plan: BenchPlan) -> Target:
    """Raises `LlmserveError` if no server answers, or it is not the expected one."""
    if options.protocol is Protocol.GRPC:
        return await _grpc_target(options, plan)
    server = parse_server(options.url or HTTP_URL, options.root_certificates)
    model = options.model or await only_model(server, options.api_key)
    is_chat = options.protocol is Protocol.CHAT
    endpoint = OpenAiEndpoint(
        server, model, options.api_key, is_chat=is_chat, ignores_end=options.ignore_eos, more=plan.extra
    )
    return Target(endpoint, f"{model} at {server.host_header}", lambda record: _http_failure(server, record))


def _http_failure(server: Server, record: Record) -> LlmserveError:
    if record.is_unreachable:
        return unreachable(server, record.message)
    return refusal(server, record.error, record.message)


async def _grpc_target(options: BenchOptions, plan: BenchPlan) -> Target:
    # loads over HTTP need no gRPC
    from llmserve.benchmark.grpc_endpoint import GrpcEndpoint
    from llmserve.cli.chat.prompts import more_inputs
    from llmserve.client import Access, AsyncClient

    access = Access(options.api_key, options.root_certificates)
    client = AsyncClient(options.url or GRPC_URL, model=options.model or "ensemble", access=access)
    try:
        config = await client.config()
        without_end = {"end_id": -1} if options.ignore_eos and any(one.name == "end_id" for one in config.input) else {}
        parameters = {**more_inputs(config, without_end), **plan.extra}
    except BaseException:
        await client.close()
        raise

    def failure(record: Record) -> LlmserveError:
        return LlmserveError(f"{client.url} answers {record.error}: {record.message}")

    return Target(GrpcEndpoint(client, parameters), f"{client.model} at {client.url} (gRPC)", failure)


async def _workload(options: BenchOptions, plan: BenchPlan, target: Target) -> Given | Synthetic:
    if plan.prompts:
        return Given(plan.prompts, plan.output_tokens)
    writer = await _writer(options.tokenizer_dir, target)
    return Synthetic(writer, plan.input_tokens, plan.output_tokens, options.prefix_tokens, options.num_prefixes)


async def _writer(tokenizer_dir: Path | None, target: Target) -> Writer:
    if tokenizer_dir is not None:
        from llmserve.stages.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(tokenizer_dir)
        return counted_writer(lambda text: len(tokenizer.encode(text)))
    found = await asked_writer(target.endpoint)
    if found.failed is not None:
        raise target.failure(found.failed)
    if found.note:
        typer.echo(f"note: {found.note}", err=True)
    return found.writer


async def _warm_up(count: int, target: Target, requests: Iterator[LoadRequest], load: Load) -> None:
    """Send `count` requests, at most as many at a time as in the measurement."""
    if not count:
        return
    users = min(count, load.concurrency or count)
    run = await run_load(target.endpoint, requests, Load(users, num_requests=count, timeout_s=load.timeout_s))
    failed = [record for record in run.records if record.error]
    if failed and len(failed) == len(run.records):
        raise target.failure(failed[0])


def _prepared(requests: Iterator[LoadRequest], load: Load) -> Iterator[LoadRequest]:
    """Create the requests before the clock starts, if their number is known."""
    if load.num_requests is None:
        return requests
    return iter([next(requests) for _ in range(load.num_requests)])


def _described(options: BenchOptions, plan: BenchPlan) -> str:
    load = plan.loads[0]
    amount = f"{load.num_requests} requests" if load.num_requests else f"{load.duration_s:g} s"
    shape = f"{options.arrivals} arrivals" if load.rate is not None else "a closed loop"
    prompts = f"prompts of {options.prompts}" if options.prompts else f"prompts of {options.input_tokens} tokens"
    prefix = f" behind {options.prefix_tokens} shared ones" if options.prefix_tokens else ""
    return f"{options.protocol.value}, {shape}, {amount}; {prompts}{prefix}, answers of {options.output_tokens}"


def _document(options: BenchOptions, plan: BenchPlan, summaries: list[Summary]) -> dict[str, Any]:
    given = {each.name: getattr(options, each.name) for each in fields(options) if each.name not in SECRET}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    runs = [{plan.swept: point, **summary.document()} for point, summary in zip(plan.points, summaries, strict=False)]
    return {"llmserve": __version__, "settings": settings, "runs": runs}


class _Progress:
    """A bar on standard error, if that is a terminal."""

    def __init__(self, name: str, load: Load) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        rate = TextColumn("{task.fields[tokens]:,} tokens")
        self._bar = Progress(
            *columns, rate, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
            refresh_per_second=4,
        )  # fmt: skip
        self._task = self._bar.add_task(name, total=load.num_requests, tokens=0)
        self._tokens = 0

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def told(self, record: Record) -> None:
        self._tokens += 0 if record.error else record.num_tokens
        self._bar.update(self._task, advance=1, tokens=self._tokens)
