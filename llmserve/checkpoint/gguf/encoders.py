"""Networks that produce embeddings or scores: an encoder's metadata in a GGUF file, and how texts are pooled."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping

from llmserve.checkpoint.gguf.described import Config, Described
from llmserve.checkpoint.gguf.metadata import MetadataReader

POOLING_KEY, CAUSAL = "{}.pooling_type", "{}.attention.causal"
MODES = {1: "mean", 2: "cls", 3: "lasttoken"}  # sentence-transformers' names
NO_POOLING, RANK = 0, 4
PAIR_KEY, PAIR_TEMPLATE = "tokenizer.chat_template.rerank", "pair_template.txt"
TASK = "ForSequenceClassification"
SCORER = ("cls.weight", "cls.output.weight")


def _bert(file: Described, config: Config) -> Config:
    """Also RoBERTa and XLM-R; converters omit the first rows of their positions. The metadata has no activation."""
    reader, shapes = file.reader, file.shapes
    if reader.flag(CAUSAL, False):
        reader.problems.append(f"{reader.key(CAUSAL)} must be false")
    own: Config = {
        "hidden_act": "gelu",
        "type_vocab_size": shapes.get("token_types.weight", (1,))[0],
        "max_position_embeddings": shapes.get("position_embd.weight", (config["max_position_embeddings"],))[0],
    }
    if reader.integer(POOLING_KEY, NO_POOLING, minimum=0) != RANK:
        return own
    if missing := [name for name in SCORER if name not in shapes]:
        reader.problems.append(
            f"{reader.key(POOLING_KEY)} makes it score pairs of texts, but it has no tensor "
            f"{' and '.join(missing)}: converters leave out the pooler of BERT; build from the original folder"
        )
    return own | {"architectures": [f"Bert{TASK}"], "num_labels": shapes.get(SCORER[1], (1,))[0]}


def scored(file: Described) -> Config:
    """A language model that scores pairs by two answers, as converted from Qwen3-Reranker."""
    if file.reader.integer(POOLING_KEY, NO_POOLING, minimum=0) != RANK or file.reader.architecture in OWN:
        return {}
    return {"architectures": [file.architecture.hf_name.replace("ForCausalLM", TASK)], "num_labels": 1}


def pooling_files(reader: MetadataReader, tensors: Collection[str]) -> dict[str, bytes]:
    """sentence-transformers' files, by llama.cpp's rules: embeddings are normalized."""
    kind = reader.integer(POOLING_KEY, NO_POOLING, minimum=0)
    if kind == NO_POOLING or (kind == RANK and reader.architecture in OWN):
        return {}
    if kind == RANK and SCORER[1] in tensors:
        return {PAIR_TEMPLATE: reader.text(PAIR_KEY).encode()} if reader.has(PAIR_KEY) else {}
    if kind not in MODES:
        reader.problems.append(
            f"metadata {reader.key(POOLING_KEY)} {kind} is not supported; supported: "
            + ", ".join(f"{number} ({mode})" for number, mode in MODES.items())
        )
        return {}
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in places.items()]
    return {
        "modules.json": json.dumps(modules).encode(),
        "1_Pooling/config.json": json.dumps({"pooling_mode": MODES[kind]}).encode(),
    }


OWN: Mapping[str, Callable[[Described, Config], Config]] = {"bert": _bert}
