"""Places of a Program's values and weights while a CUDA engine runs; shared by all parts of the lowering."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmserve.builder.quantization import LINEAR_KINDS, WeightPart, stored_names
from llmserve.builder.targets.buffers import Place
from llmserve.builder.targets.cuda.recorder import STRIDE_BYTES, Argument, Recorder
from llmserve.builder.targets.cuda.tiles import Tiles
from llmserve.builder.targets.op_lowering import OpLowering, turned_for_others
from llmserve.builder.targets.tensor_writer import Rows
from llmserve.engine.cuda.layout import ITEM_BYTES, TYPES, Address, Room
from llmserve.models.graph import Op, Program
from llmserve.models.spec import Param

INTEGERS = TYPES["int32"]


@dataclass(frozen=True, slots=True)
class Turning:
    """A rope that is not applied yet: where its cosines and sines are, and how many columns of a head it rotates."""

    cos: Argument
    sin: Argument
    rotary_dim: int


class Values(OpLowering):
    """Values that are summed over the layers, or only rounded to integers, are `_wide`, in float32; the others have the
    engine's dtype."""

    def __init__(
        self,
        program: Program,
        params: Sequence[Param],
        *,
        quantized: Mapping[str, Sequence[WeightPart]],
        dtype: str,
        cache_dtype: str,
        max_seq_len: int,
        block_size: int,
        tiles: Tiles,
    ) -> None:
        super().__init__(program, stride_bytes=STRIDE_BYTES)
        self._params = {param.name: param for param in params}
        self._quantized = quantized
        self._names = stored_names(params, quantized)
        self._dtype = dtype
        self._cache_dtype = cache_dtype
        self._max_seq_len = max_seq_len
        self._block_size = block_size
        self._tiles = tiles
        self._rounded_uses = Counter(op.inputs[0] for op in program.ops if self._is_quantized(op))
        self._only_rounded = {name for name, count in self._rounded_uses.items() if count == self._uses[name]}
        self._wide: set[str] = set()  # values in float32
        self._record = Recorder(tiles.columns)
        self._stored: dict[str, Sequence[Rows]] = {}  # tensors of parameters that have their own
        self._offsets: dict[str, float] = {}
        self._done_rounding: set[str] = set()  # values whose integers exist
        self._written: set[int] = set()  # layers of the cache
        self._turned_for_others = turned_for_others(program)
        self._turned: dict[str, Turning] = {}  # values that are not rotated yet
        self._turnings: dict[tuple[object, float], Turning] = {}  # by frequencies and scale

    def _is_quantized(self, op: Op) -> bool:
        return op.kind in LINEAR_KINDS and op.weights[0] in self._quantized

    def _new(self, op: Op, *, is_wide: bool = False) -> Place:
        is_wide = is_wide or op.output in self._only_rounded
        if is_wide:
            self._wide.add(op.output)
        return self._buffers.new(op.output, op.width, 4 if is_wide else ITEM_BYTES[self._dtype])

    def _sum_place(self, add: Op, residual: str) -> Place:
        """The place of a sum in float32."""
        self._wide.add(add.output)
        return self._buffers.over(add.output, residual) if residual in self._wide else self._new(add, is_wide=True)

    def _value(self, name: str) -> Argument:
        return self._argument(self._buffers[name], "float32" if name in self._wide else self._dtype)

    def _argument(self, place: Place, dtype: str) -> Argument:
        offset = place.offset * ITEM_BYTES[dtype]
        return Argument(Address(Room.BUFFER.value, str(place.buffer), offset), TYPES[dtype], offset % STRIDE_BYTES == 0)

    def _input(self, name: str) -> Argument:
        return Argument(Address(Room.INPUT.value, name), INTEGERS)

    def _choice(self, name: str, type_: str = INTEGERS) -> Argument:
        return Argument(Address(Room.CHOICE.value, name), type_)

    def _matrix(self, name: str) -> Argument:
        rows, cols = self._params[name].shape
        return self._record.tensor(self._store(name), self._dtype, rows, cols)

    def _vector(self, name: str) -> Argument:
        return self._record.tensor(self._store(name), "float32", 1, math.prod(self._params[name].shape))

    def _norm_weight(self, op: Op) -> Argument:
        """A norm multiplies with offset + weight; the sum is taken in float32 when the engine is written. One without
        weights has ones."""
        if not op.weights:
            return self._record.constant("ones", np.ones(op.width // int(op.number("groups")), np.float32))
        name, offset = op.weights[0], op.number("offset")
        assert self._offsets.setdefault(name, offset) == offset
        return self._vector(name)

    def _scale_by(self, x: str, y: str, weight: Argument, num_weights: int) -> None:
        """Scale a value, and store it in another's place."""
        source, target = self._buffers[x], self._buffers[y]
        sizes = {
            "WIDTH": source.width, "NUM_WEIGHTS": num_weights, "X_STRIDE": source.stride, "Y_STRIDE": target.stride
        }  # fmt: skip
        arguments = {"x": self._value(x), "weight": weight, "y": self._value(y)}
        self._record.by_columns("rowwise.scale", arguments, sizes, source.width)

    def _store(self, name: str) -> str:
        tensor = self._names[name]
        self._stored.setdefault(tensor, [Rows(tensor, 0, self._params[name].shape[0])])
        return tensor
