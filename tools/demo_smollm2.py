"""A trained network from a GGUF file: build it in three precisions, chat with each, and say what each one costs.

Run it through `make demo-smollm2`, which fetches the file. Each step prints its command first; the script stops at the
first one that fails.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.demo import llmserve
from tools.smollm2 import ENGINES, PRECISIONS, ROOT
from tools.smollm2.loss import loss, next_token_logits
from tools.smollm2.source import gguf_file
from tools.smollm2.speed import NEW_TOKENS, PROMPT_TOKENS, measure

QUESTION = "What is the capital of France?"
Facts = Mapping[str, str]  # column -> what it says of one engine


def build_and_chat(checkpoint: Path, precision: str, engine: Path) -> None:
    flags = PRECISIONS[precision]
    place = str(engine.relative_to(ROOT))
    llmserve(f"Build it in {precision}", "build", str(checkpoint.relative_to(ROOT)), *flags, "--output-dir", place)
    chat = ("run", place, "--chat", "--input-text", QUESTION, "--max-output-len", "40")
    llmserve(f"Ask it, in {precision}", *chat)


def facts_of(engine: Path, baseline: Path) -> Facts:
    """A row of the table. `baseline`: the engine of the same checkpoint that the loss is counted from."""
    return size(engine) | speed(engine) | loss_of(engine, baseline)


def size(engine: Path) -> dict[str, str]:
    return {"engine file": f"{(engine / 'rank0.engine').stat().st_size / 1e6:.0f} MB"}


def speed(engine: Path) -> dict[str, str]:
    found = measure(engine)
    return {
        f"prompt of {PROMPT_TOKENS} tokens": f"{found.prompt:.0f} tokens/s",
        f"answer of {NEW_TOKENS}": f"{found.answer:.0f} tokens/s",
    }


def loss_of(engine: Path, baseline: Path) -> dict[str, str]:
    found = loss(next_token_logits(baseline), next_token_logits(engine))
    return {
        f"KL from {baseline.name.rpartition('-')[2]}": f"{found.divergence:.4f} nats",
        "same best token": f"{found.agreement:.1%} of {found.num_positions}",
    }


def print_table(rows: Mapping[str, Facts]) -> None:
    table = Table(title="SmolLM2-135M-Instruct on this machine, one sequence at a time")
    table.add_column("precision")
    for column in next(iter(rows.values())):
        table.add_column(column, justify="right")
    for precision, facts in rows.items():
        table.add_row(precision, *facts.values())
    Console().print(table)


def main() -> None:
    started = time.monotonic()
    checkpoint = gguf_file()
    engines = {precision: ENGINES / f"smollm2-135m-instruct-{precision}" for precision in PRECISIONS}
    for precision, engine in engines.items():
        build_and_chat(checkpoint, precision, engine)
    print_table({precision: facts_of(engine, engines["float16"]) for precision, engine in engines.items()})
    print(f"Done in {time.monotonic() - started:.0f} s. Next: llmserve serve {engines['float16'].relative_to(ROOT)}")


if __name__ == "__main__":
    main()
