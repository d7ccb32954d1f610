"""The speed of our CUDA engines with networks of random numbers, compared with the GPU's measured limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tools.benchmark.cells import Cell
from tools.benchmark.job import Job
from tools.benchmark.ours import INT8_CACHE
from tools.gpu_check.steps import Details

CELLS = (
    *(Cell("prefill", 1, length, 1) for length in (512, 2048)),
    *(Cell("decode", batch, 32, 64) for batch in (1, 4, 16, 64, 256)),
)
PEER_PRECISION = "float16"
LAYERS, WHOLE = "7b-layers", "7b"  # a few layers, and their network
LAYER_PRECISIONS = ("float16", "int8", "int4")
NETWORKS, PRECISIONS = ("0.4b", "1.1b", "7b"), ("float16", "bfloat16", "int8", "int4", f"float16+{INT8_CACHE}")


def measured(
    lines: Sequence[Mapping[str, Any]], job: Job, copied_per_s: float, products_per_s: Mapping[str, float]
) -> Details:
    """Returns a worker's results, a row for each cell. For a prompt, the bound is the GPU's rate of products in this
    precision; for a step, its rate of copies, for reading weights and caches. 0, or missing: not known."""
    (opened,) = (line for line in lines if line["kind"] == "opened")
    seconds: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "sample":
            seconds[line["cell"]].append(line["seconds"] / line["tokens"])
    rows = []
    for cell in job.cells:
        per_token = median(seconds[cell.name])
        step = per_token * (cell.prompt_tokens if cell.phase == "prefill" else 1) * cell.batch
        limit = products_per_s.get(job.precision.partition("+")[0], 0.0)
        work = float(job.shape.head_products * cell.batch)
        if cell.phase == "prefill":
            work += job.shape.layer_products * cell.batch * cell.prompt_tokens
        else:
            limit = copied_per_s
            work = opened["weight_bytes"] + cell.batch * cell.mean_context * opened["kv_bytes_per_token"]
        rows.append({
            "cell": cell.name, "tokens_per_s": 1 / per_token, "step_ms": 1e3 * step,
            "of_the_bound": work / limit / step if limit else None,
        })  # fmt: skip
    return {"open_seconds": opened["seconds"], "versions": opened["versions"], "rows": rows}


def beside(ours: Details, peer: Details) -> Details:
    """Adds to each of our rows its speed relative to the peer's row for the same cell."""
    theirs = {row["cell"]: row["tokens_per_s"] for row in peer["rows"]}
    return {**ours, "rows": [{**row, "of_the_peer": row["tokens_per_s"] / theirs[row["cell"]]} for row in ours["rows"]]}
