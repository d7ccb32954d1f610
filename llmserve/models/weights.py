"""Parameters of a decoder's blocks and their sources in a checkpoint, with the names that most families share.

Tied embeddings: the parameter "head" is a second copy with the same source as "embed". So a target may pack and
quantize the head, which is a matrix product, without touching the embedding, which is a look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from llmserve.models.spec import SCORE, Combine, DecoderSpec, Pairs, Param, Shard, Shares

EMBED_SOURCE = "model.embed_tokens.weight"
HEAD_SOURCE = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"


def decoder(
    spec: DecoderSpec,
    layer: Callable[[int], list[Param]],
    *,
    normalized_head: bool = False,
    head_bias: bool = False,
    norm_bias: bool = False,
    norm_weights: bool = True,
) -> list[Param]:
    """Every parameter in the order of use: embedding, the result of `layer` for each layer, last norm, head."""
    listed = [copied("embed", EMBED_SOURCE, (spec.vocab_size, spec.hidden_size))]
    for i in range(spec.num_layers):
        listed += layer(i)
    listed += norm(spec, "norm", "model.norm", bias=norm_bias) if norm_weights else []
    listed.append(_head(spec, normalized=normalized_head))
    return [*listed, copied("head.bias", HEAD_BIAS, (spec.vocab_size,))] if head_bias else listed


def score(spec: DecoderSpec) -> Param:
    """The row that scores a text's last token: transformers' `score`, or the difference of two rows of the head."""
    shape = (1, spec.hidden_size)
    if spec.pooling is None or not spec.pooling.answers:
        return copied(SCORE, f"{SCORE}.weight", shape)
    head, stored = EMBED_SOURCE if spec.tied_embeddings else HEAD_SOURCE, (spec.vocab_size, spec.hidden_size)
    return Param(SCORE, shape, (head,), (stored,), difference=spec.pooling.answers)


def layer_source(layer: int) -> str:
    return f"model.layers.{layer}"


def norm(spec: DecoderSpec, name: str, module: str, *, bias: bool = False) -> list[Param]:
    shape = (spec.hidden_size,)
    weight = copied(name, f"{module}.weight", shape)
    return [weight, copied(f"{name}.bias", f"{module}.bias", shape)] if bias else [weight]


def qkv(
    spec: DecoderSpec,
    layer: int,
    *,
    fused: str = "",
    bias: bool = False,
    rotary_dim: int = 0,
    gated: bool = False,
    gate: str = "",
) -> list[Param]:
    """Queries, keys and values. `fused`: a module with q, k and v as rows, in this order; empty: one module each.

    `rotary_dim`: the number of elements of each head that are stored as rotary pairs.
    `gated`: the rows of each gate follow those of its query, or the module `gate` has the gates of all heads.
    """
    has_both = gated and not gate
    widths = {"q_proj": spec.q_width * (1 + has_both)} | ({gate: spec.q_width} if gate else {})
    widths |= {"k_proj": spec.kv_width, "v_proj": spec.kv_width}
    if fused:
        widths = {fused: sum(widths.values())}
    rows = {f"{layer_source(layer)}.self_attn.{module}": width for module, width in widths.items()}
    pairs = Pairs(spec.head_dim, rotary_dim) if rotary_dim else None
    found = linear(f"layers.{layer}.attn.qkv", rows, spec.hidden_size, Shard.QKV, bias=bias)
    if has_both:
        return [replace(param, orders=(Shares((spec.head_dim,) * 2), None, None)) for param in found]
    return [replace(param, orders=(pairs, pairs, None)) for param in found] if pairs else found


def norm_rows_of_heads(spec: DecoderSpec, layer: int, modules: Sequence[str], *, rotary_dim: int = 0) -> list[Param]:
    """Norms of q and k with different weights per head: rows of one matrix. `rotary_dim`: as in `qkv`."""
    orders = (Pairs(spec.head_dim, rotary_dim),) if rotary_dim else ()
    return [
        Param(
            f"layers.{layer}.attn.{n}_norm",
            (count * spec.head_dim,),
            (f"{layer_source(layer)}.self_attn.{module}.weight",),
            ((count, spec.head_dim),),
            orders=orders,
        )
        for n, module, count in zip("qk", modules, (spec.num_heads, spec.num_kv_heads), strict=True)
    ]


def norms_of_heads(spec: DecoderSpec, layer: int, modules: Sequence[str]) -> list[Param]:
    """Norms of q and k with different weights per head: one numbered module each."""
    source, shape = f"{layer_source(layer)}.self_attn", (spec.head_dim,)
    return [
        Param(
            f"layers.{layer}.attn.{n}_norm",
            (count * spec.head_dim,),
            tuple(f"{source}.{module}.{head}.weight" for head in range(count)),
            (shape,) * count,
            combine=Combine.CONCAT_ROWS,
        )
        for n, module, count in zip("qk", modules, (spec.num_heads, spec.num_kv_heads), strict=True)
    ]


def head_norms(layer: int, modules: Sequence[str], widths: Sequence[int]) -> list[Param]:
    """Norms of q and k with one weight each."""
    source = f"{layer_source(layer)}.self_attn"
    return [
        copied(f"layers.{layer}.attn.{n}_norm", f"{source}.{module}.weight", (width,))
        for n, module, width in zip("qk", modules, widths, strict=True)
    ]


def output(spec: DecoderSpec, layer: int, *, bias: bool = False) -> list[Param]:
    """The projection after attention."""
    rows = {f"{layer_source(layer)}.self_attn.o_proj": spec.hidden_size}
    return linear(f"layers.{layer}.attn.output", rows, spec.q_width, Shard.COLUMNS, bias=bias)


def gated_mlp(
    spec: DecoderSpec, layer: int, *, module: str = "mlp", fused: str = "", down: str = "down_proj", bias: bool = False
) -> list[Param]:
    """`fused`: a module with gate and up as rows, in this order; empty: one module each."""
    source, name = f"{layer_source(layer)}.{module}", f"layers.{layer}.mlp"
    inner = spec.intermediate_size
    widths = {fused: 2 * inner} if fused else {"gate_proj": inner, "up_proj": inner}
    rows = {f"{source}.{part}": width for part, width in widths.items()}
    return [
        *linear(f"{name}.gate_up", rows, spec.hidden_size, Shard.GATE_UP, bias=bias),
        *linear(f"{name}.down", {f"{source}.{down}": spec.hidden_size}, inner, Shard.COLUMNS, bias=bias),
    ]


def plain_mlp(spec: DecoderSpec, layer: int, *, module: str, up: str, down: str, bias: bool = False) -> list[Param]:
    source, name, inner = f"{layer_source(layer)}.{module}", f"layers.{layer}.mlp", spec.intermediate_size
    return [
        *linear(f"{name}.up", {f"{source}.{up}": inner}, spec.hidden_size, Shard.ROWS, bias=bias),
        *linear(f"{name}.down", {f"{source}.{down}": spec.hidden_size}, inner, Shard.COLUMNS, bias=bias),
    ]


def copied(name: str, source: str, shape: tuple[int, ...]) -> Param:
    return Param(name, shape, (source,), (shape,))


def _head(spec: DecoderSpec, *, normalized: bool) -> Param:
    shape = (spec.vocab_size, spec.hidden_size)
    return Param(
        "head",
        shape,
        sources=(EMBED_SOURCE if spec.tied_embeddings else HEAD_SOURCE,),
        source_shapes=(shape,),
        combine=Combine.NORMALIZE_ROWS if normalized else Combine.COPY,
        shard=Shard.ROWS,
        quantizable=True,
        duplicates=(HEAD_SOURCE,) if spec.tied_embeddings else (),
    )


def linear(name: str, rows: Mapping[str, int], columns: int, shard: Shard, *, bias: bool) -> list[Param]:
    """A weight stacked from the modules in `rows` (module name -> output features), and its bias if it has one."""
    combine = Combine.COPY if len(rows) == 1 else Combine.CONCAT_ROWS
    height = sum(rows.values())
    weight = Param(
        name,
        (height, columns),
        sources=tuple(f"{module}.weight" for module in rows),
        source_shapes=tuple((count, columns) for count in rows.values()),
        combine=combine,
        shard=shard,
        quantizable=True,
    )
    if not bias:
        return [weight]
    return [
        weight,
        Param(
            f"{name}.bias",
            (height,),
            sources=tuple(f"{module}.bias" for module in rows),
            source_shapes=tuple((count,) for count in rows.values()),
            combine=combine,
            shard=Shard.NONE if shard is Shard.COLUMNS else shard,
        ),
    ]
