"""The language model of a checkpoint that also has image towers. The towers' tensors are ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmserve.errors import CheckpointError
from llmserve.models import family
from llmserve.models.family import FamilySpec
from llmserve.models.spec import Architecture, HfConfig, Param, renamed

PREFIX = "language_model."
OUTSIDE = ("tie_word_embeddings", "quantization_config")  # keys outside `text_config` that apply to the language model


def text_config(config: HfConfig) -> dict[str, Any]:
    """The language model's own config. Raises `CheckpointError` for a config without one."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config must be the config of the language model, got {text!r}")
    return {**text, **{key: config[key] for key in OUTSIDE if key in config}}


def language_model(
    name: str,
    model_type: str,
    readers: Mapping[str, Callable[[HfConfig], FamilySpec]],
    *,
    others: Sequence[str],
    published: Callable[[str], str] = PREFIX.__add__,
) -> Architecture[FamilySpec]:
    """`readers`: config readers by `model_type`, the default first. `others`: patterns of ignored tensors.

    `published`: maps the tensor names of the language model alone to the checkpoint's."""

    def params(spec: FamilySpec) -> list[Param]:
        return [renamed(param, published) for param in family.params(spec)]

    def from_hf(config: HfConfig) -> FamilySpec:
        text = text_config(config)
        read = readers.get(str(text.get("model_type", next(iter(readers)))))
        if read is None:
            raise CheckpointError(
                f"config.json: model_type {text['model_type']!r} of text_config is not supported; supported: "
                f"{', '.join(map(repr, readers))}"
            )
        return replace(read(text), architecture=name)

    return replace(family.family(name, model_type, from_hf, ignored=others), params=params)
