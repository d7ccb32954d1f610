"""`llmserve eval`: compares an engine with the Hugging Face baseline, and decides whether it may be released.

Exit codes: 0: it may; 1: it is worse than the suite allows (or, if the suite requires it, the samples are
inconclusive); 2: invalid input.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from llmserve.cli.client_options import ApiKeyOption, RootCertificatesOption
from llmserve.cli.dataclass_command import DataclassCommand, argument, option
from llmserve.cli.eval_summarize import SummarizeFlags
from llmserve.cli.output_file import check_writable
from llmserve.cli.termination import terminated_as_exception
from llmserve.errors import InvalidArgument, raise_problems

if TYPE_CHECKING:
    from llmserve.evaluation.run import EvalOptions

RESULTS = Path("eval-results")
PARTIAL = ".partial.jsonl"  # next to a report: the answers so far
SERVE = (sys.executable, "-m", "llmserve.cli.owned_server")


@dataclass(frozen=True, kw_only=True)
class EvalFlags(SummarizeFlags):
    engine: Path | None = argument(None, "Engine directory.")
    suite: Path = option(..., "Suite file, such as eval/suites/docstrings.yaml.")
    hf_model_dir: Path | None = option(None, "Checkpoint of the engine: a folder, or FILE.gguf.")
    lora: Path | None = option(None, "LoRA adapter (PEFT) that is merged into that checkpoint.")
    adapter: Path | None = option(None, "Evaluate the engine with this adapter directory; the record is added to it.")
    baseline: Path | None = option(None, "Compare with this engine instead of the checkpoint; adds no record.")
    url: str = option("", "Evaluate a running server: HOST:PORT (gRPC); grpcs:// for TLS.")
    num_samples: int | None = option(None, "Number of samples, from the first.", show_default="the suite's")
    dtype: str = option(
        "",
        "Dtype of the baseline: float16 | bfloat16 | float32.",
        show_default="the engine's; float32 where numbers are expanded",
    )
    refresh_baseline: bool = option(False, "Compute the baseline again (torch).", "--refresh-baseline")
    baseline_batch_size: int = option(1, "Prompts per batch when the baseline is computed.")
    concurrency: int = option(8, "Requests in flight.")
    threads: int = option(0, "Engine threads; 0: every core.")
    api_key: ApiKeyOption = ""
    root_certificates: RootCertificatesOption = None
    as_served: bool = option(
        True, "Also test some samples through real servers: alone and under load, over gRPC and /v1."
    )
    served_samples: int = option(32, "Number of samples to test as served.")
    http_url: str = option("", "http://HOST:PORT of the server at --url, to test /v1, too.")
    previous: Path | None = option(
        None, "Engine directory whose last record is the reference for speed.", show_default="ENGINE"
    )
    record: bool = option(True, "Add the verdict to the engine's records, for llmserve serve --require-gate.")
    sign_key: Path | None = option(None, "Private key (PEM, Ed25519) that signs the record.")
    output: Path | None = option(
        None,
        "Report file (JSON); an HTML page is written next to it.",
        show_default="eval-results/ENGINE-SUITE.json (--url: server-)",
    )
    plan: bool = option(False, "Only print how many samples the suite's margins need.", "--plan")
    earlier: Path | None = option(None, "A report of the suite, for --plan.", show_default="the stored baseline")

    @property
    def has_record(self) -> bool:
        return self.engine is not None and not self.url and self.baseline is None and self.record

    def problems(self) -> list[str]:
        found = []
        if self.sign_key is not None and not self.has_record:
            found.append("--sign-key signs a record; with --url, --baseline or --no-record there is none: leave it out")
        if self.output is not None and self.output.suffix == ".html":
            found.append(f"--output names the JSON report, and the page beside it ends in .html: not {self.output}")
        if self.earlier is not None and not self.plan:
            found.append("--earlier is used only with --plan; leave it out")
        if self.max_ite and self.num_samples:
            found.append("--max-ite and --num-samples mean the same; give one of them")
        return found

    def options(self) -> EvalOptions:
        # imported here: the other commands need neither gRPC nor the statistics
        from llmserve.client import Access
        from llmserve.evaluation.run import EvalOptions
        from llmserve.evaluation.served.run import ServedOptions

        served = ServedOptions(SERVE, self.served_samples, self.http_url, self.previous, self.threads)
        return EvalOptions(
            self.suite,
            self.hf_model_dir,
            self.baseline,
            self.engine,
            self.url,
            self.max_ite * (self.batch_size or 1) if self.max_ite else self.num_samples,
            self.dtype,
            refresh_baseline=self.refresh_baseline,
            baseline_batch_size=self.baseline_batch_size,
            concurrency=self.batch_size or self.concurrency,
            threads=self.threads,
            access=Access(self.api_key, self.root_certificates),
            served=served if self.as_served else None,
            lora=self.lora,
            adapter=self.adapter,
        )


def evaluate(flags: EvalFlags) -> None:
    """Compare an engine with the Hugging Face baseline: metrics, evidence from its answers, latency, and a verdict.

    `llmserve eval bless SUITE` makes the margins, prompt and data of a suite count."""
    raise_problems(InvalidArgument, "eval", flags.problems())
    if flags.plan:
        _print_plan(flags)
        return
    raise typer.Exit(0 if _judged(flags) else 1)


def _print_plan(flags: EvalFlags) -> None:
    from llmserve.evaluation.plan import plan
    from llmserve.evaluation.reporting.table import render_plan

    Console(highlight=False).print(render_plan(plan(flags.options(), flags.earlier)))


def _judged(flags: EvalFlags) -> bool:
    """Evaluate, and write table, report, page and record. Returns whether the engine passed."""
    from llmserve.evaluation.reporting.html_report import save_html
    from llmserve.evaluation.reporting.record import add_record
    from llmserve.evaluation.reporting.table import render
    from llmserve.evaluation.run import evaluate as run_suite
    from llmserve.evaluation.suite import load_suite
    from llmserve.sealed_log import Signer

    if flags.output is not None and flags.output.parent.is_dir():  # else it is created
        check_writable(flags.output)
    signer = Signer.load(flags.sign_key) if flags.sign_key is not None else None
    judged = (flags.adapter or flags.engine).resolve().name if flags.engine and not flags.url else "server"
    suite = load_suite(flags.suite)
    path = flags.output or RESULTS / f"{judged}-{suite.name}.json"
    partial = path.with_suffix(PARTIAL) if flags.engine and not flags.url else None
    with terminated_as_exception(), _ProgressBars() as bars:
        report = run_suite(replace(flags.options(), kept_answers=partial), bars)
    report.save(path)
    if partial is not None:
        partial.unlink(missing_ok=True)
    page = path.with_suffix(".html")
    save_html(report, page)
    Console(highlight=False).print(render(report))
    typer.echo(f"report: {path}, and as a page {page.name}")
    if flags.has_record and flags.engine is not None:
        made = add_record(flags.engine, flags.suite, report, path, signer=signer, adapter=flags.adapter)
        typer.echo(f"record: {made}")
    lines, is_above = flags.summary(report, suite)
    typer.echo("\n".join(lines), nl=bool(lines))
    return report.passed and is_above


class _ProgressBars:
    """A bar per phase on standard error; implements the evaluation's `Watcher`."""

    def __init__(self) -> None:
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), *times)
        self._progress = Progress(*columns, console=Console(stderr=True))

    def __enter__(self) -> _ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def phase(self, name: str, total: int) -> Callable[[int], None]:
        task = self._progress.add_task(name, total=total)
        return lambda count: self._progress.advance(task, count)


command = DataclassCommand(EvalFlags, evaluate)
