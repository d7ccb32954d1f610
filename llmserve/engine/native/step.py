"""A StepPlan as the flat arrays that one C++ call takes.

Plain `array`s are used: the scheduler's own arrays (histories, block tables) are copied as memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.core import SamplingParams, TopTokens
from llmserve.engine.base import StepResult
from llmserve.engine.native.records import PACK_CHUNK, PACK_DRAW, PACK_PLACE, PACK_SCORE, PACK_WANTS, SAMPLE, StepRecord
from llmserve.scheduler.plan import Chunk, ChunkScores, SampleRequest, StepPlan

LEAST_FLOAT, MOST_FLOAT = float(np.finfo(np.float32).smallest_normal), float(np.finfo(np.float32).max)
MAX_KNOWN_DRAWS = 4096
NO_MASK = 2**32 - 1
WANTS = PACK_WANTS.pack(False, 0, 0, NO_MASK), PACK_WANTS.pack(True, 0, 0, NO_MASK)


class StepMemory:
    """Kept between steps: memory for the ids that samples refer to, and the sampling settings of each request.

    Long histories fill a megabyte, and allocating memory costs far more than writing it.
    """

    def __init__(self) -> None:
        self._room = array("i", [0])
        self._draws: dict[int, tuple[SamplingParams, int, bytes]] = {}  # by identity: kept, so that no other has it

    def draw(self, params: SamplingParams, vocab_size: int) -> bytes:
        """The part of a sample's record that depends only on its request; packed once."""
        known = self._draws.get(id(params))
        if known is not None and known[1] == vocab_size:
            return known[2]
        if len(self._draws) >= MAX_KNOWN_DRAWS:  # most of them belong to requests that have ended
            self._draws.clear()
        packed = _packed_draw(params, vocab_size)
        self._draws[id(params)] = (params, vocab_size, packed)
        return packed

    def fill(self, lists: Iterable[array[int]], count: int) -> int:
        """Concatenate the lists, with `count` ids in total. Returns their address, valid until the next call."""
        if count > len(self._room):
            self._room = array("i", bytes(2 * count * self._room.itemsize))
        begin = 0
        with memoryview(self._room) as room:
            for ids in lists:
                room[begin : begin + len(ids)] = ids
                begin += len(ids)
        return _address(self._room)

    def ids(self, count: int) -> NDArray[np.int32]:
        """The first `count` of the ids filled in last."""
        return np.frombuffer(self._room, np.int32, count)


class FlatStep:
    """Owns the arrays that `record` points to; keep it until the call has returned and `result` was read.

    A step serves many clients, so no valid request may fail here: values that do not fit in a record's fields are
    replaced by the nearest ones that do.
    """

    def __init__(
        self, plan: StepPlan, vocab_size: int, memory: StepMemory, output_width: int = 0, hidden_width: int = 0
    ) -> None:
        """`output_width`: of logits, where they are no token's each. `hidden_width`: of rows that are wanted back."""
        self._plan = plan
        self._vocab_size = vocab_size
        self._memory = memory
        self._token_ids, self._blocks = array("i"), array("i")
        self._chunks, self._rows, self._kept = array("B"), array("I"), array("I")
        self._scores: list[bytes] = []
        self._num_top = 0
        self._masks: list[Callable[[], bytes]] = []
        self._lists: list[array[int]] = []  # which end to end are the ids that samples refer to
        self._num_sample_ids = 0
        self._bias_values = array("f")  # at the places of their ids
        samples = []
        for chunk in plan.chunks:
            drawn = chunk.samples
            self._add(chunk, len(drawn))
            for selected, sample in enumerate(drawn, len(self._rows) - len(drawn)):
                samples.append(self._packed(sample, selected))
        self._score_records = array("B", b"".join(self._scores))
        self._score_log_probs = array("d", bytes(8 * len(self._scores)))
        self._top_ids = array("i", bytes(4 * self._num_top))
        self._top_log_probs = array("d", bytes(8 * self._num_top))
        self._mask_words = array("I", bytes(len(self._masks) * self._mask_bytes))
        self._masks_ready = array("I", [0])
        self._samples = array("B", b"".join(samples))
        self._tokens = array("i", bytes(4 * len(samples)))
        self._log_probs = array("d", bytes(8 * len(samples)))
        self._logits = np.empty((len(self._kept), output_width or vocab_size), np.float32) if self._kept else None
        self._hidden = None if plan.hidden is None else np.ascontiguousarray(plan.hidden, np.float32)
        assert self._hidden is None or len(self._hidden) == len(self._token_ids)
        self._hidden_out = np.empty((len(self._token_ids), hidden_width), np.float32) if hidden_width else None
        self.record = self._make_record(len(samples), memory.fill(self._lists, self._num_sample_ids))

    @property
    def selected(self) -> NDArray[np.uint32]:
        """Rows of tokens whose logits are needed, in order."""
        return np.frombuffer(self._rows, np.uint32) if self._rows else np.empty(0, np.uint32)

    @property
    def samples(self) -> NDArray[Any]:
        """The records of the samples, of dtype SAMPLE."""
        return np.frombuffer(self._samples, SAMPLE) if self._samples else np.empty(0, SAMPLE)

    @property
    def kept(self) -> NDArray[np.uint32]:
        """Which of the selected rows are returned completely."""
        return np.frombuffer(self._kept, np.uint32) if self._kept else np.empty(0, np.uint32)

    @property
    def sample_ids(self) -> NDArray[np.int32]:
        """Ids that samples refer to; valid until the next step is made with this memory."""
        return self._memory.ids(self._num_sample_ids)

    @property
    def bias_values(self) -> NDArray[np.float32]:
        """Each at the place of its id; behind the last bias there are none."""
        return np.frombuffer(self._bias_values, np.float32) if self._bias_values else np.empty(0, np.float32)

    @property
    def tokens(self) -> array[int]:
        """Tokens chosen so far, one per sample."""
        return self._tokens

    def put_tokens(self, samples: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """For samples that were chosen elsewhere."""
        np.frombuffer(self._tokens, np.int32)[samples] = tokens

    @property
    def has_masks(self) -> bool:
        return bool(self._masks)

    @property
    def masks_ready(self) -> int:
        """Address of the flag for finished masks; set it after `fill_masks`, which may run during the step."""
        return _address(self._masks_ready)

    def fill_masks(self) -> None:
        with memoryview(self._mask_words).cast("B") as room:
            for place, mask in enumerate(self._masks):
                room[place * self._mask_bytes : (place + 1) * self._mask_bytes] = mask()

    @property
    def _mask_bytes(self) -> int:
        return -(-self._vocab_size // 32) * 4

    def result(self) -> StepResult:
        return StepResult(self._tokens.tolist(), self._log_probs.tolist(), self._chunk_scores(), self._hidden_out)

    def _chunk_scores(self) -> dict[int, ChunkScores]:
        """Reads the results in the order in which `_add` and `_packed` requested them."""
        found: dict[int, ChunkScores] = {}
        if not (self._scores or self._num_top or self._kept):
            return found
        tops, log_probs, num_kept = self._tops(), iter(self._score_log_probs), 0
        for index, chunk in enumerate(self._plan.chunks):
            if not chunk.wants_scores:
                continue
            num_sampled = 0 if chunk.sample is None else chunk.sample.num_top
            kept = chunk.num_logits
            found[index] = ChunkScores(
                log_probs=[next(log_probs) for _ in chunk.targets],
                top=[tops(chunk.num_top) for _ in chunk.targets] if chunk.num_top else (),
                sampled_top=[tops(num_sampled) for _ in range(chunk.num_samples)] if num_sampled else (),
                logits=None if self._logits is None or not kept else self._logits[num_kept : num_kept + kept],
            )
            num_kept += kept
        return found

    def _tops(self) -> Callable[[int], TopTokens]:
        begin = 0

        def next_of(count: int) -> TopTokens:
            nonlocal begin
            begin += count
            ids, log_probs = self._top_ids[begin - count : begin], self._top_log_probs[begin - count : begin]
            return TopTokens(tuple(ids), tuple(log_probs))

        return next_of

    def _add(self, chunk: Chunk, num_samples: int) -> None:
        """The chunk's tokens, blocks, record, and the token rows whose logits it wants: samples need the last ones."""
        first, num_rows = len(self._token_ids), len(self._rows)
        num_blocks = len(chunk.windowed[0]) if chunk.windowed else len(chunk.block_table)
        table, states = (len(self._blocks), num_blocks), (*chunk.states, *chunk.kept_state)
        tokens = first, len(chunk.token_ids), chunk.start
        self._chunks.frombytes(PACK_CHUNK.pack(*tokens, *table, *states, chunk.second_segment, chunk.adapter))
        self._token_ids.extend(chunk.token_ids)
        self._blocks.extend(chunk.block_table[:num_blocks])
        for windowed in chunk.windowed:
            self._blocks.extend(windowed)
        end = len(self._token_ids)
        if chunk.return_logits:
            self._rows.extend(range(first, end))
        else:
            sampled = end - (num_samples or chunk.pooled)
            if chunk.targets:
                scored = first + len(chunk.targets)
                self._rows.extend(range(first, scored))
                sampled = max(scored, sampled)
            self._rows.extend(range(sampled, end))
        if num_logits := chunk.num_logits:
            self._kept.extend(range(len(self._rows) - num_logits, len(self._rows)))
        for place, target in enumerate(chunk.targets):
            self._scores.append(PACK_SCORE.pack(num_rows + place, target, chunk.num_top, self._add_top(chunk.num_top)))

    def _add_top(self, count: int) -> int:
        """Memory for the `count` most likely tokens."""
        begin, self._num_top = self._num_top, self._num_top + count
        return begin

    def _packed(self, sample: SampleRequest, selected: int) -> bytes:
        """The record of a sample; its lists of ids are added to `_lists`."""
        history_begin, history_end = self._add_ids(sample.history)
        bias_end = self._add_bias(sample.bias) if sample.bias else history_end
        banned_end = self._add_banned(sample.banned) if sample.banned else bias_end
        place = PACK_PLACE.pack(
            sample.params.seed,
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
        )
        wants = WANTS[sample.log_prob]
        if sample.num_top or sample.mask is not None:
            first_top, first_mask = self._add_top(sample.num_top), self._add_mask(sample.mask)
            wants = PACK_WANTS.pack(sample.log_prob, sample.num_top, first_top, first_mask)
        return place + self._memory.draw(sample.params, self._vocab_size) + wants

    def _add_mask(self, mask: Callable[[], bytes] | None) -> int:
        if mask is None:
            return NO_MASK
        self._masks.append(mask)
        return (len(self._masks) - 1) * self._mask_bytes // 4

    def _add_bias(self, bias: Sequence[tuple[int, float]]) -> int:
        begin, end = self._add_ids([token_id for token_id, _ in bias])
        self._bias_values.extend([0.0] * (begin - len(self._bias_values)))
        self._bias_values.extend(_float32(value) for _, value in bias)
        return end

    def _add_banned(self, banned: Sequence[int]) -> int:
        """Where the ids begin and end."""
        return self._add_ids([token_id for token_id in banned if 0 <= token_id < self._vocab_size])[1]

    def _add_ids(self, ids: Sequence[int]) -> tuple[int, int]:
        """Where the ids begin and end."""
        begin = self._num_sample_ids
        if ids:
            self._lists.append(ids if isinstance(ids, array) else array("i", ids))
            self._num_sample_ids += len(ids)
        return begin, self._num_sample_ids

    def _make_record(self, num_samples: int, sample_ids: int) -> StepRecord:
        return StepRecord(
            _address(self._token_ids),
            _address(self._chunks),
            _address(self._blocks),
            _address(self._rows),
            _address(self._kept),
            _address(self._samples),
            _address(self._score_records),
            sample_ids,
            _address(self._bias_values),
            _address(self._mask_words),
            _rows(self._hidden),
            self.masks_ready if self._masks else None,
            _address(self._tokens),
            _address(self._log_probs),
            _address(self._score_log_probs),
            _address(self._top_ids),
            _address(self._top_log_probs),
            _rows(self._logits),
            _rows(self._hidden_out),
            next((rows.shape[1] for rows in (self._hidden, self._hidden_out) if rows is not None), 0),
            len(self._token_ids),
            len(self._plan.chunks),
            len(self._blocks),
            len(self._rows),
            len(self._kept),
            num_samples,
            len(self._scores),
            self._num_sample_ids,
            self._num_top,
            len(self._mask_words),
        )


def _packed_draw(params: SamplingParams, vocab_size: int) -> bytes:
    """Kernels draw where the temperature is not 0."""
    return PACK_DRAW.pack(
        min(params.top_k, vocab_size),
        0.0 if params.is_greedy else _float32(params.temperature),
        max(params.top_p, LEAST_FLOAT),
        params.min_p,
        max(_float32(params.repetition_penalty), LEAST_FLOAT),
        _float32(params.presence_penalty),
        _float32(params.frequency_penalty),
    )


def _address(values: array[Any]) -> int:
    return values.buffer_info()[0]


def _rows(values: NDArray[np.float32] | None) -> int | None:
    return None if values is None else values.ctypes.data


def _float32(value: float) -> float:
    return min(max(value, -MOST_FLOAT), MOST_FLOAT)
