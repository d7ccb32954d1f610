"""An engine whose steps another process runs: `kernel_steps` of the kernels' test build, which may have sanitizers, be
made for another processor and run under an emulator, or have variants that no installation has.

With LLMSERVE_STEPS_PROGRAM set to a command, such as "qemu-aarch64-static -L /usr/aarch64-linux-gnu .../kernel_steps",
the tests that take ISAS and `open_runner` from here and from conftest.py test that program in place of this process's
library.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.cpu.adapters import PackedAdapter
from llmserve.engine.cpu.layout import read_header
from llmserve.engine.cpu.runner import available_isas
from llmserve.engine.native.library import ERRORS
from llmserve.engine.native.records import CHUNK, SAMPLE, SCORE
from llmserve.engine.native.step import FlatStep, StepMemory
from llmserve.scheduler.plan import StepPlan

REQUEST = struct.Struct("<12I")  # kind, ten counts of a step, value
REPLY = struct.Struct("<2I")  # status, bytes of text
PROGRAM = tuple(os.environ.get("LLMSERVE_STEPS_PROGRAM", "").split())


class Kind(IntEnum):
    STEP = 0
    SET_TACTICS = 1
    TACTICS = 2
    LOAD_ADAPTER = 3
    UNLOAD_ADAPTER = 4


class OtherRunner:
    """What the tests of steps need of `CpuRunner`, over a pipe."""

    def __init__(self, program: Sequence[str], path: Path, *, isa: str, num_blocks: int, threads: int) -> None:
        header = read_header(path)
        num_states = header.max_batch_size
        self.isa = isa
        self.info = RunnerInfo(
            vocab_size=header.vocab_size,
            block_size=header.block_size,
            num_blocks=num_blocks,
            max_num_tokens=header.max_num_tokens,
            max_batch_size=header.max_batch_size,
            max_seq_len=header.max_seq_len,
            num_states=num_states if header.state_bytes else 0,
        )
        self._memory = StepMemory()
        arguments = (str(path), isa, str(num_blocks), str(threads), str(header.vocab_size), str(num_states))
        self._process = subprocess.Popen([*program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reply()

    def step(self, plan: StepPlan) -> StepResult:
        assert not any(chunk.sample and chunk.sample.bias for chunk in plan.chunks), "biases are not sent"
        flat = FlatStep(plan, self.info.vocab_size, self._memory)
        flat.fill_masks()
        r = flat.record
        arrays = (
            (r.token_ids, 4 * r.num_tokens), (r.chunks, CHUNK.itemsize * r.num_chunks),
            (r.block_ids, 4 * r.num_block_ids), (r.selected_rows, 4 * r.num_selected), (r.kept_rows, 4 * r.num_kept),
            (r.samples, SAMPLE.itemsize * r.num_samples), (r.scores, SCORE.itemsize * r.num_scores),
            (r.sample_ids, 4 * r.num_sample_ids), (r.mask_words, 4 * r.num_mask_words),
        )  # fmt: skip
        counts = (
            *(r.num_tokens, r.num_chunks, r.num_block_ids, r.num_selected, r.num_kept),
            *(r.num_samples, r.num_scores, r.num_sample_ids, r.num_top, r.num_mask_words),
        )
        payload = b"".join(ctypes.string_at(address, size) for address, size in arrays if size)
        self._ask(REQUEST.pack(Kind.STEP, *counts, 0) + payload)
        results = (
            (r.tokens, 4 * r.num_samples), (r.log_probs, 8 * r.num_samples), (r.score_log_probs, 8 * r.num_scores),
            (r.top_ids, 4 * r.num_top), (r.top_log_probs, 8 * r.num_top),
            (r.logits, 4 * r.num_kept * self.info.vocab_size),
        )  # fmt: skip
        for address, size in results:
            if size:
                ctypes.memmove(address, self._read(size), size)
        return flat.result()

    def set_tactics(self, table: bytes) -> None:
        self._ask(REQUEST.pack(Kind.SET_TACTICS, *[0] * 10, len(table)) + table)

    def tactics(self, weight_type: int, rows: int) -> list[str]:
        return self._ask(REQUEST.pack(Kind.TACTICS, rows, *[0] * 9, weight_type)).partition(";")[0].split(",")

    def load_adapter(self, slot: int, packed: PackedAdapter) -> None:
        matrices = {array.ctypes.data: array.tobytes() for array in packed.arrays}
        sent = [matrices[address] for record in packed.records for address in (record.down, record.up)]
        sizes = struct.pack(f"<{len(sent)}I", *map(len, sent))
        head = REQUEST.pack(Kind.LOAD_ADAPTER, len(packed.records), *[0] * 9, slot)
        self._ask(b"".join((head, bytes(packed.records), sizes, *sent)))

    def unload_adapter(self, slot: int) -> None:
        self._ask(REQUEST.pack(Kind.UNLOAD_ADAPTER, *[0] * 10, slot))

    def close(self) -> None:
        """The program ends when its input does; sanitizers have the last word."""
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0

    def _ask(self, request: bytes) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(request)
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> str:
        status, size = REPLY.unpack(self._read(REPLY.size))
        text = self._read(size).decode()
        if status:
            raise ERRORS[status](text)
        return text

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        blob = self._process.stdout.read(size)
        assert len(blob) == size, "the program has ended"
        return blob


def variants(program: Sequence[str]) -> list[str]:
    """Those that the program can run here, slowest first."""
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip().split(",")


ISAS = variants(PROGRAM) if PROGRAM else available_isas()
