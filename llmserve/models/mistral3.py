"""Mistral 3 (Mistral Small 3.1 and later, Ministral 3 as published): the language model, without the vision tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from llmserve.errors import CheckpointError
from llmserve.models import family, ministral3, mistral
from llmserve.models.family import FamilySpec
from llmserve.models.spec import HfConfig, Param

PREFIX = "language_model."
READERS: Mapping[str, Callable[[HfConfig], FamilySpec]] = {
    "mistral": mistral.from_hf,
    "ministral3": ministral3.from_hf,
}
OTHERS = (r"vision_tower\..*", r"multi_modal_projector\..*")  # tensors that are known and not wanted


def from_hf(config: HfConfig) -> FamilySpec:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config must be the config of the language model, got {text!r}")
    read = READERS.get(str(text.get("model_type", "mistral")))
    if read is None:
        raise CheckpointError(
            f"config.json: model_type {text['model_type']!r} of text_config is not supported; supported: "
            f"{', '.join(map(repr, READERS))}"
        )
    outside = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    spec = read({**text, **outside})
    return replace(spec, architecture="Mistral3ForConditionalGeneration")


def params(spec: FamilySpec) -> list[Param]:
    return [
        replace(
            param,
            sources=tuple(PREFIX + name for name in param.sources),
            duplicates=tuple(PREFIX + name for name in param.duplicates),
        )
        for param in family.params(spec)
    ]


ARCHITECTURE = replace(
    family.family("Mistral3ForConditionalGeneration", "mistral3", from_hf, ignored=OTHERS), params=params
)
