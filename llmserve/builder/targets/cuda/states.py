"""Lowers the CUDA engine's ops with a state: what each keeps in a sequence's slot, and the launches that change it."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.builder.targets.cuda.recorder import STRIDE_BYTES, Argument, Constants, power_of_two
from llmserve.builder.targets.cuda.values import Values
from llmserve.engine.cuda.layout import TYPES, Address, Extent, Room
from llmserve.models.graph import Op
from llmserve.models.number_formats import FLOAT32

COLUMNS_OF_WARP = 128  # of rows that several others are added to
CHUNKS = Extent(of_tiles=True)  # at least as many as sequences


class StateLowering(Values):
    @property
    def _state_floats(self) -> int:
        """Floats in a slot."""
        return sum(map(_num_floats, self._program.ops))

    def _convolution(self, op: Op) -> None:
        """Process rows in any order, then update the kept rows, since slots are both read and written."""
        (name,), (weight, *biases) = op.inputs, op.weights
        source, y = self._buffers[name], self._new(op)
        x, states, chunks = self._value(name), self._states_of(op), self._input("chunks")
        sizes = {
            "WIDTH": op.width, "TAPS": int(op.number("taps")), "STATE_STRIDE": self._state_floats,
            "X_STRIDE": source.stride,
        }  # fmt: skip
        self._record.by_columns(
            "states.convolution",
            {"x": x, "weight": self._vector(weight), "bias": self._vector(biases[0]) if biases else states,
             "states": states, "chunks": chunks, "chunk_of_row": self._input("chunk_of_row"),
             "y": self._value(op.output)},
            {**sizes, "HAS_BIAS": bool(biases), "SILU": bool(op.number("silu")), "Y_STRIDE": y.stride}, op.width,
            columns_of_warp=COLUMNS_OF_WARP,
        )  # fmt: skip
        self._record.by_columns(
            "states.keep_rows", {"x": x, "states": states, "chunks": chunks}, sizes, op.width, CHUNKS,
            columns_of_warp=COLUMNS_OF_WARP,
        )  # fmt: skip

    def _delta_rule(self, op: Op) -> None:
        (qkv, gates), (decay, bias) = op.inputs, op.weights
        num_heads, key_dim = int(op.number("num_heads")), int(op.number("key_dim"))
        arguments = {
            "qkv": self._value(qkv), "gates": self._value(gates), "decay": self._vector(decay),
            "bias": self._vector(bias),
        }  # fmt: skip
        sizes = {
            "NUM_HEADS": num_heads, "NUM_KEY_HEADS": int(op.number("num_key_heads")), "KEY_DIM": key_dim,
            "VALUE_DIM": op.width // num_heads, "SCALE": key_dim**-0.5, "X_STRIDE": self._buffers[qkv].stride,
            "GATES_STRIDE": self._buffers[gates].stride,
        }  # fmt: skip
        self._by_heads("states.delta_rule", op, arguments, sizes, key_dim)

    def _selective_scan(self, op: Op) -> None:
        (xbc, steps), (decay, bias, skip) = op.inputs, op.weights
        num_heads, state_size = int(op.number("num_heads")), int(op.number("state_size"))
        arguments = {
            "xbc": self._value(xbc), "steps": self._value(steps), "decay": self._vector(decay),
            "bias": self._vector(bias), "skip": self._vector(skip),
        }  # fmt: skip
        sizes = {
            "NUM_HEADS": num_heads, "NUM_GROUPS": int(op.number("num_groups")), "STATE_SIZE": state_size,
            "HEAD_DIM": op.width // num_heads, "X_STRIDE": self._buffers[xbc].stride,
            "STEPS_STRIDE": self._buffers[steps].stride,
        }  # fmt: skip
        self._by_heads("states.selective_scan", op, arguments, sizes, state_size)

    def _by_heads(
        self, function: str, op: Op, arguments: Mapping[str, Argument], sizes: Constants, num_rows: int
    ) -> None:
        """Launches programs of one warp, each for as many columns of a head's matrix as fit in its threads' registers,
        so that sums over its `num_rows` rows need no other warp."""
        num_heads, y = int(op.number("num_heads")), self._new(op)
        rows, num_columns = power_of_two(num_rows), op.width // num_heads
        tile = self._tiles.heads(num_columns, rows)
        self._record.launch(
            function,
            {**arguments, "states": self._states_of(op), "chunks": self._input("chunks"),
             "y": self._value(op.output)},
            {**sizes, "STATE_STRIDE": self._state_floats, "Y_STRIDE": y.stride, "TILE_STATE_ROWS": rows,
             "TILE_COLUMNS": tile},
            (CHUNKS, Extent(fixed=num_heads), Extent(fixed=-(-num_columns // tile))), num_warps=1,
        )  # fmt: skip

    def _states_of(self, op: Op) -> Argument:
        """The address of the op's state in the first slot."""
        ops = self._program.ops
        before = sum(map(_num_floats, ops[: ops.index(op)]))
        return Argument(Address(Room.STATES.value, "", FLOAT32.num_bytes(before)), TYPES[FLOAT32.name])


def _num_floats(op: Op) -> int:
    """Floats of an op's state, rounded up to whole loads."""
    of_load = STRIDE_BYTES // FLOAT32.num_bytes(1)
    return -(-op.state_floats // of_load) * of_load
