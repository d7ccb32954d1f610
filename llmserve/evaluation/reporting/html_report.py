"""An HTML report: one page without external files, with verdicts, plots, and the answers that changed most."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from llmserve.evaluation.judging.gate import MetricResult
from llmserve.evaluation.judging.power import POWER
from llmserve.evaluation.judging.statistics import Interval
from llmserve.evaluation.reporting.report import Report, write_report
from llmserve.evaluation.reporting.table import (
    baseline_name,
    drafts_note,
    flip_note,
    loss_name,
    metric_name,
)
from llmserve.evaluation.served.table import speed_rows

WIDTH, HEIGHT = 160, 24  # width of an interval's plot
PLOT_WIDTH, PLOT_HEIGHT, NUM_COLUMNS = 400, 150, 24
NUM_MOVED = 20
MAX_COMPARED = 4000  # characters of an answer that are compared word by word
WORDS = re.compile(r"\s+|\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    baseline: str
    engine: str
    difference: str
    interval: str
    plot: Markup
    margin: str
    detectable: str  # minimum detectable loss
    verdict: str


def save_html(report: Report, path: Path) -> None:
    write_report(path, render_html(report))


def render_html(report: Report) -> str:
    return str(
        _template().render(
            report=report,
            verdict=report.gate.verdict.value,
            baseline_name=baseline_name(report),
            rows=list(_rows(report)),
            power=f"{100 * POWER:.0f} %",
            flips=list(_flips(report)),
            plots=list(_plots(report)),
            speeds=_speeds(report),
            served_speeds=[[str(cell) for cell in row] for row in speed_rows(report.served)],
            moved=list(_moved(report)),
            about=_about(report),
        )
    )


@cache
def _template() -> Any:
    from jinja2 import Environment

    source = files("llmserve.evaluation.reporting").joinpath("templates/report.html").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=False).from_string(source)


def _rows(report: Report) -> Iterator[_Row]:
    for metric in report.gate.metrics:
        difference = metric.difference
        yield _Row(
            metric_name(metric), f"{metric.baseline:.2f}", f"{metric.engine:.2f}", f"{difference.mean:+.2f}",
            f"{difference.low:+.2f} to {difference.high:+.2f}",
            _interval(difference, None if metric.margin is None else -metric.margin),
            "" if metric.margin is None else f"{metric.margin:g}", f"{metric.detectable:.2g}",
            metric.verdict.value if metric.is_judged else "",
        )  # fmt: skip
    for loss in report.gate.losses if not isinstance(report.evidence, str) else ():
        found = loss.interval
        yield _Row(
            loss_name(loss), "", f"{found.mean:.2g}", "", f"{found.low:.2g} to {found.high:.2g}",
            _interval(found, loss.margin), "" if loss.margin is None else f"{loss.margin:.3g}",
            "" if loss.detectable is None else f"{loss.detectable:.2g}",
            loss.verdict.value if loss.is_judged else "",
        )  # fmt: skip


def _flips(report: Report) -> Iterator[tuple[str, Mapping[str, list[str]]]]:
    """For each metric that is right or wrong: a summary, and the samples that only one side has right."""
    for metric in report.gate.metrics:
        if metric.flips:
            moved = list(zip(report.samples, _differences(report, metric), strict=True))
            yield (
                flip_note(metric, metric.flips),
                {
                    "lost": [sample.id for sample, difference in moved if difference < 0],
                    "gained": [sample.id for sample, difference in moved if difference > 0],
                },
            )


def _interval(interval: Interval, limit: float | None) -> Markup:
    """A line from low to high with the mean on it; the area beyond the limit is shaded. A floor is a lower limit."""
    reach = max(abs(value) for value in (interval.low, interval.high, 1.5 * (limit or 0.0))) or 1.0

    def x(value: float) -> float:
        return WIDTH / 2 * (1 + value / reach / 1.05)

    parts = [f'<line class="axis" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="2" y2="{HEIGHT - 2}"/>']
    if limit is not None:
        begin, end = (0.0, x(limit)) if limit < 0 else (x(limit), float(WIDTH))
        parts.append(
            f'<rect class="zone" x="{begin:.1f}" width="{max(0.0, end - begin):.1f}" y="0" height="{HEIGHT}"/>'
        )
        parts.append(f'<line class="limit" x1="{x(limit):.1f}" x2="{x(limit):.1f}" y1="2" y2="{HEIGHT - 2}"/>')
    middle = HEIGHT / 2
    parts.append(
        f'<line class="range" x1="{x(interval.low):.1f}" x2="{x(interval.high):.1f}" y1="{middle}" y2="{middle}"/>'
    )
    parts.append(f'<circle class="point" cx="{x(interval.mean):.1f}" cy="{middle}" r="3.5"/>')
    return _svg(WIDTH, HEIGHT, parts)


def _plots(report: Report) -> Iterator[Markup]:
    metric = _leading(report)
    if metric is not None:
        yield _histogram(_differences(report, metric), f"{metric_name(metric)}, engine minus baseline")
    if not isinstance(report.evidence, str):
        values = np.log10(np.maximum(np.array(report.evidence.by_sample()), 1e-9))
        yield _histogram(values, "KL, log10 of nats")


def _histogram(values: NDArray[np.float64], title: str) -> Markup:
    counts, edges = np.histogram(values, bins=NUM_COLUMNS)
    top, step = max(int(counts.max()), 1), PLOT_WIDTH / NUM_COLUMNS
    room = PLOT_HEIGHT - 40
    parts = [f'<text x="0" y="12">{escape(title)}</text>']
    for place, count in enumerate(counts.tolist()):
        tall = room * count / top
        parts.append(
            f'<rect class="column" x="{place * step + 1:.1f}" width="{step - 2:.1f}" y="{PLOT_HEIGHT - 20 - tall:.1f}" '
            f'height="{tall:.1f}"><title>{count}</title></rect>'
        )
    base = PLOT_HEIGHT - 20
    parts.append(f'<line class="axis" x1="0" x2="{PLOT_WIDTH}" y1="{base}" y2="{base}"/>')
    parts.append(f'<text x="0" y="{PLOT_HEIGHT - 4}">{edges[0]:.3g}</text>')
    parts.append(f'<text x="{PLOT_WIDTH}" y="{PLOT_HEIGHT - 4}" text-anchor="end">{edges[-1]:.3g}</text>')
    return _svg(PLOT_WIDTH, PLOT_HEIGHT, parts)


def _svg(width: int, height: int, parts: Sequence[str]) -> Markup:
    return Markup(f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{"".join(parts)}</svg>')


def _leading(report: Report) -> MetricResult | None:
    """The metric whose samples are shown: the first one that is judged."""
    metrics = report.gate.metrics
    return next((metric for metric in metrics if metric.is_judged), metrics[0] if metrics else None)


def _differences(report: Report, metric: MetricResult) -> NDArray[np.float64]:
    baseline, engine = (scores[metric.metric] for scores in report.scores)
    return np.asarray(engine - baseline, np.float64)


def _moved(report: Report) -> Iterator[dict[str, Any]]:
    """Answers that differ, sorted by the distance of distributions, or else of scores."""
    metric = _leading(report)
    differences = _differences(report, metric) if metric is not None else np.zeros(len(report.samples))
    kl = None if isinstance(report.evidence, str) else report.evidence.by_sample()
    pairs = list(zip(report.baseline.answers, report.engine.answers, strict=True))
    different = [index for index, (one, other) in enumerate(pairs) if one.text != other.text]
    different.sort(key=lambda index: (-kl[index] if kl else -abs(differences[index]), index))
    for index in different[:NUM_MOVED]:
        sample, (one, other) = report.samples[index], pairs[index]
        told = [f"{metric_name(metric)} {differences[index]:+.1f}"] if metric is not None else []
        told += [f"KL {kl[index]:.2g}"] if kl else []
        left, right = (one.text, other.text) if sample.choices else _compared(one.text, other.text)
        yield {
            "id": sample.id, "told": ", ".join(told), "baseline": left, "engine": right, "reference": sample.reference,
            "prompt": _prompt_text(sample.prompt),
        }  # fmt: skip


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.role}: {message.content}" for message in prompt)


def _compared(one: str, other: str) -> tuple[Markup, Markup]:
    """Both texts, with words marked that only one of them has."""
    if max(len(one), len(other)) > MAX_COMPARED:
        return escape(one), escape(other)
    left, right = WORDS.findall(one), WORDS.findall(other)
    sides = (Markup(), Markup())
    for tag, i, j, k, m in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        gone, new = escape("".join(left[i:j])), escape("".join(right[k:m]))
        if tag == "equal":
            sides = (sides[0] + gone, sides[1] + new)
        else:
            sides = (
                sides[0] + (Markup("<del>{}</del>").format(gone) if gone else ""),
                sides[1] + (Markup("<ins>{}</ins>").format(new) if new else ""),
            )
    return sides


def _speeds(report: Report) -> list[tuple[str, str, str]]:
    sides = report.baseline.performance, report.engine.performance
    rows = [
        (f"{name} ms", *(f"{1000 * getattr(side, name):,.0f}" for side in sides)) for name in ("mean", "p50", "p95")
    ]
    rows.append(("tokens/s", *(f"{side.tokens_per_second:,.0f}" for side in sides)))
    told = [(name, first if report.may_compare_times else "", second) for name, first, second in rows]
    note = drafts_note(report.engine.performance)
    return [*told, *([("speculation", "", note)] if note else ())]


def _about(report: Report) -> list[tuple[str, Mapping[str, Any]]]:
    suite = {name: value for name, value in report.suite_facts.items() if name != "rules"}
    return [
        ("suite", suite | {"rules": report.rules}),
        ("baseline", report.baseline.facts),
        ("engine", report.engine.facts),
        ("versions", report.versions),
    ]
