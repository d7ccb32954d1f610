"""A step's data on the way to the device and back, in host memory that the device copies directly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.cuda.choices import NOBODY, StepChoice, choice_offsets, most_ids
from llmserve.engine.cuda.device import Device
from llmserve.engine.cuda.inputs import ITEM_BYTES, Inputs
from llmserve.engine.cuda.layout import EngineHeader
from llmserve.engine.native.records import SAMPLE, num_words
from llmserve.engine.native.step import FlatStep


class Pinned:
    """For one step; while it runs, the next step uses another one."""

    def __init__(self, device: Device, header: EngineHeader, inputs: Inputs) -> None:
        self._device = device
        self._offsets, _ = choice_offsets(header)
        self.num_bytes = 0
        self.staged = self._memory(inputs.num_bytes)
        self.staged[:] = 0
        self.views = inputs.views(self.staged)
        samples, ids = header.max_num_tokens, most_ids(header)
        self._records = self._words(num_words(SAMPLE) * samples)
        self._ids, self._biases = self._words(ids), self._words(ids).view(np.float32)
        self.tokens = self._words(samples)  # tokens that the device has chosen, in the order of the samples
        num_pieces = -(-header.max_num_tokens // header.head_rows)
        stride = (self._offsets["samples"] - self._offsets["selected"]) // ITEM_BYTES
        self._rows = self._words(num_pieces * 2 * stride).reshape(num_pieces, 2, stride)
        self.event = device.make_event()

    def send_requests(self, choice: StepChoice, flat: FlatStep, place: int) -> None:
        """Send the data for choosing tokens to the arrays of CHOICE at `place`."""
        self._send(self._records, choice.records.view(np.int32), place, "records")
        if choice.has_edits:
            self._send(self._ids, flat.sample_ids, place, "ids")
            self._send(self._biases, flat.bias_values, place, "biases")

    def send_rows(self, choice: StepChoice, selected: NDArray[np.uint32], begin: int, end: int, place: int) -> None:
        """Send a piece of the selected rows: their tokens, and the sample that the device chooses for each."""
        rows = self._rows[begin // (end - begin)]
        count = len(selected[begin:end])
        rows[0], rows[1] = 0, NOBODY
        rows[0, :count], rows[1, :count] = selected[begin:end], choice.rows[begin:end]
        self._device.write(place + self._offsets["selected"], rows.reshape(-1).view(np.uint8))

    def _send(self, memory: NDArray[np.generic], values: NDArray[np.generic], place: int, name: str) -> None:
        if len(values):
            memory[: len(values)] = values
            self._device.write(place + self._offsets[name], memory[: len(values)].view(np.uint8))

    def _words(self, count: int) -> NDArray[np.int32]:
        return self._memory(ITEM_BYTES * count).view(np.int32)

    def _memory(self, num_bytes: int) -> NDArray[np.uint8]:
        self.num_bytes += num_bytes
        return self._device.host_memory(num_bytes)
