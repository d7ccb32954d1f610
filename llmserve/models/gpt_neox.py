"""GPT-NeoX (Pythia, Dolly): attention and MLP in parallel, each with its own layer norm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from llmserve.models import family
from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, grouped_params, read_family
from llmserve.models.spec import HfConfig

# transformers' defaults
DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_emb_base": 10_000, "rotary_pct": 0.25}
NAMES = {  # Llama's module names in `weights.py` to this family's
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.layers": "gpt_neox.layers",
    "model.norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    "self_attn.o_proj": "attention.dense",
    "self_attn": "attention",
}
MASKS = r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"  # in old checkpoints


def from_hf(config: HfConfig) -> FamilySpec:
    given = DEFAULTS | dict(config)
    rope = {"rope_theta": given["rotary_emb_base"], "partial_rotary_factor": given["rotary_pct"]}
    reader = ConfigReader(rope | given)
    spec = read_family(reader, "GPTNeoXForCausalLM", partial=True, eps_key="layer_norm_eps", plain_mlp="dense_h_to_4h")
    is_parallel = reader.flag("use_parallel_residual", True)
    bias = reader.flag("attention_bias", True)
    reader.finish()
    return replace(
        spec, is_parallel=is_parallel, layer_norm=True, norm_bias=True, qkv_bias=bias, output_bias=bias, mlp_bias=True,
        fused_qkv="query_key_value", mlp_down="dense_4h_to_h",
    )  # fmt: skip


ARCHITECTURE = replace(
    family.family("GPTNeoXForCausalLM", "gpt_neox", from_hf, ignored=(MASKS,)),
    params=partial(grouped_params, names=NAMES),
    prefix="gpt_neox.",
)
