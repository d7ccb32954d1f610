"""Launches that turn logits into tokens on the device; see `choosing.py` and `drawing.py` in `engine/cuda/kernels/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmserve.builder.targets.cuda.recorder import ONE, ROWS, Argument, Constants, power_of_two
from llmserve.builder.targets.cuda.values import Values
from llmserve.engine.cuda.choices import BLOCK_TOKENS, num_blocks_of
from llmserve.engine.cuda.layout import TYPES, Address, Extent, Room, StepPart
from llmserve.models.number_formats import FLOAT32

FLOATS = TYPES[FLOAT32.name]
NUM_WARPS = 8
DRAW_WARPS, DRAW_REGISTERS = 4, 128  # unlimited, the compiler spills to fit more programs than there are rows


class ChoiceLowering(Values):
    def _choose_tokens(self) -> None:
        """Launches the choice of tokens. Each row has its own programs, independent of the rest of the step."""
        vocab_size, tile = self._program.vocab_size, self._tiles.choice
        blocks = num_blocks_of(vocab_size)
        self._edit(vocab_size, tile)
        sizes = {"VOCAB": vocab_size, "BLOCKS": blocks}
        tiled = {**sizes, "TILE_BLOCKS": min(tile // BLOCK_TOKENS, power_of_two(blocks))}
        by_tile = Extent(fixed=-(-blocks // tiled["TILE_BLOCKS"]))
        whole = {**sizes, "TILE_BLOCKS": power_of_two(blocks)}
        row_peaks, peaks = self._choice("row_peaks", FLOATS), self._choice("peaks", FLOATS)
        drawn = {name: self._choice(name, FLOATS) for name in ("weights", "block_weights")}
        request = ["records", "samples"]
        self._record.part = StepPart.BEST
        self._row_launch(
            "choosing.find_peaks", ["samples"], {"logits": self._logits_row, "peaks": peaks}, tiled, by_tile
        )
        self._row_launch(
            "choosing.choose_best", ["records", "samples", "ids"],
            {"logits": self._logits_row, "banned_logits": self._choice("banned_logits", FLOATS), "peaks": peaks,
             "row_peaks": row_peaks, "tokens": self._choice("tokens")}, {**whole, "TILE": tile},
        )  # fmt: skip
        self._record.part = StepPart.DRAWS
        found = {"row_peaks": row_peaks, "logits": self._logits_row, **drawn}
        self._row_launch("drawing.weigh", request, found, tiled, by_tile)
        tokens, lists = {"tokens": self._choice("tokens")}, {name: self._choice(name) for name in ("lists", "listed")}
        self._row_launch("drawing.list_blocks", request, {"row_peaks": row_peaks, "peaks": peaks, **lists}, whole)
        for is_first in (True, False):
            constants = {**whole, "TILE": tile // 2, "IS_FIRST": is_first}
            self._row_launch(
                "drawing.draw_filtered", request, {**found, **lists, **tokens}, constants,
                num_warps=DRAW_WARPS, most_registers=DRAW_REGISTERS,
            )  # fmt: skip
        self._row_launch("drawing.draw", request, {**found, **tokens}, whole)

    def _edit(self, vocab_size: int, tile: int) -> None:
        self._record.part = StepPart.EDITS
        constants = {"VOCAB": vocab_size, "TILE": tile}
        counts, logits = {"counts": self._choice("counts")}, {"logits": self._logits_row}
        of_history, of_vocabulary = (Extent(fixed=-(-count // tile)) for count in (self._max_seq_len, vocab_size))
        self._row_launch("choosing.count_history", ["records", "samples", "ids"], counts, constants, of_history)
        self._row_launch("choosing.penalize", ["records", "samples"], {**counts, **logits}, constants, of_vocabulary)
        biases = {"biases": self._choice("biases", FLOATS), **logits}
        self._row_launch("choosing.add_bias", ["records", "samples", "ids"], biases, constants)
        banned = {**logits, "banned_logits": self._choice("banned_logits", FLOATS)}
        self._row_launch("choosing.ban", ["records", "samples", "ids"], banned, constants)

    def _row_launch(
        self, function: str, request: Sequence[str], more: Mapping[str, Argument], constants: Constants,
        extent: Extent = ONE, num_warps: int = NUM_WARPS, most_registers: int = 0,
    ) -> None:  # fmt: skip
        arguments = {name: self._choice(name) for name in request}
        self._record.launch(
            function, {**arguments, **more}, constants, (ROWS, extent, ONE),
            num_warps=num_warps, most_registers=most_registers,
        )  # fmt: skip

    @property
    def _logits_row(self) -> Argument:
        return Argument(Address(Room.LOGITS.value), FLOATS)
