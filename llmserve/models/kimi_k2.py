"""Kimi K2: DeepSeek-V3's network with another `model_type`."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models import deepseek_v3

ARCHITECTURE = replace(deepseek_v3.ARCHITECTURE, names=(), model_type="kimi_k2")
