"""`llmserve verify ANSWER.json`: verifies that an engine produced an answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.errors import InvalidArgument, LlmserveError

if TYPE_CHECKING:
    from llmserve.evaluation.verify import Claim

ENGINES = Path("engines")


def command(
    answer: Annotated[
        Path,
        typer.Argument(help="A server's answer to a request with return_receipt, as JSON.", show_default=False),
    ],
    engine: Annotated[
        Path | None,
        typer.Option(help="Engine directory.", show_default="the one in engines/ that the receipt is of"),
    ] = None,
    adapter: Annotated[
        list[Path] | None,
        typer.Option(help="Adapter directory that an answer is of; may be repeated.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0: every core that this process may use.")] = 0,
) -> None:
    """Compute served answers again from their receipts, and verify that this engine produced them.

    Exit code 0: it did; 1: it did not, or this machine cannot tell."""
    # imported here: the other commands need no guides
    from llmserve.evaluation.verify import Standing, read_claims, verify

    claims = read_claims(answer)
    findings = verify(claims, engine or _engine_of(claims), threads=threads, adapters=adapter or ())
    for finding in findings:
        typer.echo(str(finding))
    raise typer.Exit(0 if all(finding.standing is Standing.SAID for finding in findings) else 1)


def _engine_of(claims: list[Claim]) -> Path:
    digests = {claim.receipt.engine["digest"] for claim in claims}
    if len(digests) > 1:
        raise InvalidArgument(f"these answers are of {len(digests)} engines; give one with --engine")
    for path in sorted(ENGINES.glob("*/")):
        try:
            if EngineDirectory.open(path).manifest.engine_digest in digests:
                return path
        except LlmserveError:
            continue  # not an engine, or damaged
    stamp = claims[0].receipt.engine
    raise InvalidArgument(
        f"no engine in {ENGINES}/ has the digest {stamp['digest'][:12]} ({stamp['name']}); give its directory with "
        "--engine"
    )
