"""A report for people: one table with both sides, and the verdict as text."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmserve.engine.directory.identity import told_apart
from llmserve.evaluation.answers import Performance
from llmserve.evaluation.choices import CHOICE_METRICS
from llmserve.evaluation.judging.evidence import Loss
from llmserve.evaluation.judging.gate import GateResult, LossResult, MetricResult, Verdict
from llmserve.evaluation.judging.power import POWER, Flips
from llmserve.evaluation.judging.text_metrics import TEXT_METRICS
from llmserve.evaluation.plan import Plan
from llmserve.evaluation.reporting.report import Report
from llmserve.evaluation.served.table import STYLES, served_notes, served_tables

NAMES = {name: metric.title for name, metric in TEXT_METRICS.items()} | {name: name for name in CHOICE_METRICS}
LOSS_NAMES = {
    Loss.KL: "KL, nat", Loss.KL_P99: "KL p99", Loss.TOP1: "other best, %", Loss.PERPLEXITY: "perplexity, %",
    Loss.FLIP: "flip, nat",
}  # fmt: skip
PLAIN_NAMES = NAMES | {loss.value: name.partition(",")[0] for loss, name in LOSS_NAMES.items()}  # without units


def render(report: Report) -> RenderableType:
    table = Table(title=f"{report.suite}: {len(report.samples)} samples", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in (baseline_name(report), "engine", "difference", "95 % interval", "margin"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("verdict", justify="right", no_wrap=True, min_width=max(len(verdict.value) for verdict in Verdict))
    for metric in report.gate.metrics:
        table.add_row(*_metric_row(metric))
    table.add_section()
    for row in _performance_rows(report):
        table.add_row(*row, "", "", "")
    losses = [_loss_table(report)] if report.gate.losses else []
    return Group(table, *losses, *served_tables(report.served), *map(Text, _notes(report)), _verdict(report))


def render_plan(plan: Plan) -> RenderableType:
    title = f"{plan.suite}: {plan.num_samples} samples"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("margin", "spread", "detectable", "samples needed"):
        table.add_column(heading, justify="right")
    for each in plan.margins:
        numbers = (f"{number:.3g}" for number in (each.margin, each.deviation, each.detectable))
        table.add_row(PLAIN_NAMES[each.name], *numbers, "no number" if each.needed is None else f"{each.needed:,}")
    few = ", ".join(PLAIN_NAMES[each.name] for each in plan.too_few)
    verdict = f"too few for {few}" if few else f"enough for every margin, at {100 * POWER:.0f} % power"
    return Group(table, Text(f"spread: {plan.source}"), Text(verdict, "bold yellow" if few else "bold green"))


def _loss_table(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("engine", "95 % interval", "at most"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", justify="right", no_wrap=True)
    for result in report.gate.losses:
        table.add_row(*_loss_row(result, is_known=not isinstance(report.evidence, str)))
    return table


def _metric_row(metric: MetricResult) -> tuple[str | Text, ...]:
    difference = metric.difference
    return (
        metric_name(metric),
        f"{metric.baseline:.2f}",
        f"{metric.engine:.2f}",
        f"{difference.mean:+.2f}",
        f"{difference.low:+.2f} to {difference.high:+.2f}",
        f"{metric.margin:g}" if metric.margin is not None else "",
        Text(metric.verdict.value, STYLES[metric.verdict]) if metric.is_judged else "",
    )


def metric_name(result: MetricResult) -> str:
    return NAMES[result.metric]


def loss_name(result: LossResult) -> str:
    return LOSS_NAMES[result.loss]


def _name(result: MetricResult | LossResult) -> str:
    return PLAIN_NAMES[result.metric if isinstance(result, MetricResult) else result.loss.value]


def _names(gate: GateResult) -> list[str]:
    """Names of the judged results."""
    measured: list[MetricResult | LossResult] = [*gate.metrics, *gate.losses]
    groups = dict.fromkeys(result.group for result in gate.others if result.is_judged)
    return [*(_name(result) for result in measured if result.is_judged), *groups]


def _loss_row(result: LossResult, *, is_known: bool) -> tuple[str | Text, ...]:
    interval = result.interval
    return (
        loss_name(result),
        f"{interval.mean:.2g}" if is_known else "?",
        f"{interval.low:.2g} to {interval.high:.2g}" if interval.high > interval.low else "",
        f"{result.margin:.3g}" if result.margin is not None else "",
        Text(result.verdict.value, STYLES[result.verdict]) if result.is_judged else "",
    )


def _performance_rows(report: Report) -> list[tuple[str, str, str, str]]:
    baseline, engine = report.baseline.performance, report.engine.performance
    rows = [
        (f"{name} ms", 1000 * getattr(baseline, name), 1000 * getattr(engine, name)) for name in ("mean", "p50", "p95")
    ]
    rows.append(("tokens/s", baseline.tokens_per_second, engine.tokens_per_second))
    if not report.may_compare_times:
        return [(name, "", f"{of_engine:,.0f}", "") for name, _, of_engine in rows]
    return [(name, f"{b:,.0f}", f"{e:,.0f}", f"{100 * (e / b - 1):+,.0f} %" if b else "") for name, b, e in rows]


def drafts_note(performance: Performance) -> str:
    """Empty if no tokens were drafted."""
    accepted, drafted = performance.num_accepted, performance.num_drafted
    return f"{accepted:,} of {drafted:,} drafted tokens accepted" if drafted else ""


def _notes(report: Report) -> list[str]:
    parity, baseline, engine = report.parity, report.baseline.facts, report.engine.facts
    notes = [
        f"{baseline_name(report)}: {_which(baseline)}{baseline['dtype']}, {_in_flight(baseline)}, {baseline['source']}",
        f"engine: {engine['name']}{_served_engine(engine)}, {_in_flight(engine)}",
        *filter(None, [drafts_note(report.engine.performance)]),
        *_source_notes(baseline, engine),
        *_kept_notes(engine, len(report.samples)),
        f"same answer: {parity.num_equal} of {parity.num_samples} ({100 * parity.exact_match_rate:.1f} %)",
    ]
    if isinstance(report.evidence, str):
        notes.append(f"no evidence from the baseline's own answers: {report.evidence}")
    else:
        notes.append(f"evidence: {report.evidence.num_positions:,} positions of the baseline's own answers")
        notes += [f"sound rounding costs: {engine['rounding']}"] if "rounding" in engine else []
    return [*notes, *served_notes(report.served), *_flip_notes(report), _detectable_note(report)]


def _flip_notes(report: Report) -> list[str]:
    return [flip_note(metric, metric.flips) for metric in report.gate.metrics if metric.flips]


def flip_note(metric: MetricResult, flips: Flips) -> str:
    return (
        f"{metric_name(metric)}: right answers lost {flips.lost}, gained {flips.gained} "
        f"(McNemar's p {flips.p_value:.2g})"
    )


def _detectable_note(report: Report) -> str:
    """The losses that these samples can detect at all."""
    found = [f"{NAMES[metric.metric]} {metric.detectable:.2g}" for metric in report.gate.metrics]
    found += [
        f"{_name(result)} {result.detectable:.2g}" for result in report.gate.losses if result.detectable is not None
    ]
    return f"detectable losses ({100 * POWER:.0f} % power): {', '.join(found)}"


def _served_engine(engine: Mapping[str, str]) -> str:
    """What a server reports about its engine."""
    if "url" not in engine:
        return ""
    if "engine_digest" not in engine:
        return " (it does not report its engine; its losses are judged as those of an unquantized engine)"
    return f" (digest {engine['engine_digest'][:12]}, {engine['dtype']})"


def baseline_name(report: Report) -> str:
    return "baseline" if "engine_digest" in report.baseline.facts else "HF"


def _which(baseline: Mapping[str, str]) -> str:
    return f"{baseline['name']}, " if "engine_digest" in baseline else ""


def _source_notes(baseline: Mapping[str, str], engine: Mapping[str, str]) -> list[str]:
    """A warning if the engine is known to come from another checkpoint than the baseline."""
    expected, actual = baseline.get("checkpoint_digest", ""), engine.get("checkpoint_digest", "")
    if not expected or not actual or expected == actual or "adapter_digest" in engine:  # whose source was compared
        return []
    actual, expected = told_apart(actual, expected)
    return [
        f"note: the engine was built from another checkpoint ({actual}) than the baseline's "
        f"({expected}); rebuild it from that checkpoint unless this is intended"
    ]


def _kept_notes(engine: Mapping[str, str], num_samples: int) -> list[str]:
    if not (kept := engine.get("kept_answers")):
        return []
    return [f"{kept} of {num_samples} answers come from before an interruption; times cover the rest"]


def _in_flight(facts: Mapping[str, str]) -> str:
    count = facts["in_flight"]
    return f"{count} request{'' if count == '1' else 's'} in flight"


def _verdict(report: Report) -> Text:
    verdict = report.gate.verdict
    word = "PASS" if report.passed else "FAIL"
    if verdict is Verdict.PASS:
        names = ", ".join(_names(report.gate))
        return Text(f"{word}: the engine loses no more than the suite allows ({names})", "bold green")
    if verdict is Verdict.INCONCLUSIVE:
        word += " (inconclusive)"
    return Text(f"{word}: {'; '.join(report.gate.reasons)}", f"bold {STYLES[verdict]}")
