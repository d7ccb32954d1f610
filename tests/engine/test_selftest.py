"""The self-test against a runner whose logits are known: row p of a sequence is a function of the token ids up to p."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.directory.selftest import SelfTest, blocks_needed, run_selftest
from llmserve.errors import EngineFileError
from llmserve.scheduler.plan import ChunkScores, StepPlan

VOCAB = 11
PROMPTS = ([3], [1, 2, 3, 4, 5], list(range(9)))


def logits_of(token_ids: list[int]) -> NDArray[np.float32]:
    sums = np.cumsum(token_ids)
    return np.sin(np.outer(sums + 1, np.arange(1, VOCAB + 1))).astype(np.float32)


def make_selftest(tolerance: float = 1e-4) -> SelfTest:
    logits = [logits_of(prompt) for prompt in PROMPTS]
    top_two = np.concatenate([np.sort(rows, axis=1)[:, -2:] for rows in logits])
    return SelfTest(
        token_ids=np.concatenate(PROMPTS).astype(np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in PROMPTS], np.int32),
        argmax=np.concatenate([rows.argmax(axis=1) for rows in logits]).astype(np.int32),
        margins=top_two[:, 1] - top_two[:, 0],
        logits=np.concatenate([rows[-2:] for rows in logits]),
        rows_per_prompt=np.array([1, 2, 2], np.int32),
        tolerance=np.array(tolerance, np.float32),
    )


class KnownRunner:
    """Remembers the tokens of each sequence, as a KV cache does, and adds `errors[position]` to the logits."""

    def __init__(self, errors: dict[int, float] | None = None) -> None:
        self.info = RunnerInfo(VOCAB, block_size=4, num_blocks=3, max_num_tokens=3, max_batch_size=1, max_seq_len=16)
        self.errors = errors or {}
        self.seen: dict[int, list[int]] = {}
        self.steps: list[tuple[int, int]] = []

    def step(self, plan: StepPlan) -> StepResult:
        (chunk,) = plan.chunks
        tokens = self.seen.setdefault(chunk.sequence_id, [])
        assert chunk.start == len(tokens)
        assert len(chunk.token_ids) <= self.info.max_num_tokens
        assert all(0 <= block < self.info.num_blocks for block in chunk.block_table)
        tokens.extend(chunk.token_ids)
        self.steps.append((chunk.start, len(chunk.token_ids)))
        rows = logits_of(tokens)
        for position, error in self.errors.items():
            rows[position : position + 1, 0] += error
        return StepResult([], [], {0: ChunkScores(logits=rows[chunk.start :])})

    def close(self) -> None:
        pass


def test_a_sound_runner_passes() -> None:
    result = run_selftest(KnownRunner(), make_selftest())
    assert result.passed
    assert (result.num_prompts, result.num_positions, result.max_error) == (3, 15, 0.0)
    assert "passed" in str(result)


def test_prompts_are_fed_in_chunks_and_then_token_by_token() -> None:
    runner = KnownRunner()
    run_selftest(runner, make_selftest())
    assert runner.steps[-5:] == [(0, 3), (3, 3), (6, 1), (7, 1), (8, 1)]


def test_an_error_in_the_logits_is_found() -> None:
    result = run_selftest(KnownRunner({8: 0.01}), make_selftest())
    assert not result.passed
    assert result.max_error == pytest.approx(0.01, rel=0.02)
    assert result.num_wrong_tokens == 0


def test_a_wrong_token_is_found_where_no_logits_are_stored() -> None:
    result = run_selftest(KnownRunner({5: 5.0, 6: 5.0}), make_selftest())
    assert not result.passed
    assert (result.max_error, result.num_wrong_tokens) == (0.0, 2)


def test_nan_fails() -> None:
    result = run_selftest(KnownRunner({4: float("nan")}), make_selftest())
    assert not result.passed
    assert result.max_error == float("inf")


def test_blocks_hold_the_longest_prompt() -> None:
    assert blocks_needed(make_selftest(), 4) == 3
    assert blocks_needed(make_selftest(), 16) == 1


def test_it_is_the_same_after_saving_and_the_file_has_no_time_in_it(tmp_path: Path) -> None:
    make_selftest().save(tmp_path / "a.npz")
    make_selftest().save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert run_selftest(KnownRunner(), SelfTest.load(tmp_path / "a.npz")).passed


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"no archive"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "selftest.npz").write_bytes(content)
    with pytest.raises(EngineFileError, match=r"selftest\.npz"):
        SelfTest.load(tmp_path / "selftest.npz")
