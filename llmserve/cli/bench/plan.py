"""Converts the options of `llmserve bench` to a plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from llmserve.benchmark.arrivals import Arrivals, parse_arrivals
from llmserve.benchmark.lengths import Lengths, parse_lengths
from llmserve.benchmark.load import Load
from llmserve.benchmark.records import Prompt
from llmserve.benchmark.summary import Objective, parse_objectives
from llmserve.benchmark.workload import read_prompts
from llmserve.cli.bench.options import DEFAULT_CONCURRENCY, DEFAULT_REQUESTS, BenchOptions
from llmserve.errors import InvalidArgument, LlmserveError, raise_problems

MAX_POINTS = 100
Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The requested measurement, already valid."""

    loads: Sequence[Load]  # more than one: a sweep
    input_tokens: Lengths
    output_tokens: Lengths
    prompts: Sequence[tuple[Prompt, int | None]]  # empty: they are generated
    objectives: Sequence[Objective]
    extra: Mapping[str, Any]

    @property
    def points(self) -> list[float]:
        return [load.rate or load.concurrency or 0 for load in self.loads]

    @property
    def swept(self) -> str:
        return "concurrency" if self.loads[0].rate is None else "rate"


def plan_of(options: BenchOptions) -> BenchPlan:
    """Raises `InvalidArgument` with all problems."""
    problems: list[str] = []

    def parsed(flag: str, parse: Callable[[], Parsed], otherwise: Parsed) -> Parsed:
        try:
            return parse()
        except LlmserveError as error:
            text = str(error)
            problems.append(text if text.startswith("--") else f"{flag}: {text}")
            return otherwise

    input_tokens: Lengths = parsed("--input-tokens", lambda: parse_lengths(options.input_tokens), parse_lengths("1"))
    output_tokens: Lengths = parsed("--output-tokens", lambda: parse_lengths(options.output_tokens), parse_lengths("1"))
    process: Arrivals = parsed("--arrivals", lambda: parse_arrivals(options.arrivals), parse_arrivals("poisson"))
    rates: list[float] = parsed("--rate", lambda: _numbers(options.rate), [])
    users: list[int] = parsed("--concurrency", lambda: _counts(options.concurrency or DEFAULT_CONCURRENCY), [])
    prompts: Sequence[tuple[Prompt, int | None]] = parsed(
        "--prompts", lambda: read_prompts(options.prompts) if options.prompts else [], []
    )
    objectives: list[Objective] = parsed("--slo", lambda: parse_objectives(options.slo or ()), [])
    extra: dict[str, Any] = parsed("--extra", lambda: _object(options.extra), {})
    problems += _contradictions(options)
    raise_problems(InvalidArgument, "this cannot be measured", problems)
    num_requests = options.requests or (None if options.duration else DEFAULT_REQUESTS)

    def load(users: int | None, rate: float | None) -> Load:
        return Load(users, rate, process, num_requests, options.duration, options.grace, options.timeout, options.seed)

    loads = [load(None, rate) for rate in rates] or [load(count, None) for count in users]
    return BenchPlan(loads, input_tokens, output_tokens, prompts, objectives, extra)


def _contradictions(options: BenchOptions) -> list[str]:
    found = []
    if options.rate and options.concurrency:
        found.append("--rate and --concurrency exclude each other; give one of them")
    if options.arrivals != "poisson" and not options.rate:
        found.append("--arrivals requires --rate")
    if options.requests is not None and options.duration is not None:
        found.append("--requests and --duration: give one of them")
    if options.duration is not None and not options.duration > 0:
        found.append(f"--duration {options.duration:g}: expected more than 0 seconds")
    if not options.timeout > 0:
        found.append(f"--timeout {options.timeout:g}: expected more than 0 seconds")
    if options.prompts and (options.prefix_tokens or options.tokenizer_dir):
        found.append("--prompts are sent unchanged: leave out --prefix-tokens and --tokenizer-dir")
    if options.plot and "," not in (options.rate or options.concurrency):
        found.append("--plot requires a sweep: several numbers in --rate or --concurrency")
    return found


def _numbers(text: str) -> list[float]:
    """Numbers of a comma-separated list. Raises `InvalidArgument`."""
    try:
        found = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0.0]
    if not all(0 < number <= 1e6 for number in found) or len(found) > MAX_POINTS:
        raise InvalidArgument(f"{text!r} is not a number above 0 or a list of such numbers (1,2,4)")
    return found


def _counts(text: str) -> list[int]:
    numbers = _numbers(text)
    if not all(number.is_integer() for number in numbers):
        raise InvalidArgument(f"{text!r}: expected whole numbers")
    return [int(number) for number in numbers]


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidArgument(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{text!r} is not a JSON object")
    return found
