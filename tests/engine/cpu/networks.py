"""Small networks and engines made from them, without a builder: a Program, its numbers, a compiled file.

`odd_network` has widths that are no multiple of anything, grouped heads, ALiBi or rotary embedding, windows, biases,
normalized q and k: every tail of every kernel in one network. `table_network` is the opposite: its logits are rows of
a table, so that sampling can be tested with any logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import (
    Matrix,
    Scheme,
    WeightPart,
    in_groups,
    quantized_params,
    round_in_groups,
    rounded_tables,
)
from llmserve.builder.reference import ReferenceModel, Run, scaled_and_capped
from llmserve.builder.targets import base as targets
from llmserve.builder.targets.base import CompileJob
from llmserve.builder.targets.cpu.target import CpuTarget
from llmserve.engine.adapters.sealed import AdapterPart
from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.directory.artifact import ENGINE_FILE
from llmserve.models.graph import ACTIVATIONS, PLAIN_ACTIVATIONS, CacheShape, Graph, Op, OpKind, Program, Value
from llmserve.models.spec import Param
from llmserve.scheduler.plan import Chunk, StepPlan

FLOATS: Mapping[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LIMITS = BuildOptions(
    dtype="float32", max_seq_len=96, max_num_tokens=96, max_batch_size=8, tokens_per_block=4, quantization=""
)


@dataclass(frozen=True)
class Network:
    program: Program
    arrays: Mapping[str, NDArray[np.float32]]
    kept: frozenset[str] = frozenset()  # matrices that may not be quantized

    @property
    def params(self) -> list[Param]:
        """Matrices that linear layers read are quantizable, as the architecture files say."""
        kept = self.kept | {op.weights[0] for op in self.program.ops if op.kind is OpKind.EMBED}
        tied = {id(array): name for name, array in reversed(list(self.arrays.items()))}
        return [
            Param(
                name, array.shape, (tied[id(array)],), (array.shape,), quantizable=array.ndim == 2 and name not in kept
            )
            for name, array in self.arrays.items()
        ]

    def quantized(self, options: BuildOptions) -> Mapping[str, Sequence[WeightPart]]:
        found = quantized_params(self.program, self.params, options)
        return {**found, **rounded_tables(self.program, self.params, found)}

    def load(self, name: str, dtype: str) -> NDArray[Any]:
        return self.arrays[name].astype(FLOATS[dtype])

    def compile(self, path: Path, options: BuildOptions) -> Path:
        target = CpuTarget()
        assert not target.problems(self.program, self.params, options)
        load = partial(self.load, dtype=options.dtype)
        parts = self.quantized(options)
        job = CompileJob(self.program, self.params, options, load, lambda what, num_bytes: None, parts=parts)
        with TemporaryDirectory(dir=path.parent) as folder:
            target.compile(job, Path(folder))
            (Path(folder) / ENGINE_FILE).rename(path)
        assert path.stat().st_size == target.engine_bytes(targets.Network(self.program, self.params, options), parts)
        return path

    def reference(self, options: BuildOptions, adapter: Sequence[AdapterPart] = ()) -> ReferenceModel:
        """The numpy forward with the same weights; integer weights and activations where the engine has them."""
        parts = self.quantized(options)
        return FakeQuantModel(self.program, self.arrays, options, quantized=parts, adapter=adapter)


class FakeQuantModel(ReferenceModel):
    """The reference, with integer arithmetic spelled out in numpy for the layers that an engine quantizes."""

    def __init__(
        self,
        program: Program,
        arrays: Mapping[str, NDArray[Any]],
        options: BuildOptions,
        *,
        quantized: Mapping[str, Sequence[WeightPart]],
        adapter: Sequence[AdapterPart] = (),
    ) -> None:
        rounded = {name: array.astype(FLOATS[options.dtype]).astype(np.float32) for name, array in arrays.items()}
        cache = CpuTarget().cache_format(options)
        if options.target != CpuTarget.name:
            cache = replace(cache, mixes_heads=False)
        super().__init__(program, lambda name: rounded[name], quantized=quantized, cache=cache, adapter=adapter)
        self._arrays = rounded
        self._parts = quantized

    def _linear(self, op: Op, inputs: Sequence[Matrix], runs: Sequence[Run]) -> list[Matrix]:
        if op.weights[0] not in self._parts:
            return super()._linear(op, inputs, runs)
        return [self._integer_linear(op, x) for x in inputs]

    def _integer_linear(self, op: Op, x: Matrix) -> Matrix:
        weight, parts = self._arrays[op.weights[0]], self._parts[op.weights[0]]
        products = [integer_product(x, weight[part.begin : part.end], part.scheme) for part in parts]
        y: Matrix = np.concatenate(products, axis=1)
        y = y + self._arrays[op.weights[1]] if len(op.weights) > 1 else y
        self._add_adapter(op.weights[0], round_in_groups(x, parts[0].scheme.format.activations), y)
        return scaled_and_capped(op, y) if op.kind is OpKind.LOGITS else y


def integer_product(x: NDArray[np.float32], weight: NDArray[np.float32], scheme: Scheme) -> NDArray[np.float32]:
    """x @ weight.T with both sides rounded to integers, as an engine rounds them."""
    groups = in_groups(x, scheme.format.activations)
    peak = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.where(peak > 0, np.float32(127) / np.where(peak > 0, peak, 1), 0).astype(np.float32)
    found = scheme.quantize(weight)
    values = in_groups(found.centered, scheme.format)
    exact = np.einsum("rgi,cgi->gcr", np.rint(groups * inverse), values, dtype=float)
    scales = (peak / np.float32(127))[:, :, 0].T[:, None] * found.group_scales.astype(np.float64).T[:, :, None]
    product: NDArray[np.float32] = ((exact * scales).sum(axis=0).T * found.row_scale).astype(np.float32)
    return product


def odd_network(
    *,
    alibi: bool = False,
    peculiar: bool = False,
    head_norms: bool = True,
    experts: bool = False,
    plain: bool = False,
    states: bool = False,
    layers: int = 3,
    seed: int = 0,
) -> Network:
    """`peculiar`: with every attribute that few networks have, norms after the blocks, two rotary embeddings, and an
    embedding that is the head, too.
    `experts`: with mixtures of them, beside a gated MLP.
    `plain`: with layer norms, MLPs without a gate, one beside the attention, queries that grow, windows that are
    stretches, heads of one length and a bias of the head; with `experts` other routers, too.
    `states`: with a gated delta net, or a convolution and a scan, beside each attention, whose output is gated, too.
    The second attention reads what the first one keeps, the third has other heads."""
    rng = np.random.default_rng(seed)
    hidden, heads, kv_heads, head_dim, inner, vocab = 64 if experts else 42, 6, 2, 10, 37, 83
    arrays: dict[str, NDArray[np.float32]] = {}

    def param(name: str, *shape: int, near: float = 0.0) -> str:
        spread = 0.3 if len(shape) == 1 else 1.0 / np.sqrt(shape[-1])
        arrays[name] = (near + spread * rng.standard_normal(shape)).astype(np.float32)
        return name

    offset = 0.5 if peculiar else 0.0

    def norm(x: Value, name: str, eps: float = 1e-5, groups: int = 1) -> Value:
        if plain:
            with_bias = name.endswith(("mlp_norm", "0.norm"))
            biases = {"bias": param(f"{name}.bias", x.width)} if with_bias else {"offset": 0.25}
            return g.layer_norm(x, param(name, x.width, near=1.0), eps=eps, groups=groups, **biases)
        width = x.width // groups
        return g.rms_norm(x, param(name, width, near=1.0 - offset), eps=eps, groups=groups, offset=offset)

    def delta_net(h: Value, i: int) -> Value:
        """The values of a head take a vector and a part of one, or four and a part."""
        net_heads, key_heads, key_dim, value_dim = ((6, 2, 9, 20), (0, 0, 0, 0), (2, 1, 19, 70))[i]
        width = 2 * key_heads * key_dim + net_heads * value_dim
        qkv = g.linear(h, param(f"{i}.net", width, hidden), width)
        qkv = g.convolution(qkv, param(f"{i}.conv", width, 4), taps=4, silu=True)
        gates = g.linear(h, param(f"{i}.net_gates", 2 * net_heads, hidden), 2 * net_heads)
        heads_of = {"num_heads": net_heads, "num_key_heads": key_heads, "key_dim": key_dim}
        y = g.delta_rule(qkv, gates, param(f"{i}.decay", net_heads), param(f"{i}.decay_bias", net_heads), **heads_of)
        return g.linear(y, param(f"{i}.net_out", hidden, y.width), hidden)

    def short_convolution(h: Value, i: int) -> Value:
        y = g.multiply(h, g.linear(h, param(f"{i}.net_gate", hidden, hidden), hidden))
        return g.multiply(
            g.convolution(y, param(f"{i}.conv", hidden, 3), taps=3, bias=param(f"{i}.conv_bias", hidden)), h
        )

    def streams(x: Value, i: int) -> Value:
        """Three, mixed with each other and with what passes of one, of which one goes on."""
        others = g.linear(x, param(f"{i}.streams", 2 * hidden, hidden), 2 * hidden)
        spread = g.spread(x, others, least=1e-3)
        coefficients = g.activation(g.linear(x, param(f"{i}.coefficients", 9, hidden), 9), activation="tanh")
        mixed = g.mix(spread, spread, coefficients, groups=3)
        mixed = g.mix(mixed, g.over_threshold(x, deviations=0.3), groups=3, offset=-0.5, first=1)
        return g.scale(g.slice(mixed, hidden, hidden), param(f"{i}.scales", hidden, near=0.5))

    def scan(h: Value, i: int) -> Value:
        """The columns of a head take four vectors and a part of one."""
        net_heads, net_groups, size, width = 4, 2, 11, 4 * 70
        joined = g.linear(h, param(f"{i}.scan", width + 4 * size + 4, hidden), width + 4 * size + 4)
        xbc = g.convolution(
            g.slice(joined, 0, width + 4 * size), param(f"{i}.scan_conv", width + 4 * size, 2), taps=2, silu=True
        )
        weights = (param(f"{i}.a", net_heads), param(f"{i}.step_bias", net_heads), param(f"{i}.skip", net_heads))
        steps = g.slice(joined, width + 4 * size, net_heads)
        y = g.selective_scan(xbc, steps, weights, num_heads=net_heads, num_groups=net_groups, state_size=size)
        y = g.rms_norm(y, param(f"{i}.scan_norm", width, near=1.0), eps=1e-5, groups=net_groups, own_weights=True)
        return g.linear(y, param(f"{i}.scan_out", hidden, width), hidden)

    g = Graph(CacheShape(layers, kv_heads, head_dim), vocab)
    x = g.embed(param("embed", vocab, hidden), hidden, scale=1.7 if peculiar else 1.0)
    cached: list[tuple[Value, Value]] = []  # keys and values of layers
    for i in range(layers):
        if states and i == 2:  # smaller than the others
            kv_heads, head_dim = 1, 14
        qkv_width = (heads + 2 * kv_heads) * head_dim
        h = norm(x, f"{i}.norm")
        qkv = g.linear(h, param(f"{i}.qkv", qkv_width, hidden), qkv_width, bias=param(f"{i}.qkv_bias", qkv_width))
        q = g.slice(qkv, 0, heads * head_dim)
        k = g.slice(qkv, heads * head_dim, kv_heads * head_dim)
        v = g.slice(qkv, (heads + kv_heads) * head_dim, kv_heads * head_dim)
        if head_norms:
            q = norm(q, f"{i}.q_norm", 1e-6, heads)
            k = norm(k, f"{i}.k_norm", 1e-6, kv_heads)
        if plain and i != 1:
            q = g.scale_by_position(q, strength=0.5, interval=7, shift=i)
        if not alibi:
            frequencies = tuple(float(10000.0 ** (-j / head_dim)) for j in range(0, head_dim, 2))
            if peculiar and i != 1:
                frequencies = frequencies[:3]
            q = g.rope(q, head_dim=head_dim, inv_freq=frequencies, scale=1.1)
            k = g.rope(k, head_dim=head_dim, inv_freq=frequencies, scale=1.1)
        if plain and i == 2:
            q, k = (g.rms_norm(x, None, eps=1e-3, groups=x.width // head_dim) for x in (q, k))
        cached.append((k, v))
        lender = 0 if states and i == 1 else i
        a = g.attention(
            q, *cached[lender], layer=lender, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
            scale=head_dim**-0.5,
            window=(0, 7, 2)[i], soft_cap=1.5 if peculiar else 0.0,
            sinks=param(f"{i}.sinks", heads) if experts else None, chunked=plain and i == 1,
            alibi_slopes=tuple(2.0 ** -(j + 1) for j in range(heads)) if alibi else (),
        )  # fmt: skip
        if states:
            a = g.sigmoid_gate(a, g.linear(h, param(f"{i}.out_gate", a.width, hidden), a.width), silu=i == 1)
        y = g.linear(a, param(f"{i}.out", hidden, heads * head_dim), hidden)
        if states:
            y = g.add(y, (delta_net if i != 1 else short_convolution)(h, i))
            y = g.add(y, scan(h, i)) if i == 1 else y
        x = g.add(x, norm(y, f"{i}.post_norm") if peculiar else y)
        if not (plain and i == 1):
            h = norm(x, f"{i}.mlp_norm")
        if plain:
            y = g.linear(h, param(f"{i}.up", inner, hidden), inner, bias=param(f"{i}.up_bias", inner))
            y = g.activation(y, activation=PLAIN_ACTIVATIONS[i])
        else:
            gate_up = g.linear(h, param(f"{i}.gate_up", 2 * inner, hidden), 2 * inner)
            activation = ("gelu", "gelu_tanh", "silu")[i] if peculiar else "silu"
            y = g.gated_activation(gate_up, activation=activation)
        y = g.linear(y, param(f"{i}.down", hidden, inner), hidden)
        if experts:
            y = g.sigmoid_gate(y, g.linear(h, param(f"{i}.gate", 1, hidden), 1))
            n = 20 if plain else 19
            own = ({"tolerance": 0.6}, {"groups": (5, 3)}, {"groups": (4, 2), "by_best": True})[i] if plain else {}
            routes = g.route(
                g.linear(h, param(f"{i}.router", n, hidden), n), experts_per_token=3, renormalize=i > 0,
                sigmoid=i == 1, bias=param(f"{i}.correction", n) if i and (i > 1 or not plain) else None,
                factor=(1.0, 1.0, 2.5)[i], scales=param(f"{i}.scales", n) if i != 1 else None, **own,
            )  # fmt: skip
            gateless = plain and i == 2
            inner_width = 96 if gateless else 48
            matrices = (
                param(f"{i}.experts.gate_up", n * 96, hidden),
                param(f"{i}.experts.down", n * hidden, inner_width),
            )
            biases = (param(f"{i}.gate_up_bias", n * 96), param(f"{i}.down_bias", n * hidden)) if i else None
            activation = (*ACTIVATIONS[:2], "relu2" if gateless else "clamped")[i]
            of_experts = g.experts(
                h,
                routes,
                *matrices,
                num_experts=n,
                activation=activation,
                biases=biases,
                scales_inputs=plain and i == 1,
                plain=gateless,
            )
            y = g.add(of_experts, y)
        x = g.add(y, x)
        if states:
            x = g.scale(x, param(f"{i}.scale", 1, near=0.8))
            x = g.add(x, streams(x, i)) if i == 1 else x
    x = norm(g.select_rows(x), "norm")
    arrays["head"] = arrays["embed"] if peculiar else arrays[param("head", vocab, hidden)]
    head_bias = param("head_bias", vocab) if plain else None
    g.logits(x, "head", bias=head_bias, scale=0.8 if peculiar else 1.0, soft_cap=2.0 if peculiar else 0.0)
    kept = frozenset(name for name in arrays if name.endswith((".gate", ".router", "conv", ".net_gates")))
    return Network(g.program(), arrays, kept)


def encoder_network(*, scores: bool = False) -> Network:
    """One that makes a row of each sequence, of odd widths: its mean, or a score of its first token."""
    rng = np.random.default_rng(1)
    hidden, heads, head_dim, inner, vocab, layers = 42, 3, 10, 37, 83, 2
    arrays: dict[str, NDArray[np.float32]] = {}

    def param(name: str, *shape: int, near: float = 0.0) -> str:
        spread = 0.3 if len(shape) == 1 else 1.0 / np.sqrt(shape[-1])
        arrays[name] = (near + spread * rng.standard_normal(shape)).astype(np.float32)
        return name

    def linear(x: Value, name: str, width: int) -> Value:
        return g.linear(x, param(name, width, x.width), width, bias=param(f"{name}.bias", width))

    def norm(x: Value, name: str) -> Value:
        return g.layer_norm(x, param(name, hidden, near=1.0), eps=1e-5, bias=param(f"{name}.bias", hidden))

    g = Graph(CacheShape(layers, heads, head_dim), vocab)
    x = g.add(g.embed(param("embed", vocab, hidden), hidden), g.embed_segment(param("segments", 2, hidden), hidden))
    x = norm(g.add(x, g.embed_position(param("positions", 99, hidden), hidden, begin=2)), "norm")
    for i in range(layers):
        qkv = linear(x, f"{i}.qkv", 3 * heads * head_dim)
        q, k, v = (g.slice(qkv, n * heads * head_dim, heads * head_dim) for n in range(3))
        a = g.attention(
            q, k, v, layer=i, num_heads=heads, num_kv_heads=heads, head_dim=head_dim, scale=0.3, bidirectional=True
        )
        x = norm(g.add(linear(a, f"{i}.out", hidden), x), f"{i}.norm")
        y = g.activation(linear(x, f"{i}.up", inner), activation="gelu")
        x = norm(g.add(linear(y, f"{i}.down", hidden), x), f"{i}.mlp_norm")
    x = g.pool(x, "first" if scores else "mean", normalize=not scores)
    if scores:
        x = g.activation(linear(x, "scorer", hidden), activation="tanh")
        g.logits(x, param("score", 1, hidden), bias=param("score.bias", 1), width=1)
    return Network(g.program(), arrays, frozenset(("scorer", "score", "segments", "positions")))


def table_network(table: NDArray[np.float32]) -> Network:
    """The logits after token t are row t of `table` [vocab, vocab]."""
    vocab = len(table)
    g = Graph(CacheShape(1, 1, 2), vocab)
    g.logits(g.select_rows(g.embed("table", vocab)), "identity")
    return Network(g.program(), {"table": table, "identity": np.eye(vocab, dtype=np.float32)})


def wide_table_network(table: NDArray[np.float32]) -> Network:
    """The same for a table [rows, vocab] with fewer rows; its numbers must be finite."""
    num_rows, vocab = table.shape
    g = Graph(CacheShape(1, 1, 2), vocab)
    g.logits(g.select_rows(g.embed("identity", num_rows)), "columns")
    identity = np.eye(vocab, num_rows, dtype=np.float32)
    return Network(g.program(), {"identity": identity, "columns": np.ascontiguousarray(table.T)})


class Stepper(Protocol):
    """What `CpuRunner` and a wrapper around it have in common."""

    @property
    def info(self) -> RunnerInfo: ...

    def step(self, plan: StepPlan) -> StepResult: ...


def prefill(runner: Stepper, ids: Sequence[int], *, blocks: Sequence[int] = (), first_block: int = 0) -> Chunk:
    """One chunk with the whole prompt, logits wanted."""
    needed = -(-len(ids) // runner.info.block_size)
    table = blocks or range(first_block, first_block + needed)
    return Chunk(0, ids, 0, list(table)[:needed], return_logits=True)


def all_logits(runner: Stepper, ids: Sequence[int]) -> NDArray[np.float32]:
    return runner.step(StepPlan((prefill(runner, ids),))).logits[0]


def random_ids(vocab_size: int, count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return ids
