"""Cohere 2 with experts. Dense layers may have a rotary embedding without a window; norms may be RMS norms."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.cohere2 import DEFAULTS, read_cohere
from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_dense_types, read_mixture
from llmserve.models.family import FamilySpec, family
from llmserve.models.spec import HfConfig
from llmserve.models.windows import DEFAULT_WINDOW, has_window, types_by_pattern, windows_by_type

ROUTERS, SUMS = ("softmax", "sigmoid"), ("average", "sum")  # the first is transformers' default


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | {"head_dim": 128} | dict(config))
    has_rms = reader.get("rms_norm_eps") is not None
    spec = read_cohere(reader, "Cohere2MoeForCausalLM", eps_key="rms_norm_eps" if has_rms else "layer_norm_eps")
    num_dense = reader.integer("first_k_dense_replace", 0, minimum=0, maximum=spec.num_layers)
    first, rest = (reader.integer(f"{p}sliding_window_pattern", n) for p, n in (("prefix_dense_", 1), ("", 4)))
    usual = types_by_pattern(num_dense, first) + types_by_pattern(spec.num_layers - num_dense, rest)
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if has_window(reader) else 0
    windows = windows_by_type(reader, reader.get("layer_types", usual), spec.num_layers, window)
    for key, known in (
        ("use_qk_norm", (False,)), ("expert_selection_fn", ROUTERS), ("shared_expert_combination_strategy", SUMS)
    ):  # fmt: skip
        reader.expect(key, *known)
    num_shared = reader.integer("num_shared_experts", 0, minimum=0)
    is_mean = num_shared > 0 and reader.get("shared_expert_combination_strategy", SUMS[0]) == SUMS[0]
    is_sigmoid = reader.get("expert_selection_fn") == ROUTERS[1]
    mixture = read_mixture(
        reader,
        renormalize=not is_sigmoid or reader.flag("norm_topk_prob", True),
        dense_layers=read_dense_types(reader, spec.num_layers, num_dense),
        sigmoid=is_sigmoid,
        factor=0.5 if is_mean else 1.0,
        shared="mlp.shared_experts" if num_shared else "",
        shared_size=num_shared * spec.intermediate_size,
        shared_factor=0.5 if is_mean else 1.0,
    )
    turned = mixture.dense_layers if first == 1 else ()
    unturned = [i for i in range(spec.num_layers) if not (windows and windows[i]) and i not in turned]
    dense_size = reader.integer("prefix_dense_intermediate_size", spec.intermediate_size)
    reader.finish()
    return replace(
        spec, windows=windows, unturned=unturned, layer_norm=not has_rms, intermediate_size=dense_size, mixture=mixture
    )


ARCHITECTURE = family("Cohere2MoeForCausalLM", "cohere2_moe", from_hf)
