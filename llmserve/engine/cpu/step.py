"""A StepPlan as the flat arrays that one C++ call takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.base import StepResult
from llmserve.engine.cpu.library import CHUNK, SAMPLE, StepRecord
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan

LEAST_FLOAT, MOST_FLOAT = float(np.finfo(np.float32).smallest_normal), float(np.finfo(np.float32).max)


class FlatStep:
    """Owns the arrays that `record` points into; alive until the call has returned and `result` was read.

    A step is many clients' work, so no valid request may fail here: what a record's fields cannot hold is replaced by
    the nearest that they can.
    """

    def __init__(self, plan: StepPlan, vocab_size: int) -> None:
        self._plan = plan
        self._vocab_size = vocab_size
        chunks = plan.chunks
        lengths = [len(chunk.token_ids) for chunk in chunks]
        first_tokens = [0, *accumulate(lengths)]
        self._selected = [_selected_tokens(chunk, first) for chunk, first in zip(chunks, first_tokens, strict=False)]
        self._token_ids = _flat([chunk.token_ids for chunk in chunks], first_tokens[-1])
        self._blocks = _flat([chunk.block_table for chunk in chunks], sum(len(chunk.block_table) for chunk in chunks))
        self._chunks = _chunk_records(chunks, lengths)
        self._rows = np.fromiter(chain.from_iterable(self._selected), np.uint32)
        self._pack_samples()
        wants_logits = any(chunk.return_logits for chunk in chunks)
        self._logits = np.empty((len(self._rows), vocab_size), np.float32) if wants_logits else None
        self._tokens = np.empty(len(self._samples), np.int32)
        self._log_probs = np.empty(len(self._samples), np.float64)
        self.record = self._make_record()

    def result(self) -> StepResult:
        tokens, log_probs = [-1] * len(self._plan.chunks), [0.0] * len(self._plan.chunks)
        sampled = [index for index, chunk in enumerate(self._plan.chunks) if chunk.sample is not None]
        for index, token, log_prob in zip(sampled, self._tokens.tolist(), self._log_probs.tolist(), strict=True):
            tokens[index], log_probs[index] = token, log_prob
        return StepResult(tokens, log_probs, self._chunk_logits())

    def _chunk_logits(self) -> dict[int, NDArray[np.float32]]:
        if self._logits is None:
            return {}
        ends = list(accumulate(map(len, self._selected)))
        return {
            index: self._logits[end - len(chunk.token_ids) : end]
            for index, (chunk, end) in enumerate(zip(self._plan.chunks, ends, strict=True))
            if chunk.return_logits
        }

    def _pack_samples(self) -> None:
        """One record per chunk that wants a token; its lists of ids lie end to end in `sample_ids`."""
        ends = list(accumulate(map(len, self._selected)))
        wanted = [(chunk.sample, ends[i] - 1) for i, chunk in enumerate(self._plan.chunks) if chunk.sample is not None]
        lists: list[Sequence[int]] = []
        rows = []
        position = 0
        for sample, selected in wanted:
            bias_ids = [token_id for token_id, _ in sample.bias]
            # an end token may lie outside of the vocabulary; nobody can draw it
            banned = [token_id for token_id in sample.banned if 0 <= token_id < self._vocab_size]
            bounds = list(accumulate(map(len, (sample.history, bias_ids, banned)), initial=position))
            rows.append(_sample_row(sample, selected, bounds, self._vocab_size))
            lists += (sample.history, bias_ids, banned)
            position = bounds[-1]
        self._samples = np.array(rows, SAMPLE)
        self._sample_ids = _flat(lists, position)
        self._bias_values = np.zeros(position, np.float32)
        for row, (sample, _) in zip(self._samples, wanted, strict=True):
            if sample.bias:
                self._bias_values[row["bias_begin"] : row["bias_end"]] = [_float32(bias) for _, bias in sample.bias]

    def _make_record(self) -> StepRecord:
        return StepRecord(
            self._token_ids.ctypes.data,
            self._chunks.ctypes.data,
            self._blocks.ctypes.data,
            self._rows.ctypes.data,
            self._samples.ctypes.data,
            self._sample_ids.ctypes.data,
            self._bias_values.ctypes.data,
            self._tokens.ctypes.data,
            self._log_probs.ctypes.data,
            None if self._logits is None else self._logits.ctypes.data,
            len(self._token_ids),
            len(self._chunks),
            len(self._blocks),
            len(self._rows),
            len(self._samples),
            len(self._sample_ids),
        )


def _selected_tokens(chunk: Chunk, first: int) -> range:
    """Token rows of the step whose logits this chunk wants; a sample is drawn from the last of them."""
    end = first + len(chunk.token_ids)
    if chunk.return_logits:
        return range(first, end)
    return range(end - 1, end) if chunk.sample is not None else range(0)


def _flat(lists: Iterable[Sequence[int]], count: int) -> NDArray[np.int32]:
    return np.fromiter(chain.from_iterable(lists), np.int32, count)


def _chunk_records(chunks: Sequence[Chunk], lengths: Sequence[int]) -> NDArray[np.void]:
    records: NDArray[np.void] = np.zeros(len(chunks), CHUNK)
    blocks = [len(chunk.block_table) for chunk in chunks]
    records["num_tokens"] = lengths
    records["first_token"] = np.cumsum(lengths) - lengths
    records["start"] = [chunk.start for chunk in chunks]
    records["num_blocks"] = blocks
    records["first_block"] = np.cumsum(blocks) - blocks
    return records


def _sample_row(
    sample: SampleRequest, selected: int, bounds: Sequence[int], vocab_size: int
) -> tuple[int | float, ...]:
    """Field values in the order of SAMPLE."""
    params = sample.params
    history_begin, history_end, bias_end, banned_end = bounds
    return (
        params.seed,
        sample.position,
        sample.stream,
        selected,
        history_begin,
        history_end,
        sample.num_prompt,
        history_end,
        bias_end,
        bias_end,
        banned_end,
        min(params.top_k, vocab_size),
        _float32(params.temperature),
        max(params.top_p, LEAST_FLOAT),
        params.min_p,
        max(_float32(params.repetition_penalty), LEAST_FLOAT),
        _float32(params.presence_penalty),
        _float32(params.frequency_penalty),
        sample.log_prob,
        0,
    )


def _float32(value: float) -> float:
    return min(max(value, -MOST_FLOAT), MOST_FLOAT)
