"""`llmserve eval`: compare an engine with the Hugging Face baseline, and say whether it may be released.

Exit codes: 0 it may; 1 it is worse than the suite allows (or the samples cannot tell, where the suite says so); 2 the
input was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from llmserve.cli.client_options import ApiKeyOption, RootCertificatesOption
from llmserve.cli.termination import terminated_as_exception
from llmserve.errors import InvalidArgument

if TYPE_CHECKING:
    from llmserve.evaluation.run import EvalOptions

RESULTS = Path("eval-results")


def command(
    *,
    engine: Annotated[Path | None, typer.Argument(help="Engine directory.", show_default=False)] = None,
    hf_model_dir: Annotated[
        Path, typer.Option(help="The checkpoint that the engine was built from: a folder, or FILE.gguf.")
    ],
    suite: Annotated[Path, typer.Option(help="Suite file, such as eval/suites/docstrings.yaml.")],
    url: Annotated[
        str, typer.Option(help="HOST:PORT (gRPC) of a running server, judged instead; grpcs:// for TLS.")
    ] = "",
    num_samples: Annotated[int | None, typer.Option(help="Only the first so many.", show_default="the suite's")] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of the baseline: float16 | bfloat16 | float32.",
            show_default="the engine's; float32 where numbers are expanded",
        ),
    ] = "",
    refresh_baseline: Annotated[
        bool, typer.Option("--refresh-baseline", help="Compute the baseline again (torch).")
    ] = False,
    baseline_batch_size: Annotated[int, typer.Option(help="Prompts at a time when it is computed.")] = 1,
    concurrency: Annotated[int, typer.Option(help="Requests in flight at the engine.")] = 8,
    threads: Annotated[int, typer.Option(help="Of the engine in this process; 0: every core.")] = 0,
    api_key: ApiKeyOption = "",
    root_certificates: RootCertificatesOption = None,
    record: Annotated[
        bool, typer.Option(help="Add the verdict to the engine's records, which llmserve serve --require-gate reads.")
    ] = True,
    sign_key: Annotated[
        Path | None, typer.Option(help="Private key (PEM, Ed25519) that signs the record.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Report file.", show_default="eval-results/ENGINE-SUITE.json (--url: server-)")
    ] = None,
) -> None:
    """Compare an engine with the Hugging Face baseline: ROUGE, evidence from its answers, latency, and a verdict.

    `llmserve eval bless SUITE` makes the margins of a suite count."""
    # imported here: the other commands need neither gRPC nor the statistics
    from llmserve.client import Access
    from llmserve.evaluation.run import EvalOptions

    has_record = engine is not None and not url and record
    if sign_key is not None and not has_record:
        raise InvalidArgument("--sign-key signs a record; with --url or --no-record there is none: leave it out")
    options = EvalOptions(
        hf_model_dir,
        suite,
        engine,
        url,
        num_samples,
        dtype,
        refresh_baseline=refresh_baseline,
        baseline_batch_size=baseline_batch_size,
        concurrency=concurrency,
        threads=threads,
        access=Access(api_key, root_certificates),
    )
    raise typer.Exit(0 if _judged(options, output, sign_key, has_record=has_record) else 1)


def _judged(options: EvalOptions, output: Path | None, sign_key: Path | None, *, has_record: bool) -> bool:
    """Evaluate, and leave table, report and record; whether the engine passed."""
    from llmserve.evaluation.record import add_record
    from llmserve.evaluation.run import evaluate
    from llmserve.evaluation.table import render
    from llmserve.sealed_log import Signer

    signer = Signer.load(sign_key) if sign_key is not None else None
    with terminated_as_exception(), _ProgressBars() as bars:
        report = evaluate(options, bars)
    judged = options.engine.resolve().name if options.engine and not options.url else "server"
    path = output or RESULTS / f"{judged}-{report.suite}.json"
    report.save(path)
    Console(highlight=False).print(render(report))
    typer.echo(f"report: {path}")
    if has_record and options.engine is not None:
        typer.echo(f"record: {add_record(options.engine, options.suite, report, path, signer=signer)}")
    return report.passed


class _ProgressBars:
    """A bar per phase on standard error; implements the evaluation's `Watcher`."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))

    def __enter__(self) -> _ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def phase(self, name: str, total: int) -> Callable[[int], None]:
        task = self._progress.add_task(name, total=total)
        return lambda count: self._progress.advance(task, count)
