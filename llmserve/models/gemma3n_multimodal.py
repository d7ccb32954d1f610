"""Gemma 3n as published: the language model, without the image and audio towers."""

from __future__ import annotations

from llmserve.models import gemma3n
from llmserve.models.gemma4_multimodal import as_published

ARCHITECTURE = as_published(gemma3n.ARCHITECTURE, "Gemma3nForConditionalGeneration", "gemma3n", gemma3n.UNREAD)
