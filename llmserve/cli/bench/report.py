"""The output of `llmserve bench` for a load, and for a sweep over loads."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.benchmark.plot import Panel, Series, bars, svg
from llmserve.benchmark.summary import Distribution, Objective, Summary
from llmserve.cli.bench.plan import BenchPlan

ROWS = {
    "time_to_first_token": "time to first token, ms",
    "inter_token_latency": "inter-token latency, ms",
    "inter_chunk_latency": "inter-chunk latency, ms",
    "request_latency": "request latency, ms",
    "output_token_throughput_per_user": "tokens/s of a user",
    "input_sequence_length": "tokens of the prompt",
    "cached_prompt_tokens": "of them in the cache",
    "output_sequence_length": "tokens of the answer",
}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
NAME_WIDTH, WIDTH = 24, 9
FEW = 100  # with fewer answers, the 99th percentile is nearly the slowest one
AXES = {"rate": "requests a second", "concurrency": "users"}


def report(name: str, summary: Summary, objectives: Sequence[Objective]) -> str:
    lines = [name.ljust(NAME_WIDTH) + "".join(column.rjust(WIDTH) for column in COLUMNS)]
    for metric, words in ROWS.items():
        if (found := summary.distributions.get(metric)) is not None and not (
            metric == "cached_prompt_tokens" and not found.high
        ):
            lines.append(words.ljust(NAME_WIDTH) + "".join(_number(value).rjust(WIDTH) for value in _values(found)))
    lines.append(
        f"throughput: {_number(summary.per_second(summary.output_tokens))} tokens/s, "
        f"{_number(summary.per_second(summary.answered))} requests/s "
        f"({summary.answered} answered in {summary.duration_s:.2f} s)"
    )
    if summary.good is not None:
        share = summary.good / (summary.answered + summary.failed) if summary.answered + summary.failed else 0.0
        lines.append(
            f"goodput: {_number(summary.per_second(summary.good))} requests/s, {share:.1%} of all, "
            f"within {', '.join(map(str, objectives))}"
        )
    return "\n".join([*lines, *_remarks(summary)])


def _remarks(summary: Summary) -> list[str]:
    lines = []
    for kind, count in summary.errors.items():
        said = summary.messages[kind]
        lines.append(f"failed: {count} x {kind}" + (f" ({said})" if said else ""))
    if summary.cut:
        lines.append(f"not counted: {summary.cut} unfinished when time was up")
    if summary.lateness is not None:
        late = summary.lateness
        lines.append(f"sent late by {late.mean:.2f} ms (mean), {late.percentiles[99]:.2f} (p99), {late.high:.2f} (max)")
    if summary.answered and not summary.is_counted:
        lines.append("note: the server does not count tokens; pieces of text are counted instead")
    if 0 < summary.answered < FEW:
        lines.append(f"note: the 99th percentile of {summary.answered} answers is nearly the slowest of them")
    if bottleneck := summary.bottleneck():
        lines.append(f"warning: the client was the bottleneck: {bottleneck}")
    return lines


def sweep_report(plan: BenchPlan, summaries: Sequence[Summary]) -> str:
    """A row for each point, and bars of the main results."""
    names = [plan.swept, "answered", "failed", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"]
    names += ["goodput/s"] if plan.objectives else []
    lines = ["", "".join(name.rjust(max(WIDTH, len(name)) + 2) for name in names)]
    points = [f"{point:g}" for point in plan.points[: len(summaries)]]
    for point, summary in zip(points, summaries, strict=True):
        cells = [point, str(summary.answered), str(summary.failed), _number(_tokens_per_second(summary))]
        cells += [
            _optional(_percentile(summary, metric, percent))
            for metric in ("time_to_first_token", "inter_token_latency")
            for percent in (50, 99)
        ]
        cells += [_number(summary.per_second(summary.good))] if summary.good is not None else []
        lines.append("".join(cell.rjust(max(WIDTH, len(name)) + 2) for cell, name in zip(cells, names, strict=True)))
    speeds = [_tokens_per_second(summary) for summary in summaries]
    firsts = [_percentile(summary, "time_to_first_token", 99) for summary in summaries]
    drawn = [bars(f"tokens/s by {plan.swept}", points, speeds), bars("TTFT p99, ms", points, firsts)]
    return "\n".join([*lines, "", *drawn])


def drawn_sweep(plan: BenchPlan, summaries: Sequence[Summary]) -> str:
    """A sweep as SVG: throughput, both latencies, and goodput if there are objectives."""

    def latency(title: str, metric: str) -> Panel:
        series = [
            Series(f"p{percent}", [_percentile(summary, metric, percent) for summary in summaries])
            for percent in (50, 99)
        ]
        return Panel(title, series)

    throughput = Panel("Tokens a second", [Series("", [_tokens_per_second(summary) for summary in summaries])])
    panels = [
        throughput,
        latency("Time to first token, ms", "time_to_first_token"),
        latency("Inter-token latency, ms", "inter_token_latency"),
    ]
    if plan.objectives:
        goods = [summary.per_second(summary.good or 0) for summary in summaries]
        panels.append(Panel("Goodput, requests a second", [Series("", goods)]))
    return svg(panels, plan.points[: len(summaries)], AXES[plan.swept])


def _tokens_per_second(summary: Summary) -> float:
    return summary.per_second(summary.output_tokens)


def _percentile(summary: Summary, metric: str, percent: int) -> float | None:
    found = summary.distributions.get(metric)
    return None if found is None else found.percentiles[percent]


def _values(found: Distribution) -> list[float]:
    percentiles = [found.percentiles[percent] for percent in (50, 90, 95, 99)]
    return [found.mean, *percentiles, found.high]


def _optional(value: float | None) -> str:
    return "-" if value is None else _number(value)


def _number(value: float) -> str:
    """At least three digits, including all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
