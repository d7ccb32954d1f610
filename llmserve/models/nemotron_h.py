"""Nemotron-H: each layer is Mamba, attention without positions, a squared-ReLU MLP, or a mixture of such MLPs.

Steps of Mamba have the config's limits. transformers also raises the steps of a prompt to `time_step_min`, but not
those of an answer; networks are trained without this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from llmserve.models import family
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.delta_net import LINEAR
from llmserve.models.experts import Mixture, read_groups, read_mixture
from llmserve.models.family import FamilySpec, Norms
from llmserve.models.mamba import read_mamba
from llmserve.models.spec import Architecture, HfConfig, Param, renamed
from llmserve.models.windows import FULL

MLP, MIXTURE = "mlp", "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MIXTURE}
NAMES = {"mamba": LINEAR, "attention": FULL}  # published layer types
KEYS = {
    "num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "num_groups": "n_groups",
    "state_size": "ssm_state_size", "taps": "conv_kernel", "conv_bias": "use_conv_bias", "bias": "use_bias",
    "activation": "mamba_hidden_act",
}  # fmt: skip
ALIASES = {  # older keys, which win
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}  # fmt: skip
DEFAULTS = {  # transformers' defaults
    "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
    "use_conv_bias": True, "use_bias": False, "layer_norm_epsilon": 1e-5, "head_dim": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
MODULES = {  # Llama's module names in `weights.py` to this family's
    "model.embed_tokens": "model.embeddings",
    "model.norm": "model.norm_f",
    "self_attn.": "mixer.",
}
MODULE = re.compile("|".join(map(re.escape, MODULES)))
STACKED = ("experts.up_proj", "experts.down_proj")
OTHERS = (r"mtp\..*",)  # tensors of the layers that draft tokens


def from_hf(config: HfConfig) -> FamilySpec:
    given = DEFAULTS | {key: value for key, value in config.items() if value is not None}
    given |= {key: given[older] for older, key in ALIASES.items() if older in given}
    problems: list[str] = []
    types = _layer_types(given, problems)
    reader = ConfigReader(given | {"num_hidden_layers": len(types)})
    reader.problems += problems
    spec = read_decoder(reader, "NemotronHForCausalLM", eps_key="layer_norm_epsilon")
    reader.expect("mlp_hidden_act", "relu2")
    for key in ("attention_bias", "tie_word_embeddings", "mamba_proj_bias"):
        reader.expect(key, False)
    bias, mixer = reader.flag("mlp_bias"), read_mamba(reader, spec.norm_eps, inner=None, keys=KEYS)
    mixture = _read_mixture(reader, types) if MIXTURE in types else None
    reader.finish()
    return FamilySpec.extending(
        spec, norms=Norms("norm", "", "norm", ""), plain_mlp="up_proj", activation="relu2", mlp_module="mixer",
        mlp_bias=bias, mixer=replace(mixer, module="mixer"),
        stateful_layers=tuple(i for i, kind in enumerate(types) if kind == LINEAR),
        lone_mlps=tuple(i for i, kind in enumerate(types) if kind in (MLP, MIXTURE)), mixture=mixture,
    )  # fmt: skip


def _read_mixture(reader: ConfigReader, types: Sequence[str]) -> Mixture:
    """Read a mixture of MLPs without gates; their inputs and outputs may be narrower than the hidden size."""
    reader.expect("mlp_bias", False)
    latent = reader.integer("moe_latent_size") if reader.get("moe_latent_size") is not None else 0
    return read_mixture(
        reader,
        expert_size="moe_intermediate_size",
        module="mixer",
        plain=True,
        names=("up_proj", "down_proj"),
        sigmoid=True,
        correction="gate.e_score_correction_bias",
        factor=reader.positive("routed_scaling_factor"),
        groups=read_groups(reader, reader.integer("n_routed_experts"), reader.integer("num_experts_per_tok")),
        latent_size=latent,
        latent=("fc1_latent_proj", "fc2_latent_proj"),
        shared="mixer.shared_experts",
        shared_size=reader.integer("moe_shared_expert_intermediate_size"),
        dense_layers=tuple(i for i, kind in enumerate(types) if kind != MIXTURE),
    )


def _layer_types(given: HfConfig, problems: list[str]) -> list[str]:
    """Types from a list of names, or from a string with a letter for each."""
    types = given.get("layers_block_type", given.get("layer_types"))
    if types is None:
        pattern = given.get("hybrid_override_pattern", "")
        types = [LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
    if not isinstance(types, list) or not types:
        problems.append(
            f"layers_block_type must be names, or hybrid_override_pattern letters, of layers, got {types!r}"
        )
        return [FULL]
    types = [NAMES.get(str(kind), str(kind)) for kind in types]
    if unknown := sorted({repr(kind) for kind in types if kind not in LETTERS.values()}):
        known = ", ".join(map(repr, LETTERS.values()))
        problems.append(f"layer types {', '.join(unknown)} are not supported; supported: {known}")
    elif FULL not in types:
        problems.append(f"layers_block_type must have a layer of {FULL}")
    return types


def params(spec: FamilySpec) -> list[Param]:
    """Tensors have transformers' names or the published ones, and experts are in separate tensors or in one."""
    forms = [spec]
    if spec.mixture is not None:
        forms.append(replace(spec, mixture=replace(spec.mixture, stacked=STACKED)))
    named = [[renamed(param, _of_transformers) for param in family.params(form)] for form in forms]
    return [
        _first_of([name for param in same for name in (param, renamed(param, published))])
        for same in zip(*named, strict=True)
    ]


def _first_of(forms: Sequence[Param]) -> Param:
    """The first form, with each next one as the alternative of the one before."""
    first, *others = forms
    return replace(first, otherwise=_first_of(others)) if others else first


def _of_transformers(name: str) -> str:
    return MODULE.sub(lambda part: MODULES[part[0]], name)


def published(name: str) -> str:
    return name.replace("model.", "backbone.")


ARCHITECTURE: Architecture[FamilySpec] = replace(
    family.family("NemotronHForCausalLM", "nemotron_h", from_hf, ignored=OTHERS), params=params
)
