"""Checks that a sequence has bitwise identical logits in any batch, however its tokens are divided into chunks.

    python -m tools.gpu_check.law ENGINE REPORT

It uses this machine's first GPU. docs/cuda.md, "Determinism", explains why this must hold.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.base import Runner
from llmserve.engine.cuda.bindings import NvidiaDevice
from llmserve.engine.cuda.layout import read_header
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.scheduler.plan import Chunk, StepPlan

NUM_TOKENS = 100  # of a sequence
FIRST_TOKEN = 3


def measure(runner: Runner) -> list[dict[str, Any]]:
    """A row for each way to compute a sequence: how many rows of logits differ from those of a single chunk alone."""
    most, num_tokens = runner.info.max_batch_size, NUM_TOKENS
    cases = {
        "chunks of 7": ((*range(0, num_tokens, 7), num_tokens), 1),
        "token by token": (range(num_tokens + 1), 1),
        "with 5 others": ((0, num_tokens), 6),
        "chunks of 9 with 7 others": ((*range(0, num_tokens, 9), num_tokens), 8),
        "token by token, half a batch": (range(num_tokens + 1), max(1, most // 2)),
        "token by token, a full batch": (range(num_tokens + 1), most),
    }
    law = _Law(runner, num_tokens)
    alone = law.logits((0, num_tokens), 1)
    rows = []
    for name, (cuts, company) in cases.items():
        rows.append(_compared(name, law.logits(cuts, company), alone))
    if runner.info.num_states > 1:
        rows.append(_compared("from a state that was kept", law.logits_from_kept(num_tokens // 2), alone))
    return rows


def _compared(case: str, found: NDArray[np.float32], alone: NDArray[np.float32]) -> dict[str, Any]:
    """`found` may have only the last tokens."""
    wanted = alone[len(alone) - len(found) :]
    differ = int((found.view(np.int32) != wanted.view(np.int32)).any(axis=1).sum())
    return {
        "case": case, "rows": len(found), "differ": differ,
        "largest": float(np.abs(found - wanted).max()), "of": float(np.abs(wanted).max()),
    }  # fmt: skip


class _Law:
    def __init__(self, runner: Runner, num_tokens: int) -> None:
        info = runner.info
        self._runner = runner
        self._blocks = -(-num_tokens // info.block_size)  # of a sequence
        rng = np.random.default_rng(0)
        self._prompts = rng.integers(FIRST_TOKEN, info.vocab_size, (info.max_batch_size, num_tokens)).tolist()

    def logits(self, cuts: Sequence[int], company: int) -> NDArray[np.float32]:
        """Logits of the first of `company` sequences, all divided into the same chunks."""
        return np.concatenate(list(self._pieces(cuts, min(company, self._runner.info.max_batch_size))))

    def _pieces(self, cuts: Sequence[int], company: int) -> Iterator[NDArray[np.float32]]:
        for begin, end in pairwise(cuts):
            number = max(1, min(company, self._runner.info.max_num_tokens // (end - begin)))
            chunks = tuple(
                Chunk(s, self._prompts[s][begin:end], begin,
                      list(range(s * self._blocks, (s + 1) * self._blocks)), return_logits=s == 0, states=(s, s))
                for s in range(number)
            )  # fmt: skip
            yield np.array(self._runner.step(StepPlan(chunks)).logits[0])

    def logits_from_kept(self, place: int) -> NDArray[np.float32]:
        """Logits of the tokens from `place` on, after a state that was kept within a chunk."""
        ids, blocks = self._prompts[0], list(range(self._blocks))
        self._runner.step(StepPlan((Chunk(0, ids, 0, blocks, states=(0, 0), kept_state=(1, place)),)))
        rest = Chunk(0, ids[place:], place, blocks, return_logits=True, states=(1, 0))
        return np.array(self._runner.step(StepPlan((rest,))).logits[0])


def num_blocks(engine_file: Path) -> int:
    """Blocks that `measure` needs."""
    header = read_header(engine_file)
    return header.max_batch_size * -(-NUM_TOKENS // header.block_size)


def main(directory: str, report: str) -> None:
    path = EngineDirectory.open(Path(directory)).engine_file
    runner = CudaRunner(path, NvidiaDevice(), num_blocks=num_blocks(path))
    try:
        rows = measure(runner)
    finally:
        runner.close()
    Path(report).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
