"""Lowers attention of the CUDA engine: rotations, the cache write, and sums over positions in segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np

from llmserve.builder.targets.buffers import Place
from llmserve.builder.targets.cuda.recorder import ANY_ROWS, ONE, ROWS, Argument, Constants, power_of_two
from llmserve.builder.targets.cuda.rounded import GROUP, RoundedValues
from llmserve.builder.targets.cuda.tiles import MANY, Tiles
from llmserve.builder.targets.cuda.values import Turning
from llmserve.engine.cuda.layout import ITEM_BYTES, TYPES, Address, CacheHead, Extent, LayerHeads, Room
from llmserve.models.graph import Op, OpKind, Program
from llmserve.models.number_formats import CACHES, NumberFormat

LEAST_TILE = 16  # of a product of tiles
# Above these, tiles over a float cache have a half and a quarter of the queries: with more, registers spill. Above the
# second, they have half the keys, because shared memory holds no more.
WIDE_HEAD, WIDEST_HEAD = 128, 256
NO_STRIDES = {"KEY_STRIDE": 0, "VALUE_STRIDE": 0}
SPLIT_ROWS = 64  # for at most so many rows, separate programs process segments of positions
FEW_ROWS, MANY_ROWS = (1, SPLIT_ROWS), (SPLIT_ROWS + 1, MANY)


class Warps(TypedDict):
    num_warps: int
    half_on: tuple[str, ...]


class Cache(NamedTuple):
    """Keys and values of a layer, in the form that kernels expect."""

    arguments: Mapping[str, Argument]
    constants: Constants
    format: NumberFormat


class Queries(NamedTuple):
    """Queries in the form that attention multiplies."""

    arguments: Mapping[str, Argument]
    constants: Constants
    made: Sequence[str]  # values that only attention reads


class AttentionLowering(RoundedValues):
    @property
    def _query_tokens(self) -> int:
        """Tokens in a tile of queries. The same in all layers, because tiles belong to the step."""
        return max(1, self._tile_queries // max(groups(self._program), default=1))

    @property
    def _tile_queries(self) -> int:
        """Rows in a tile of queries. The same in all layers."""
        return tile_queries(self._program, self._tiles, self._cache_dtype)

    def _rope(self, op: Op) -> None:
        inv_freq, scale = op.attrs["inv_freq"], op.number("scale")
        assert isinstance(inv_freq, tuple)
        if (inv_freq, scale) not in self._turnings:
            self._turnings[inv_freq, scale] = self._turning(inv_freq, np.float32(scale))
        turning = self._turnings[inv_freq, scale]
        if op.output in self._turned_for_others:
            y = self._new(op)
            self._turn("attention.turn", op, turning, {"y": self._value(op.output)}, {"Y_STRIDE": y.stride})
            return
        self._turned[op.output] = turning
        self._buffers.assign(op.output, self._buffers[op.inputs[0]])
        if op.inputs[0] in self._wide:
            self._wide.add(op.output)

    def _turning(self, inv_freq: tuple[float, ...], scale: np.float32) -> Turning:
        positions = np.arange(self._max_seq_len, dtype=np.float32)
        angles = np.outer(positions, np.asarray(inv_freq, np.float32)).astype(np.float64)  # products in f32
        cos, sin = (self._record.constant("rope", f(angles).astype(np.float32) * scale) for f in (np.cos, np.sin))
        return Turning(cos, sin, 2 * len(inv_freq))

    def _attention(self, op: Op) -> None:
        cache = self._cache_of(op)
        q, k, _ = op.inputs
        layer = int(op.number("layer"))
        is_written = layer in self._written
        self._written.add(layer)
        if not cache.format.is_rounded and q in self._turned:
            assert self._turned[q] == self._turned.get(k), "queries and keys must be rotated alike"
            queries = self._turn_and_write(op, cache, is_written=is_written)
        else:
            if not is_written:
                self._write_cache(op, cache)
            queries = self._rounded_queries(op, cache.format) if cache.format.is_rounded else self._queries_of(q)
        y = self._new(op)  # never in the place of the queries, which other programs still read
        if queries.made:
            self._buffers.read(queries.made)
        slopes, nothing = op.attrs["alibi_slopes"], self._input("positions")
        assert isinstance(slopes, tuple)
        arguments = {
            **queries.arguments, "keys": cache.arguments["keys"],
            "key_scales": cache.arguments.get("key_scales", nothing), "values": cache.arguments["values"],
            "value_scales": cache.arguments.get("value_scales", nothing), "tiles": self._input("tiles"),
            "block_tables": self._input("block_tables"),
            "alibi_slopes": self._record.constant("alibi", np.array(slopes, np.float32)) if slopes else nothing,
        }  # fmt: skip
        constants = {
            **NO_STRIDES, **cache.constants, **queries.constants, "FORMAT": cache.format.precision,
            "GROUP": int(op.number("num_heads")) // int(op.number("num_kv_heads")),
            "MAX_BLOCKS": -(-self._max_seq_len // self._block_size), "SCALE": op.number("scale"),
            "SOFT_CAP": op.number("soft_cap"), "WINDOW": int(op.number("window")), "HAS_ALIBI": bool(slopes),
            "SEGMENT": self._tiles.segment, "TILE_QUERIES": self._tile_queries,
            "TILE_KEYS": self._tile_keys(op, cache), "TILE_DIM": _tile_dim(op, LEAST_TILE),
        }  # fmt: skip
        self._attend(op, arguments, constants, y)

    def _cache_of(self, op: Op) -> Cache:
        """The cache of an attention's layer."""
        layer, head_dim = str(int(op.number("layer"))), int(op.number("head_dim"))
        head = CacheHead(self._cache_dtype, self._block_size, head_dim)
        arguments = {}
        for numbers, scales, room in (("keys", "key_scales", Room.KEYS), ("values", "value_scales", Room.VALUES)):
            arguments[numbers] = Argument(Address(room.value, layer), TYPES[self._cache_dtype])
            if head.format.is_rounded:
                arguments[scales] = Argument(Address(room.value, layer, head.scales_begin), TYPES[head.format.scales])
        constants = {
            "HEAD_DIM": head_dim, "NUM_KV_HEADS": int(op.number("num_kv_heads")), "BLOCK_SIZE": self._block_size,
        }  # fmt: skip
        if head.format.is_rounded:
            constants |= {"KEY_STRIDE": head.key_bytes, "VALUE_STRIDE": head.value_bytes}
        return Cache(arguments, constants, head.format)

    def _write_cache(self, op: Op, cache: Cache) -> None:
        _, k, v = op.inputs
        positions, num_kv_heads = self._input("positions"), int(op.number("num_kv_heads"))
        turning = self._turned.get(k, self._no_turning(positions))
        tile_dim = _tile_dim(op, cache.format.group or LEAST_TILE)
        self._record.launch(
            "attention_int8.write_cache" if cache.format.is_rounded else "attention.write_cache",
            {"k": self._value(k), "v": self._value(v), "positions": positions, "slots": self._input("slots"),
             "cos": turning.cos, "sin": turning.sin, **cache.arguments},
            {**cache.constants, "ROTARY_DIM": turning.rotary_dim, "K_STRIDE": self._buffers[k].stride,
             "V_STRIDE": self._buffers[v].stride, **self._heads(num_kv_heads, tile_dim)},
            self._heads_grid(num_kv_heads, tile_dim),
        )  # fmt: skip

    def _attend(self, op: Op, arguments: Mapping[str, Argument], constants: Constants, y: Place) -> None:
        """Launches attention. For few rows, each segment of positions has its own program, if there can be several."""
        num_kv_heads, num_heads = int(op.number("num_kv_heads")), int(op.number("num_heads"))
        head_dim, window = int(op.number("head_dim")), int(op.number("window"))
        output = {"y": self._value(op.output)}
        num_segments, tile_dim = -(-self._max_seq_len // self._tiles.segment), int(constants["TILE_DIM"])
        tiles = Extent(of_tiles=True)
        warps = _warps(tile_dim, is_rounded=constants["FORMAT"] != "float")
        self._record.launch(
            "attention.attention", {**arguments, **output}, {**constants, "Y_STRIDE": y.stride},
            (tiles, Extent(fixed=num_kv_heads), ONE), num_stages=2, **warps,
            rows=MANY_ROWS if num_segments > 1 else ANY_ROWS,
        )  # fmt: skip
        rounding = self._rounded_at_once(op.output, y.width) if self._can_be_rounded(op) else None
        if num_segments == 1:
            if rounding:
                self._launch_rounding(op.output, rounding)
            return
        if rounding:
            self._launch_rounding(op.output, rounding, MANY_ROWS)
        num_sums = num_segments * SPLIT_ROWS * num_heads
        peaks, totals, parts = self._record.scratch(num_sums, num_sums, num_sums * head_dim)
        found = {"peaks": peaks, "totals": totals, "parts": parts}
        self._record.launch(
            "attention.attention_segments", {**arguments, **found}, {**constants, "MAX_ROWS": SPLIT_ROWS},
            (tiles, Extent(fixed=num_kv_heads), Extent(fixed=num_segments)), rows=FEW_ROWS, **warps,
        )  # fmt: skip
        merging = {
            "HEAD_DIM": head_dim, "NUM_HEADS": num_heads, "WINDOW": window, "MAX_ROWS": SPLIT_ROWS,
            "SEGMENT": self._tiles.segment, **self._heads(num_heads, tile_dim),
        }  # fmt: skip
        inputs = {"positions": self._input("positions"), "slots": self._input("slots")}
        grid = self._heads_grid(num_heads, tile_dim)
        if rounding:
            places, sizes = rounding
            sizes = {name: size for name, size in sizes.items() if name != "WIDTH"}
            self._record.launch(
                "attention.merge_and_round", {**inputs, **found, **places}, {**merging, **sizes}, grid, rows=FEW_ROWS
            )
        else:
            constants = {**merging, "Y_STRIDE": y.stride}
            self._record.launch(
                "attention.merge_segments", {**inputs, **found, **output}, constants, grid, rows=FEW_ROWS
            )

    def _can_be_rounded(self, op: Op) -> bool:
        """Whether only products of integers read the output of `op`, and its heads are whole groups."""
        head_dim = int(op.number("head_dim"))
        return op.output in self._only_rounded and head_dim % GROUP == 0 and head_dim == power_of_two(head_dim)

    def _queries_of(self, value: str, *made: str) -> Queries:
        """Queries in the engine's dtype."""
        assert value not in self._wide
        arguments = {"q": self._value(value), "q_scales": self._input("positions")}
        return Queries(arguments, {"Q_STRIDE": self._buffers[value].stride, "SCALES_STRIDE": 0}, made)

    def _turn_and_write(self, op: Op, cache: Cache, *, is_written: bool) -> Queries:
        """Rotate queries, keys and values in one launch. Its programs for keys and values come last, and are omitted if
        another op has written the cache."""
        turning, name = self._turned[op.inputs[0]], f"{op.output}.queries"
        self._uses[name] += 1
        place = self._buffers.new(name, self._buffers[op.inputs[0]].width, ITEM_BYTES[self._dtype])
        num_heads, num_kv_heads = int(op.number("num_heads")), int(op.number("num_kv_heads"))
        tile_dim = _tile_dim(op, LEAST_TILE)
        tile = self._tiles.heads(num_heads, tile_dim)
        q, k, v = op.inputs
        strides = {f"{letter}_STRIDE": self._buffers[x].stride for letter, x in zip("QKV", op.inputs, strict=True)}
        self._record.launch(
            "attention.turn_and_write",
            {"q": self._value(q), "k": self._value(k), "v": self._value(v), "positions": self._input("positions"),
             "slots": self._input("slots"), "cos": turning.cos, "sin": turning.sin, "y": self._value(name),
             **cache.arguments},
            {**cache.constants, **strides, "ROTARY_DIM": turning.rotary_dim, "NUM_HEADS": num_heads,
             "Y_STRIDE": place.stride, "TILE_HEADS": tile, "TILE_DIM": tile_dim},
            (ROWS, Extent(fixed=-(-num_heads // tile) - (0 if is_written else -num_kv_heads // tile)), ONE),
        )  # fmt: skip
        return self._queries_of(name, name)

    def _rounded_queries(self, op: Op, format: NumberFormat) -> Queries:
        """Rotated queries as integers; heads are padded to whole groups of dimensions."""
        num_heads, num_groups = int(op.number("num_heads")), format.num_groups(int(op.number("head_dim")))
        names = f"{op.output}.queries", f"{op.output}.scales"
        self._uses.update(names)
        integers = self._buffers.new(names[0], num_heads * num_groups * format.group, ITEM_BYTES[format.name])
        scales = self._buffers.new(names[1], num_heads * num_groups)
        made = {"integers": self._argument(integers, format.name), "scales": self._argument(scales, format.scales)}
        strides = {"Y_STRIDE": integers.stride, "SCALES_STRIDE": scales.stride, "SCALE": op.number("scale")}
        turning = self._turned.get(op.inputs[0], self._no_turning(self._input("positions")))
        self._turn("attention_int8.round_queries", op, turning, made, strides, least_tile=format.group)
        return Queries(
            {"q": made["integers"], "q_scales": made["scales"]},
            {"Q_STRIDE": integers.stride, "SCALES_STRIDE": scales.stride}, names,
        )  # fmt: skip

    def _turn(
        self, function: str, op: Op, turning: Turning, made: Mapping[str, Argument], constants: Constants, *,
        least_tile: int = LEAST_TILE,
    ) -> None:  # fmt: skip
        """A kernel that rotates the heads of a value."""
        q, head_dim, tile_dim = op.inputs[0], int(op.number("head_dim")), _tile_dim(op, least_tile)
        num_heads = self._buffers[q].width // head_dim
        self._record.launch(
            function,
            {"q": self._value(q), "positions": self._input("positions"), "cos": turning.cos, "sin": turning.sin,
             **made},
            {"HEAD_DIM": head_dim, "ROTARY_DIM": turning.rotary_dim, "NUM_HEADS": num_heads,
             "Q_STRIDE": self._buffers[q].stride, **constants, **self._heads(num_heads, tile_dim)},
            self._heads_grid(num_heads, tile_dim),
        )  # fmt: skip

    def _tile_keys(self, op: Op, cache: Cache) -> int:
        most, is_widest = self._tiles.keys, op.number("head_dim") > WIDEST_HEAD
        return max(most // 2, LEAST_TILE) if is_widest and not cache.format.is_rounded else most

    def _heads(self, count: int, tile_dim: int) -> dict[str, int]:
        return {"TILE_HEADS": self._tiles.heads(count, tile_dim), "TILE_DIM": tile_dim}

    def _heads_grid(self, count: int, tile_dim: int) -> tuple[Extent, Extent, Extent]:
        return ROWS, Extent(fixed=-(-count // self._tiles.heads(count, tile_dim))), ONE

    def _no_turning(self, anything: Argument) -> Turning:
        return Turning(anything, anything, 0)


def groups(program: Program) -> set[int]:
    """Query heads per key and value head, in all layers."""
    heads = [(op.number("num_heads"), op.number("num_kv_heads")) for op in _attentions(program)]
    return {int(num_heads) // int(num_kv_heads) for num_heads, num_kv_heads in heads}


def tile_queries(program: Program, tiles: Tiles, cache_dtype: str) -> int:
    """The number of rows in a tile of attention. Small tiles need fewer instructions in answers, where a tile has one
    token. Large ones read the cache less often in prompts, but that does not make integers faster."""
    widest = max((op.number("head_dim") for op in _attentions(program)), default=0)
    is_quarter = CACHES[cache_dtype].is_rounded or widest > WIDEST_HEAD
    least = power_of_two(max(groups(program), default=1))
    wanted = tiles.queries // (4 if is_quarter else 2 if widest > WIDE_HEAD else 1)
    return max(wanted, min(tiles.queries, max(least, LEAST_TILE)))


def layer_heads(program: Program) -> tuple[LayerHeads, ...]:
    """Heads of each layer of the cache; the largest number for a layer that no op reads."""
    cache = program.cache
    found = dict.fromkeys(range(cache.num_layers), LayerHeads(cache.num_kv_heads, cache.head_dim)) | {
        int(op.number("layer")): LayerHeads(int(op.number("num_kv_heads")), int(op.number("head_dim")))
        for op in _attentions(program)
    }
    return tuple(found[layer] for layer in sorted(found))


def _tile_dim(op: Op, least: int) -> int:
    return max(power_of_two(int(op.number("head_dim"))), least)


def _attentions(program: Program) -> list[Op]:
    return [op for op in program.ops if op.kind is OpKind.ATTENTION]


def _warps(tile_dim: int, *, is_rounded: bool) -> Warps:
    """Warps for a run of positions. The same in both kernels, because sums over a tile depend on it."""
    if is_rounded:
        return {"num_warps": 4 if tile_dim <= WIDEST_HEAD else 8, "half_on": ()}
    # Eight warps multiply the same queries twice; four have enough registers only where matrix products leave their
    # operands in shared memory.
    return {"num_warps": 8, "half_on": ("sm_90",) if tile_dim <= WIDE_HEAD else ()}
