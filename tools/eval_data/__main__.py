"""See `tools.eval_data`."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from tools.demo_checkpoint.corpus import read_pairs
from tools.eval_data.choices import choice_rows
from tools.eval_data.definitions import definitions
from tools.eval_data.long_documents import long_rows
from tools.eval_data.mixed_lengths import mixed_rows
from tools.eval_data.signatures import signature_rows

PAIRS = Path(__file__).resolve().parents[2] / "eval" / "data" / "docstrings.jsonl"
NUM_LONG, NUM_SIGNATURES, NUM_MIXED = 32, 60, 50
app = typer.Typer(add_completion=False, help="Make a data file of the suites in eval/.")
Output = Annotated[Path, typer.Argument(help="The .jsonl file to write.")]


@app.command()
def choices(output: Output, seed: int = 0) -> None:
    """Docstrings with four summaries each."""
    write(output, choice_rows(read_pairs(PAIRS), seed))


@app.command()
def mixed_lengths(output: Output, count: int = NUM_MIXED) -> None:
    """The first docstrings, with long documents among them."""
    write(output, mixed_rows(read_pairs(PAIRS), count))


@app.command()
def long_documents(output: Output, count: int = NUM_LONG, seed: int = 0) -> None:
    """References of standard modules, with a question about one entry."""
    write(output, long_rows(list(definitions(Path(sysconfig.get_path("stdlib")))), count, seed))


@app.command()
def signatures(output: Output, count: int = NUM_SIGNATURES, seed: int = 0) -> None:
    """Signatures of standard functions, and what they say as JSON."""
    write(output, signature_rows(definitions(Path(sysconfig.get_path("stdlib"))), count, seed))


def write(output: Path, rows: Iterable[dict[str, object]]) -> None:
    output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    app()
