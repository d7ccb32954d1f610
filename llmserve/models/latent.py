"""Attention over a latent (MLA, DeepSeek-V2): the keys and values of all heads are projections of one short row.

These projections become part of the matrices for queries and output, so a layer has one key head: the rotary elements,
then the latent. Its value is the latent, after zeros in place of the rotary elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmserve.models import blocks, weights
from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.graph import Graph, Value
from llmserve.models.rope import read_rope_values, yarn_magnitude
from llmserve.models.spec import DecoderSpec, HfConfig, LatentHeads, LatentRows, Param, Shard

DEFAULTS = {  # transformers' defaults for DeepSeek
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
LATENT_EPS = 1e-6  # of the norms of latents; the config's epsilon is for other norms


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    heads: LatentHeads
    query_rank: int  # size of the latent for queries; 0: none
    scale: float

    @property
    def width(self) -> int:
        """The size of a head."""
        return self.heads.latent.rotary_dim + self.heads.latent.size

    def params(self, spec: DecoderSpec, layer: int) -> list[Param]:
        name, source, heads = f"layers.{layer}.attn", f"{weights.layer_source(layer)}.self_attn", self.heads
        latent, rank, hidden = heads.latent, self.query_rank, spec.hidden_size
        stored = {
            f"{source}.{'q_b_proj' if rank else 'q_proj'}.weight": (
                heads.num_heads * (heads.key_dim + latent.rotary_dim),
                rank or hidden,
            ),
            f"{source}.kv_b_proj.weight": (heads.num_heads * (heads.key_dim + heads.value_dim), latent.size),
            f"{source}.kv_a_layernorm.weight": (latent.size,),
            f"{source}.o_proj.weight": (hidden, heads.num_heads * heads.value_dim),
        }
        queries, *of_latent, output = stored

        def product(name: str, shape: tuple[int, int], matrix: str, made: LatentHeads) -> Param:
            sources = (matrix, *of_latent)
            shapes = tuple(stored[each] for each in sources)
            return Param(name, shape, sources, shapes, quantizable=True, product=made)

        found: list[Param] = []
        if rank:
            found += weights.linear(f"{name}.q_down", {f"{source}.q_a_proj": rank}, hidden, Shard.NONE, bias=False)
            found.append(weights.copied(f"{name}.q_norm", f"{source}.q_a_layernorm.weight", (rank,)))
        (kv,) = weights.linear(
            f"{name}.kv", {f"{source}.kv_a_proj_with_mqa": latent.size + latent.rotary_dim}, hidden, Shard.NONE,
            bias=False,
        )  # fmt: skip
        factors = ((latent.rotary_dim, 1.0), (latent.size, 0.0), (latent.size, 1.0))
        height = sum(count for count, _ in factors)
        return [
            *found,
            product(f"{name}.q", (spec.q_width, rank or hidden), queries, heads),
            replace(kv, shape=(height, hidden), orders=(latent,), factors=factors),
            product(f"{name}.output", (hidden, spec.q_width), output, replace(heads, reads=True)),
        ]

    def attend(self, g: Graph, spec: DecoderSpec, x: Value, layer: int) -> Value:
        name, latent = f"layers.{layer}.attn", self.heads.latent
        of_queries = x
        if self.query_rank:
            of_queries = g.rms_norm(g.linear(x, f"{name}.q_down", self.query_rank), f"{name}.q_norm", eps=LATENT_EPS)
        q = g.linear(of_queries, f"{name}.q", spec.q_width)
        # rotary elements, zeros, latent: each slice has zeros where the other has values
        kv = g.linear(x, f"{name}.kv", latent.rotary_dim + 2 * latent.size)
        eps = LATENT_EPS * latent.size / spec.head_dim  # the mean square also counts the columns of zeros
        value = g.rms_norm(g.slice(kv, latent.size, spec.head_dim), None, eps=eps)
        key = g.add(g.slice(kv, 0, spec.head_dim), value)
        q, key = blocks.turned(g, spec, spec.rope, q, key)
        return blocks.output(g, spec, blocks.attention(g, spec, (q, key, value), layer, scale=self.scale), layer)


def latent_reader(config: HfConfig, defaults: Mapping[str, Any]) -> ConfigReader:
    """A reader whose `head_dim` is the rotary part of a head, for `read_family`."""
    given = {**defaults, **config}
    num_heads, problems = given.get("num_attention_heads"), []
    if given.get("num_key_value_heads") not in (None, num_heads):
        found = given["num_key_value_heads"]
        problems.append(f"num_key_value_heads must be num_attention_heads ({num_heads}), got {found!r}")
    reader = ConfigReader(given | {"num_key_value_heads": num_heads, "head_dim": given.get("qk_rope_head_dim")})
    reader.problems += problems
    return reader


def read_latent(reader: ConfigReader, spec: DecoderSpec, *, interleaved: bool) -> LatentAttention:
    """`spec`: its heads are the rotary part. `interleaved`: elements 2i and 2i + 1 are rotated together."""
    reader.expect("attention_bias", False)
    rotary_dim = spec.head_dim
    key_dim, value_dim, size = (
        reader.integer(key, maximum=MAX_COUNT) for key in ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    if size < rotary_dim:
        reader.problems.append(f"kv_lora_rank ({size}) must be at least qk_rope_head_dim ({rotary_dim})")
    heads = LatentHeads(LatentRows(size, rotary_dim, rotary_dim * interleaved), spec.num_heads, key_dim, value_dim)
    scale, values = float((key_dim + rotary_dim) ** -0.5), read_rope_values(ConfigReader(reader.config))
    if not reader.problems and values["rope_type"] != "default" and values.get("mscale_all_dim"):
        scale *= yarn_magnitude(values["factor"], values["mscale_all_dim"]) ** 2
    rank = reader.integer("q_lora_rank", 0, minimum=0)
    return LatentAttention(heads=heads, query_rank=rank, scale=scale)
