"""The time of an engine's steps, as measured by `make bench`, in the format of Dynamo's simulator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GRID = 128  # points on each axis
PREFILL, BATCH = "prefill ", "batch "


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds per token of a prompt, and seconds of a step by its number of sequences."""

    prompt_token_s: float
    step_s: Mapping[int, float]

    @staticmethod
    def of_report(path: Path, shape: str, precision: str) -> StepCosts:
        """Reads a report of `make bench` (JSON). Raises `ValueError` with the rows it has if others are missing."""
        rows = [row for row in json.loads(path.read_text())["rows"] if row["engine"] == "llmserve"]
        speeds = {row["cell"]: float(row["tokens_per_s"]["median"]) for row in rows
                  if (row["shape"], row["precision"]) == (shape, precision)}  # fmt: skip
        steps = {int(cell.removeprefix(BATCH)): int(cell.removeprefix(BATCH)) / speed
                 for cell, speed in speeds.items() if cell.startswith(BATCH)}  # fmt: skip
        prefills = [1 / speed for cell, speed in speeds.items() if cell.startswith(PREFILL)]
        if not steps or not prefills:
            there = sorted({f"{row['shape']} {row['precision']}" for row in rows})
            raise ValueError(f"{path} has no speeds of {shape} {precision}; it has {', '.join(there) or 'none'}")
        return StepCosts(max(prefills), dict(sorted(steps.items())))

    def of_batch(self, num_sequences: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of a step. Beyond the largest measured batch, the time per sequence is constant."""
        sizes, seconds = np.array(list(self.step_s)), np.array(list(self.step_s.values()))
        found: NDArray[np.float64] = np.interp(num_sequences, sizes, seconds)
        found *= np.maximum(1, num_sequences / sizes[-1])
        return found

    def write(self, path: Path, max_batch_size: int, max_tokens: int) -> None:
        """Writes the tables that the simulator reads: a prompt's milliseconds, and a step's by the tokens of all its
        sequences and by their mean length. `max_tokens`: of one sequence."""
        prompts = np.linspace(1, max_tokens, GRID)
        lengths = np.geomspace(1, max_tokens, GRID)
        held = np.geomspace(1, max_batch_size * max_tokens, GRID)
        batches = np.clip(held[:, None] / lengths[None, :], 1, max_batch_size)
        np.savez(
            path,
            prefill_isl=prompts,
            prefill_ttft_ms=1e3 * self.prompt_token_s * prompts,
            decode_active_kv_tokens=held,
            decode_context_length=lengths,
            decode_itl=1e3 * self.of_batch(batches),
        )
