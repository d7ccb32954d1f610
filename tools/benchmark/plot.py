"""Plots a JSON report: `python -m tools.benchmark.plot REPORT.json PLOT.svg`, in an environment with matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot  # after the backend is chosen

COLORS = {"llmserve": "#c23b22", "OpenVINO GenAI": "#2a6f97", "llama.cpp": "#6a994e", "transformers": "#8d8d8d"}


def draw(report: dict[str, Any], path: Path) -> None:
    """One panel per network and bits per weight; bars are medians, whiskers the lowest and the highest value."""
    shapes = list(dict.fromkeys(row["shape"] for row in report["rows"]))
    bits = sorted({row["bits"] for row in report["rows"]}, reverse=True)
    figure, panels = pyplot.subplots(
        len(shapes), len(bits), figsize=(5 * len(bits), 3.6 * len(shapes)), squeeze=False, layout="constrained"
    )
    for line, shape in zip(panels, shapes, strict=True):
        for panel, width in zip(line, bits, strict=True):
            _draw_panel(panel, [r for r in report["rows"] if (r["shape"], r["bits"]) == (shape, width)])
            panel.set_title(f"{shape}, {width} bits per weight")
            panel.set_ylabel("tokens/s")
    figure.suptitle(report["machine"])
    mpl.rcParams["svg.hashsalt"] = "llmserve"  # makes the file depend only on the report
    figure.savefig(path, metadata={"Date": None})


def _draw_panel(panel: Any, rows: list[dict[str, Any]]) -> None:
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    names = list(dict.fromkeys((row["engine"], row["precision"]) for row in rows))
    width = 0.8 / max(1, len(names))
    for number, (engine, precision) in enumerate(names):
        chosen = [row for row in rows if (row["engine"], row["precision"]) == (engine, precision)]
        rates = [row["tokens_per_s"] for row in chosen]
        errors = [[r["median"] - r["low"] for r in rates], [r["high"] - r["median"] for r in rates]]
        panel.bar(
            [cells.index(row["cell"]) + (number - (len(names) - 1) / 2) * width for row in chosen],
            [r["median"] for r in rates],
            width,
            yerr=errors,
            label=f"{engine} {precision}",
            color=COLORS.get(engine),
            alpha=1.0 if precision != "bfloat16" else 0.6,
        )
    panel.set_xticks(range(len(cells)), cells)
    if names:
        panel.legend(fontsize="small")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
