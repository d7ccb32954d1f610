"""RoBERTa (all-distilroberta, all-roberta-large): BERT with positions that begin after the padding token's row."""

from __future__ import annotations

from llmserve.models.bert import EncoderSpec, encoder, read_encoder
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> EncoderSpec:
    return read_encoder(config, "roberta", ("classifier.dense", "classifier.out_proj"), pads_positions=True)


ARCHITECTURE = encoder("Roberta", "roberta", from_hf, module="roberta")
