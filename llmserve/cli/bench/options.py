"""`llmserve bench`: load-tests a running server, and measures latencies, throughput and goodput."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from llmserve.benchmark.arrivals import FORMS as ARRIVALS
from llmserve.benchmark.lengths import FORMS as LENGTHS
from llmserve.cli.client_options import ApiKeyOption, RootCertificatesOption
from llmserve.cli.dataclass_command import DataclassCommand, option

server_option = partial(option, panel="Server")
load_option = partial(option, panel="Load")
request_option = partial(option, panel="Requests")
report_option = partial(option, panel="Report")
DEFAULT_CONCURRENCY, DEFAULT_REQUESTS = "1", 100


class Protocol(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    GRPC = "grpc"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    url: str = server_option(
        "",
        "The server: HOST:PORT, https://HOST:PORT; grpcs://HOST:PORT.",
        show_default="localhost:8000; for grpc localhost:8001",
    )
    protocol: Protocol = server_option(Protocol.CHAT, "/v1/chat/completions, /v1/completions, or Triton's gRPC.")
    model: str = server_option("", "Model name.", show_default="the only one; for grpc ensemble")
    api_key: ApiKeyOption = ""
    root_certificates: RootCertificatesOption = None
    concurrency: str = load_option(
        "",
        "Number of users; each sends a request when the previous one is answered. Several numbers (1,2,4) are a sweep.",
        show_default=DEFAULT_CONCURRENCY,
    )
    rate: str = load_option("", "Requests per second, instead of --concurrency; several numbers are a sweep.")
    arrivals: str = load_option("poisson", f"With --rate: {ARRIVALS}.")
    requests: int | None = load_option(None, "Number of requests.", show_default=str(DEFAULT_REQUESTS), min=1)
    duration: float | None = load_option(None, "Seconds in which requests start, instead of --requests.")
    grace: float = load_option(30, "With --duration: seconds for running requests to finish.", min=0)
    warmup: int = load_option(5, "Requests before the measurement.", min=0)
    timeout: float = load_option(600, "Seconds until a request fails.")
    input_tokens: str = request_option("128", f"Tokens of a prompt: {LENGTHS}.")
    output_tokens: str = request_option("64", "Tokens of an answer, in the same form.")
    prompts: Path | None = request_option(
        None, "File of prompts: one per line, or .jsonl with prompt or messages, and max_tokens."
    )
    prefix_tokens: int = request_option(0, "Tokens of a prefix that prompts share.", min=0)
    num_prefixes: int = request_option(1, "Number of different prefixes.", min=1)
    tokenizer_dir: Path | None = request_option(
        None,
        "Engine or checkpoint whose tokenizer makes prompts of exact lengths.",
        show_default="the server is asked how long words are",
    )
    ignore_eos: bool = request_option(True, "Make answers as long as --output-tokens.")
    extra: str = request_option("", "JSON object of more fields (for grpc: inputs) of each request.")
    seed: int = request_option(0, "Seed of all random choices.", min=0)
    slo: list[str] | None = report_option(
        None, "Limit for the goodput: ttft:200ms, itl:50ms or e2e:2s; may be repeated."
    )
    json: Path | None = report_option(None, "Write everything to a file.")
    plot: Path | None = report_option(None, "File for a plot of a sweep (SVG).")


def bench(options: BenchOptions) -> None:
    """Put load on a running server (OpenAI's API or Triton's gRPC) and measure it like NVIDIA's aiperf."""
    # the other commands need no event loop and no HTTP
    from llmserve.cli.bench.measure import measure_and_report

    measure_and_report(options)


command = DataclassCommand(BenchOptions, bench)
