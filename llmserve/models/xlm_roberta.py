"""XLM-R (BGE-M3, multilingual E5, BGE rerankers): multilingual RoBERTa."""

from __future__ import annotations

from llmserve.models.bert import encoder
from llmserve.models.roberta import from_hf

ARCHITECTURE = encoder("XLMRoberta", "xlm-roberta", from_hf, module="roberta")
