"""Builds a trained network from a GGUF file in three precisions, chats with each, and reports what each one costs.

It reports size, speed, loss compared with float16, and summaries compared with those of transformers in float32.

Run it through `make demo-smollm2`, which fetches the file. Each step prints its command first; the script stops at the
first one that fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.demo import LLMSERVE, announce, llmserve
from tools.smollm2 import CHECKPOINT, ENGINES, PRECISIONS, ROOT
from tools.smollm2.loss import loss, next_token_logits
from tools.smollm2.speed import NEW_TOKENS, PROMPT_TOKENS, measure

QUESTION = "What is the capital of France?"
SUITE = "eval/suites/docstrings-chat.yaml"
Facts = Mapping[str, str]  # column -> value for one engine


def build_and_chat(checkpoint: Path, precision: str, engine: Path) -> None:
    flags = PRECISIONS[precision]
    place = str(engine.relative_to(ROOT))
    llmserve(f"Build it in {precision}", "build", str(checkpoint.relative_to(ROOT)), *flags, "--output-dir", place)
    chat = ("run", place, "--chat", "--input-text", QUESTION, "--max-output-len", "40")
    llmserve(f"Ask it, in {precision}", *chat)


def summarize(checkpoint: Path, precision: str, engine: Path) -> Path:
    """Runs `llmserve eval` and returns its report. Continues if the engine fails the gate, which the table shows."""
    report = Path("eval-results") / f"{engine.name}-docstrings-chat.json"
    (ROOT / report).unlink(missing_ok=True)
    arguments = ["eval", str(engine.relative_to(ROOT)), "--hf-model-dir", str(checkpoint.relative_to(ROOT))]
    arguments += ["--suite", SUITE, "--output", str(report)]
    title = f"Summarize docstrings in {precision}, beside transformers in float32"
    announce(title, arguments)
    code = subprocess.run([LLMSERVE, *arguments], cwd=ROOT, check=False).returncode
    if not (ROOT / report).is_file():
        sys.exit(f"demo: '{title}' failed with exit code {code}")
    return ROOT / report


def facts_of(engine: Path, baseline: Path, report: Path) -> Facts:
    """Returns a row of the table. `baseline`: the engine of the same checkpoint to compare the loss with; `report`: of
    `llmserve eval`."""
    return size(engine) | speed(engine) | loss_of(engine, baseline) | verdict_of(report)


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


def verdict_of(report: Path) -> dict[str, str]:
    content = json.loads(report.read_text())
    rouge = content["metrics"]["rougeL"]
    return {
        f"ROUGE-L of {content['suite']['num_samples']} (float32)": f"{rouge['engine']:.1f} ({rouge['baseline']:.1f})",
        "gate": content["verdict"],
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
    engines = {precision: ENGINES / f"smollm2-135m-instruct-{precision}" for precision in PRECISIONS}
    for precision, engine in engines.items():
        build_and_chat(CHECKPOINT, precision, engine)
    reports = {precision: summarize(CHECKPOINT, precision, engine) for precision, engine in engines.items()}
    base = engines["float16"]
    print_table({precision: facts_of(engine, base, reports[precision]) for precision, engine in engines.items()})
    print(f"Done in {time.monotonic() - started:.0f} s. Next: llmserve serve {engines['float16'].relative_to(ROOT)}")


if __name__ == "__main__":
    main()
