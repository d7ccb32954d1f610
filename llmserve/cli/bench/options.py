"""`llmserve bench`: load for a running server, and how it stood it: latencies, throughput, goodput."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llmserve.benchmark.arrivals import FORMS as ARRIVALS
from llmserve.benchmark.lengths import FORMS as LENGTHS
from llmserve.cli.client_options import ApiKeyOption, RootCertificatesOption
from llmserve.cli.dataclass_command import DataclassCommand

SERVER, LOAD, REQUESTS, REPORT = "Server", "Load", "Requests", "Report"
DEFAULT_CONCURRENCY, DEFAULT_REQUESTS = "1", 100


class Protocol(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    GRPC = "grpc"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    url: Annotated[
        str,
        typer.Option(
            help="The server: HOST:PORT, https://HOST:PORT; grpcs://HOST:PORT.",
            show_default="localhost:8000; for grpc localhost:8001",
            rich_help_panel=SERVER,
        ),
    ] = ""
    protocol: Annotated[
        Protocol,
        typer.Option(help="/v1/chat/completions, /v1/completions, or Triton's gRPC.", rich_help_panel=SERVER),
    ] = Protocol.CHAT
    model: Annotated[
        str, typer.Option(help="Model name.", show_default="the only one; for grpc ensemble", rich_help_panel=SERVER)
    ] = ""
    api_key: ApiKeyOption = ""
    root_certificates: RootCertificatesOption = None
    concurrency: Annotated[
        str,
        typer.Option(
            help="Number of users; each asks again when answered. Several numbers (1,2,4) are a sweep.",
            show_default=DEFAULT_CONCURRENCY,
            rich_help_panel=LOAD,
        ),
    ] = ""
    rate: Annotated[
        str,
        typer.Option(
            help="Requests a second, instead of --concurrency; several numbers are a sweep.",
            show_default=False,
            rich_help_panel=LOAD,
        ),
    ] = ""
    arrivals: Annotated[str, typer.Option(help=f"With --rate: {ARRIVALS}.", rich_help_panel=LOAD)] = "poisson"
    requests: Annotated[
        int | None,
        typer.Option(help="Number of requests.", show_default=str(DEFAULT_REQUESTS), min=1, rich_help_panel=LOAD),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(
            help="Seconds in which requests start, instead of --requests.", show_default=False, rich_help_panel=LOAD
        ),
    ] = None
    grace: Annotated[
        float,
        typer.Option(help="With --duration: seconds that running requests then have.", min=0, rich_help_panel=LOAD),
    ] = 30
    warmup: Annotated[int, typer.Option(help="Requests before the measurement.", min=0, rich_help_panel=LOAD)] = 5
    timeout: Annotated[float, typer.Option(help="Seconds until a request fails.", rich_help_panel=LOAD)] = 600
    input_tokens: Annotated[str, typer.Option(help=f"Tokens of a prompt: {LENGTHS}.", rich_help_panel=REQUESTS)] = "128"
    output_tokens: Annotated[
        str, typer.Option(help="Tokens of an answer, in the same form.", rich_help_panel=REQUESTS)
    ] = "64"
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts: one per line, or .jsonl with prompt or messages, and max_tokens.",
            show_default=False,
            rich_help_panel=REQUESTS,
        ),
    ] = None
    prefix_tokens: Annotated[
        int, typer.Option(help="Tokens of a shared beginning of the prompts.", min=0, rich_help_panel=REQUESTS)
    ] = 0
    num_prefixes: Annotated[
        int, typer.Option(help="Number of different beginnings.", min=1, rich_help_panel=REQUESTS)
    ] = 1
    tokenizer_dir: Annotated[
        Path | None,
        typer.Option(
            help="Engine or checkpoint whose tokenizer makes prompts of exact lengths.",
            show_default="the server is asked how long words are",
            rich_help_panel=REQUESTS,
        ),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option(help="Make answers as long as --output-tokens.", rich_help_panel=REQUESTS)
    ] = True
    extra: Annotated[
        str,
        typer.Option(
            help="JSON object of more fields (for grpc: inputs) of each request.",
            show_default=False,
            rich_help_panel=REQUESTS,
        ),
    ] = ""
    seed: Annotated[int, typer.Option(help="Seed of all random choices.", min=0, rich_help_panel=REQUESTS)] = 0
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Limit for the goodput: ttft:200ms, itl:50ms or e2e:2s; may be repeated.", rich_help_panel=REPORT
        ),
    ] = None
    json: Annotated[
        Path | None, typer.Option(help="Write everything to a file.", show_default=False, rich_help_panel=REPORT)
    ] = None
    plot: Annotated[
        Path | None, typer.Option(help="File for a plot of a sweep (SVG).", show_default=False, rich_help_panel=REPORT)
    ] = None


def bench(options: BenchOptions) -> None:
    """Put load on a running server (OpenAI's API or Triton's gRPC) and measure it like NVIDIA's aiperf."""
    # the other commands need no event loop and no HTTP
    from llmserve.cli.bench.measure import measure_and_report

    measure_and_report(options)


command = DataclassCommand(BenchOptions, bench)
