"""Attention of the CUDA engine: rotations, the cache write, and sums over positions in segments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmserve.builder.targets.buffers import Place
from llmserve.builder.targets.cuda.recorder import ANY_ROWS, ONE, ROWS, TYPES, Argument, Constants, power_of_two
from llmserve.builder.targets.cuda.tiles import FEW_ROWS, MANY_ROWS, SPLIT_ROWS
from llmserve.builder.targets.cuda.values import Turning, Values
from llmserve.engine.cuda.layout import ITEM_BYTES, Address, Extent, Room
from llmserve.models.graph import Op, OpKind

LEAST_TILE = 16  # of a product of tiles
NUM_WARPS = 8  # of a run of positions: the same for both kernels, since sums over a tile depend on it


class AttentionLowering(Values):
    @property
    def _query_tokens(self) -> int:
        """The same in all layers, since tiles are the step's."""
        groups = [
            int(op.number("num_heads")) // int(op.number("num_kv_heads"))
            for op in self._program.ops
            if op.kind is OpKind.ATTENTION
        ]
        return max(1, self._tiles.queries // max(groups, default=1))

    def _rope(self, op: Op) -> None:
        inv_freq, scale = op.attrs["inv_freq"], op.number("scale")
        assert isinstance(inv_freq, tuple)
        if (inv_freq, scale) not in self._turnings:
            self._turnings[inv_freq, scale] = self._turning(inv_freq, np.float32(scale))
        self._turned[op.output] = self._turnings[inv_freq, scale]
        self._buffers.assign(op.output, self._buffers[op.inputs[0]])
        if op.inputs[0] in self._wide:
            self._wide.add(op.output)

    def _turning(self, inv_freq: tuple[float, ...], scale: np.float32) -> Turning:
        positions = np.arange(self._max_seq_len, dtype=np.float32)
        angles = np.outer(positions, np.asarray(inv_freq, np.float32)).astype(np.float64)  # products in f32
        cos, sin = (self._record.constant("rope", f(angles).astype(np.float32) * scale) for f in (np.cos, np.sin))
        return Turning(cos, sin, 2 * len(inv_freq))

    def _attention(self, op: Op) -> None:
        _, k, v = op.inputs
        layer, head_dim = str(int(op.number("layer"))), int(op.number("head_dim"))
        num_kv_heads = int(op.number("num_kv_heads"))
        keys, values = (Argument(Address(room.value, layer), TYPES[self._dtype]) for room in (Room.KEYS, Room.VALUES))
        shape = {"HEAD_DIM": head_dim, "NUM_KV_HEADS": num_kv_heads, "BLOCK_SIZE": self._block_size}
        tile_dim = max(power_of_two(head_dim), LEAST_TILE)
        positions, slots = self._input("positions"), self._input("slots")
        turning = self._turned.get(k, self._no_turning(positions))
        self._record.launch(
            "attention.write_cache",
            {"k": self._value(k), "v": self._value(v), "positions": positions, "slots": slots, "cos": turning.cos,
             "sin": turning.sin, "keys": keys, "values": values},
            {**shape, "ROTARY_DIM": turning.rotary_dim, "K_STRIDE": self._buffers[k].stride,
             "V_STRIDE": self._buffers[v].stride, **self._heads(num_kv_heads, tile_dim)},
            self._heads_grid(num_kv_heads, tile_dim),
        )  # fmt: skip
        q_place, queries = self._turned_queries(op, head_dim, tile_dim)
        y = self._new(op)  # never where the queries are, which other programs still read
        if self._uses[_name_of_queries(op)]:
            self._buffers.read((_name_of_queries(op),))
        slopes = op.attrs["alibi_slopes"]
        assert isinstance(slopes, tuple)
        arguments = {
            "q": queries, "keys": keys, "values": values, "tiles": self._input("tiles"),
            "block_tables": self._input("block_tables"),
            "alibi_slopes": self._record.constant("alibi", np.array(slopes, np.float32)) if slopes else positions,
        }  # fmt: skip
        constants = {
            **shape, "GROUP": int(op.number("num_heads")) // num_kv_heads,
            "MAX_BLOCKS": -(-self._max_seq_len // self._block_size), "SCALE": op.number("scale"),
            "SOFT_CAP": op.number("soft_cap"), "WINDOW": int(op.number("window")), "HAS_ALIBI": bool(slopes),
            "Q_STRIDE": q_place.stride, "SEGMENT": self._tiles.segment, "TILE_QUERIES": self._tiles.queries,
            "TILE_KEYS": self._tiles.keys, "TILE_DIM": tile_dim,
        }  # fmt: skip
        self._attend(op, arguments, constants, y)

    def _attend(self, op: Op, arguments: Mapping[str, Argument], constants: Constants, y: Place) -> None:
        """With few rows, a program for each segment of positions where there can be several."""
        num_kv_heads, num_heads = int(op.number("num_kv_heads")), int(op.number("num_heads"))
        head_dim, window = int(op.number("head_dim")), int(op.number("window"))
        output = {"y": self._value(op.output)}
        num_segments, tile_dim = -(-self._max_seq_len // self._tiles.segment), int(constants["TILE_DIM"])
        tiles = Extent(of_tiles=True)
        self._record.launch(
            "attention.attention", {**arguments, **output}, {**constants, "Y_STRIDE": y.stride},
            (tiles, Extent(fixed=num_kv_heads), ONE), num_stages=2, num_warps=NUM_WARPS,
            rows=MANY_ROWS if num_segments > 1 else ANY_ROWS,
        )  # fmt: skip
        if num_segments == 1:
            return
        num_sums = num_segments * SPLIT_ROWS * num_heads
        peaks, totals, parts = self._record.scratch(num_sums, num_sums, num_sums * head_dim)
        found = {"peaks": peaks, "totals": totals, "parts": parts}
        self._record.launch(
            "attention.attention_segments", {**arguments, **found}, {**constants, "MAX_ROWS": SPLIT_ROWS},
            (tiles, Extent(fixed=num_kv_heads), Extent(fixed=num_segments)), rows=FEW_ROWS, num_warps=NUM_WARPS,
        )  # fmt: skip
        merging = {
            "HEAD_DIM": head_dim, "NUM_HEADS": num_heads, "WINDOW": window, "Y_STRIDE": y.stride,
            "MAX_ROWS": SPLIT_ROWS, "SEGMENT": self._tiles.segment, **self._heads(num_heads, tile_dim),
        }  # fmt: skip
        self._record.launch(
            "attention.merge_segments",
            {"positions": self._input("positions"), "slots": self._input("slots"), **found, **output}, merging,
            self._heads_grid(num_heads, tile_dim), rows=FEW_ROWS,
        )  # fmt: skip

    def _turned_queries(self, op: Op, head_dim: int, tile_dim: int) -> tuple[Place, Argument]:
        """Where queries are as attention multiplies them: turned, and in the engine's dtype."""
        q = op.inputs[0]
        source = self._buffers[q]
        if q not in self._turned and q not in self._wide:
            return source, self._value(q)
        turning = self._turned.get(q, self._no_turning(self._input("positions")))
        num_heads = source.width // head_dim
        name = _name_of_queries(op)
        self._uses[name] += 1
        place = self._buffers.new(name, source.width, ITEM_BYTES[self._dtype])
        self._record.launch(
            "attention.turn_queries",
            {"q": self._value(q), "positions": self._input("positions"), "cos": turning.cos, "sin": turning.sin,
             "y": self._value(name)},
            {"HEAD_DIM": head_dim, "ROTARY_DIM": turning.rotary_dim, "Q_STRIDE": source.stride,
             "NUM_HEADS": num_heads, "Y_STRIDE": place.stride, **self._heads(num_heads, tile_dim)},
            self._heads_grid(num_heads, tile_dim),
        )  # fmt: skip
        return place, self._value(name)

    def _heads(self, count: int, tile_dim: int) -> dict[str, int]:
        return {"TILE_HEADS": self._tiles.heads(count, tile_dim), "TILE_DIM": tile_dim}

    def _heads_grid(self, count: int, tile_dim: int) -> tuple[Extent, Extent, Extent]:
        return ROWS, Extent(fixed=-(-count // self._tiles.heads(count, tile_dim))), ONE

    def _no_turning(self, anything: Argument) -> Turning:
        return Turning(anything, anything, 0)


def _name_of_queries(op: Op) -> str:
    return f"{op.output}.queries"
