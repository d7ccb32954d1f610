"""Granite-MoE with a shared expert."""

from __future__ import annotations

from functools import partial

from llmserve.models.family import family
from llmserve.models.granite_moe import read_granite_moe

NAME = "GraniteMoeSharedForCausalLM"
ARCHITECTURE = family(NAME, "granitemoeshared", partial(read_granite_moe, architecture=NAME))
