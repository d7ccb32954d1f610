"""The decoder that all our architectures share: pre-norm, attention, gated MLP. Architecture files differ in the spec.

Tied embeddings: the parameter "head" is a second copy with the same source as "embed". So a target may pack and
quantize the head, which is a matrix product, without touching the embedding, which is a look-up.
"""

from __future__ import annotations

from llmserve.models.graph import CacheShape, Graph, Program, Value
from llmserve.models.spec import Combine, DecoderSpec, Param, Shard

EMBED_SOURCE = "model.embed_tokens.weight"
HEAD_SOURCE = "lm_head.weight"


def params(spec: DecoderSpec) -> list[Param]:
    """Every parameter of the Program and its origin, in the order of use."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    listed = [_copy("embed", EMBED_SOURCE, (vocab, hidden))]
    for i in range(spec.num_layers):
        listed += _attention_params(spec, f"layers.{i}", f"model.layers.{i}")
        listed += _mlp_params(spec, f"layers.{i}", f"model.layers.{i}")
    return [*listed, _copy("norm", "model.norm.weight", (hidden,)), _head_param(spec)]


def forward(spec: DecoderSpec) -> Program:
    g = Graph(CacheShape(spec.num_layers, spec.num_kv_heads, spec.head_dim), spec.vocab_size)
    x = g.embed("embed", spec.hidden_size)
    for i in range(spec.num_layers):
        x = g.add(x, _attention(g, spec, g.rms_norm(x, f"layers.{i}.attn.norm", eps=spec.norm_eps), i))
        x = g.add(x, _mlp(g, spec, g.rms_norm(x, f"layers.{i}.mlp.norm", eps=spec.norm_eps), i))
    g.logits(g.rms_norm(g.select_rows(x), "norm", eps=spec.norm_eps), "head")
    return g.program()


def _attention(g: Graph, spec: DecoderSpec, x: Value, layer: int) -> Value:
    name = f"layers.{layer}.attn"
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    bias = f"{name}.qkv.bias" if spec.qkv_bias else None
    qkv = g.linear(x, f"{name}.qkv", q_width + 2 * kv_width, bias=bias)
    q, k = g.slice(qkv, 0, q_width), g.slice(qkv, q_width, kv_width)
    v = g.slice(qkv, q_width + kv_width, kv_width)
    if spec.qk_norm:
        q = g.rms_norm(q, f"{name}.q_norm", eps=spec.norm_eps, groups=spec.num_heads)
        k = g.rms_norm(k, f"{name}.k_norm", eps=spec.norm_eps, groups=spec.num_kv_heads)
    if spec.inv_freq:
        q = g.rope(q, head_dim=spec.head_dim, inv_freq=spec.inv_freq, scale=spec.rope_scale)
        k = g.rope(k, head_dim=spec.head_dim, inv_freq=spec.inv_freq, scale=spec.rope_scale)
    y = g.attention(
        q,
        k,
        v,
        layer=layer,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5,
        window=spec.windows[layer] if spec.windows else 0,
        alibi_slopes=spec.alibi_slopes,
    )
    return g.linear(y, f"{name}.output", spec.hidden_size, bias=f"{name}.output.bias" if spec.output_bias else None)


def _mlp(g: Graph, spec: DecoderSpec, x: Value, layer: int) -> Value:
    name = f"layers.{layer}.mlp"
    bias = f"{name}.gate_up.bias" if spec.mlp_bias else None
    gate_up = g.linear(x, f"{name}.gate_up", 2 * spec.intermediate_size, bias=bias)
    bias = f"{name}.down.bias" if spec.mlp_bias else None
    return g.linear(g.gated_activation(gate_up), f"{name}.down", spec.hidden_size, bias=bias)


def _attention_params(spec: DecoderSpec, name: str, source: str) -> list[Param]:
    hidden, q_width = spec.hidden_size, spec.num_heads * spec.head_dim
    kv_width = spec.num_kv_heads * spec.head_dim
    projections = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
    if spec.fused_qkv_source:
        projections = {"W_pack": q_width + 2 * kv_width}
    rows = {f"{source}.self_attn.{key}": width for key, width in projections.items()}
    listed = [
        _copy(f"{name}.attn.norm", f"{source}.input_layernorm.weight", (hidden,)),
        _linear(f"{name}.attn.qkv", rows, hidden, Shard.QKV),
    ]
    if spec.qkv_bias:
        listed.append(_bias(f"{name}.attn.qkv.bias", rows, Shard.QKV))
    if spec.qk_norm:
        listed += [
            _copy(f"{name}.attn.{n}_norm", f"{source}.self_attn.{n}_norm.weight", (spec.head_dim,)) for n in "qk"
        ]
    output = {f"{source}.self_attn.o_proj": hidden}
    listed.append(_linear(f"{name}.attn.output", output, q_width, Shard.COLUMNS))
    if spec.output_bias:
        listed.append(_bias(f"{name}.attn.output.bias", output, Shard.NONE))
    return listed


def _mlp_params(spec: DecoderSpec, name: str, source: str) -> list[Param]:
    hidden, inter = spec.hidden_size, spec.intermediate_size
    gate_up = {f"{source}.mlp.gate_proj": inter, f"{source}.mlp.up_proj": inter}
    down = {f"{source}.mlp.down_proj": hidden}
    listed = [
        _copy(f"{name}.mlp.norm", f"{source}.post_attention_layernorm.weight", (hidden,)),
        _linear(f"{name}.mlp.gate_up", gate_up, hidden, Shard.GATE_UP),
        _linear(f"{name}.mlp.down", down, inter, Shard.COLUMNS),
    ]
    if spec.mlp_bias:
        listed.append(_bias(f"{name}.mlp.gate_up.bias", gate_up, Shard.GATE_UP))
        listed.append(_bias(f"{name}.mlp.down.bias", down, Shard.NONE))
    return listed


def _head_param(spec: DecoderSpec) -> Param:
    shape = (spec.vocab_size, spec.hidden_size)
    return Param(
        "head",
        shape,
        sources=(EMBED_SOURCE if spec.tied_embeddings else HEAD_SOURCE,),
        source_shapes=(shape,),
        combine=Combine.NORMALIZE_ROWS if spec.norm_head else Combine.COPY,
        shard=Shard.ROWS,
        quantizable=True,
        duplicates=(HEAD_SOURCE,) if spec.tied_embeddings else (),
    )


def _copy(name: str, source: str, shape: tuple[int, ...]) -> Param:
    return Param(name, shape, (source,), (shape,))


def _linear(name: str, rows: dict[str, int], columns: int, shard: Shard) -> Param:
    """A weight stacked from the modules in `rows` (module name -> output features)."""
    return Param(
        name,
        (sum(rows.values()), columns),
        sources=tuple(f"{module}.weight" for module in rows),
        source_shapes=tuple((count, columns) for count in rows.values()),
        combine=Combine.COPY if len(rows) == 1 else Combine.CONCAT_ROWS,
        shard=shard,
        quantizable=True,
    )


def _bias(name: str, rows: dict[str, int], shard: Shard) -> Param:
    return Param(
        name,
        (sum(rows.values()),),
        sources=tuple(f"{module}.bias" for module in rows),
        source_shapes=tuple((count,) for count in rows.values()),
        combine=Combine.COPY if len(rows) == 1 else Combine.CONCAT_ROWS,
        shard=shard,
    )
