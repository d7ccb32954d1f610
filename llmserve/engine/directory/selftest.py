"""An engine's self-test, stored next to it: prompts, and the reference's results for them. An adapter's self-test has
the engine's prompts, and the results of the portable kernels.

`run_selftest` drives any runner through prefill (one or several chunks) and single-token decode steps, as serving does,
and compares. Shapes: P positions of all prompts together, R positions whose logits are kept, V vocabulary.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import AdapterRunner, Runner
from llmserve.engine.directory.artifact import SELFTEST_FILE, EngineDirectory
from llmserve.errors import EngineFileError
from llmserve.scheduler.plan import Chunk, StepPlan

NUM_DECODE_STEPS = 2  # the last tokens of each prompt are fed one at a time
ROWS_PER_PROMPT = 4
ADAPTER_SLOT = 1


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Prompts of different lengths, concatenated."""

    token_ids: NDArray[np.int32]  # [P]
    prompt_lengths: NDArray[np.int32]  # one per prompt
    argmax: NDArray[np.int32]  # [P]
    margins: NDArray[np.float32]  # [P], the reference's largest logit minus its second largest
    logits: NDArray[np.float32]  # [R, V], for the last positions of each prompt
    rows_per_prompt: NDArray[np.int32]  # their sum is R
    tolerance: NDArray[np.float32]  # scalar: largest accepted error, relative to the largest reference logit

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], logits: Sequence[NDArray[np.float32]], tolerance: float) -> SelfTest:
        """Make it from all logits of each prompt."""
        return cls(
            token_ids=np.concatenate([np.array(prompt, np.int32) for prompt in prompts]),
            prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
            argmax=np.concatenate([rows.argmax(axis=1).astype(np.int32) for rows in logits]),
            margins=np.concatenate([_margins(rows) for rows in logits]).astype(np.float32),
            logits=np.concatenate([rows[-ROWS_PER_PROMPT:] for rows in logits]).astype(np.float32),
            rows_per_prompt=np.array([min(ROWS_PER_PROMPT, len(rows)) for rows in logits], np.int32),
            tolerance=np.array(tolerance, np.float32),
        )

    def prompts(self) -> Iterator[list[int]]:
        for part in np.split(self.token_ids, np.cumsum(self.prompt_lengths)[:-1]):
            yield [int(token) for token in part]

    def save(self, path: Path) -> None:
        np.savez(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> SelfTest:
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return cls(**{field.name: arrays[field.name] for field in fields(cls)})
        except (OSError, EOFError, KeyError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise EngineFileError(f"{path.name} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    num_prompts: int
    num_positions: int
    max_error: float  # relative to the largest reference logit
    tolerance: float
    num_wrong_tokens: int  # the best token differs although the reference was sure

    @property
    def passed(self) -> bool:
        return self.max_error <= self.tolerance and self.num_wrong_tokens == 0

    def __str__(self) -> str:
        return (
            f"self-test {'passed' if self.passed else 'FAILED'}: "
            f"{self.num_prompts} prompts, {self.num_positions} positions, "
            f"largest error {self.max_error:.2e} (tolerance {self.tolerance:.0e}), {self.num_wrong_tokens} wrong tokens"
        )


def hidden_rows(num_tokens: int, width: int) -> NDArray[np.float32] | None:
    """Substitutes for the rows of another network; None if the network reads none."""
    angles = np.outer(np.arange(1, num_tokens + 1), np.arange(1, width + 1))
    return np.sin(angles).astype(np.float32) if width else None


def blocks_needed(selftest: SelfTest, block_size: int) -> int:
    """KV blocks that a runner needs for this test."""
    return -(-int(selftest.prompt_lengths.max()) // block_size)


def run_stored_selftest(
    directory: EngineDirectory, open_runner: Callable[[int], Runner], adapter: SealedAdapter | None = None
) -> SelfTestResult:
    """Run the self-test of an engine directory, or of an adapter, on a separate runner; `open_runner` receives the
    number of KV blocks."""
    selftest = SelfTest.load((directory.path if adapter is None else adapter.path) / SELFTEST_FILE)
    with _opened(directory, selftest, open_runner, adapter) as runner:
        return run_selftest(runner, selftest, ADAPTER_SLOT if adapter else 0)


def make_adapter_selftest(
    directory: EngineDirectory, open_runner: Callable[[int], Runner], adapter: SealedAdapter
) -> SelfTest:
    """This runner's results with an adapter for the prompts of the engine's self-test."""
    selftest = SelfTest.load(directory.path / SELFTEST_FILE)
    prompts = list(selftest.prompts())
    with _opened(directory, selftest, open_runner, adapter) as runner:
        logits = [prompt_logits(runner, prompt, index, ADAPTER_SLOT) for index, prompt in enumerate(prompts)]
    return SelfTest.of(prompts, logits, float(selftest.tolerance))


@contextmanager
def _opened(
    directory: EngineDirectory, selftest: SelfTest, open_runner: Callable[[int], Runner], adapter: SealedAdapter | None
) -> Iterator[Runner]:
    runner = open_runner(blocks_needed(selftest, directory.manifest.options["tokens_per_block"]))
    try:
        if adapter is not None:
            assert isinstance(runner, AdapterRunner)
            runner.load_adapter(ADAPTER_SLOT, runner.packed(adapter))
        yield runner
    finally:
        runner.close()


def run_selftest(runner: Runner, selftest: SelfTest, adapter: int = 0) -> SelfTestResult:
    """`adapter`: its slot."""
    logits = [prompt_logits(runner, prompt, index, adapter) for index, prompt in enumerate(selftest.prompts())]
    actual = np.concatenate([rows[-kept:] for rows, kept in zip(logits, selftest.rows_per_prompt, strict=True)])
    tolerance = float(selftest.tolerance)
    largest = float(np.abs(selftest.logits).max())
    error = float(np.abs(actual - selftest.logits).max()) / largest
    argmax = np.concatenate([rows.argmax(axis=1) for rows in logits])
    sure = selftest.margins > 2 * tolerance * largest
    return SelfTestResult(
        num_prompts=len(logits),
        num_positions=len(argmax),
        max_error=error if np.isfinite(error) else float("inf"),
        tolerance=tolerance,
        num_wrong_tokens=int(np.sum(sure & (argmax != selftest.argmax))),
    )


def prompt_logits(runner: Runner, prompt: list[int], sequence_id: int, adapter: int = 0) -> NDArray[np.float32]:
    """Logits [tokens, V] at every position of one prompt, or the single row for all of them."""
    block_table = list(range(-(-len(prompt) // runner.info.block_size)))
    parts = []
    if runner.info.output_width:
        chunk = Chunk(sequence_id, prompt, 0, block_table, pooled=True, adapter=adapter)
        return runner.step(StepPlan((chunk,))).logits[0]
    hidden = hidden_rows(len(prompt), runner.info.hidden_width)
    for start, end in _chunk_borders(len(prompt), runner.info.max_num_tokens):
        chunk = Chunk(sequence_id, prompt[start:end], start, block_table, return_logits=True, adapter=adapter)
        plan = StepPlan((chunk,), None if hidden is None else hidden[start:end])
        parts.append(runner.step(plan).logits[0])
    return np.concatenate(parts)


def _margins(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """The margin of each row: its largest logit minus its second largest."""
    if logits.shape[1] < 2:
        return np.zeros(len(logits), np.float32)
    second, first = np.partition(logits, -2, axis=1)[:, -2:].T
    margins: NDArray[np.float32] = np.abs(first - second)
    return margins


def _chunk_borders(length: int, max_num_tokens: int) -> list[tuple[int, int]]:
    num_prefill = max(1, length - NUM_DECODE_STEPS)
    prefill = [(start, min(start + max_num_tokens, num_prefill)) for start in range(0, num_prefill, max_num_tokens)]
    return prefill + [(position, position + 1) for position in range(num_prefill, length)]
