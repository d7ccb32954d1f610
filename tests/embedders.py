"""Tiny random networks that make embeddings or scores, as transformers and sentence-transformers save them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.checkpoints import write_json

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
BERT = SIZES | {"model_type": "bert", "max_position_embeddings": 64, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}
ROBERTA = SIZES | {
    "model_type": "xlm-roberta", "max_position_embeddings": 66, "layer_norm_eps": 1e-5, "type_vocab_size": 1,
    "pad_token_id": 1, "hidden_act": "gelu",
}  # fmt: skip
ODD = {"hidden_size": 60, "num_attention_heads": 3, "intermediate_size": 70, "num_hidden_layers": 3}
QWEN = SIZES | {
    "model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
EMBEDDERS: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "bert-odd": BERT | ODD | {"hidden_act": "gelu_new", "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "bert-one-layer": BERT | {"num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 321},
    "xlm-r": ROBERTA,
    "xlm-r-odd": ROBERTA | ODD | {"pad_token_id": 0, "type_vocab_size": 2},
    "roberta": ROBERTA | {"model_type": "roberta"},
    "qwen3": QWEN,
    "qwen3-untied": QWEN | {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "qwen2-bidirectional": QWEN | {"model_type": "qwen2", "is_causal": False},  # as gte-Qwen2
}
RERANKERS: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "bert-identity": BERT | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    "xlm-r": ROBERTA,
    "xlm-r-odd": ROBERTA | ODD,
    "qwen3": QWEN | {"pad_token_id": 0},
    "qwen3-untied": QWEN | {"pad_token_id": 0, "tie_word_embeddings": False, "num_key_value_heads": 4},
}
POOLINGS = ("cls", "lasttoken", "mean", "max")
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "harbour",
    "boats",
    "price",
    "of",
    "fish",
    "winter",
    "lake",
    "birds",
    "letter",
    "city",
]


def write_word_pieces(path: Path, *, roberta: bool = False) -> None:
    """A tokenizer.json with [CLS] and [SEP] around texts, or <s> and </s>; pairs as the family has them."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    first, last = ("<s>", "</s>") if roberta else ("[CLS]", "[SEP]")
    pad, unknown = ("<pad>", "<unk>") if roberta else ("[PAD]", "[UNK]")
    specials = [first, pad, last, unknown] if roberta else [pad, unknown, first, last]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [*specials, *letters, *(f"##{letter}" for letter in letters), *WORDS]
    ids = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    made = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    second = f"{last} $B:0 {last}:0" if roberta else f"$B:1 {last}:1"
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} {second}", special_tokens=[(t, ids[t]) for t in specials]
    )
    made.save(str(path / "tokenizer.json"))
    names = {"cls_token": first, "sep_token": last, "pad_token": pad, "unk_token": unknown}
    write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def make_embedder(path: Path, kind: str, *, pooling: str = "", normalize: bool = False, **changes: Any) -> Any:
    """Writes the folder; `pooling` with sentence-transformers' files. The network itself, in float32."""
    from transformers import AutoConfig, AutoModel

    return _saved(path, AutoModel.from_config(_config(AutoConfig, EMBEDDERS[kind] | changes)), pooling, normalize)


def make_reranker(path: Path, kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = _config(AutoConfig, RERANKERS[kind] | {"num_labels": 1})
    return _saved(path, AutoModelForSequenceClassification.from_config(config), "", False)


def _config(auto: Any, values: dict[str, Any]) -> Any:
    values = deepcopy(values)  # transformers writes into the tables that it is given
    return auto.for_model(values.pop("model_type"), **values)


def _saved(path: Path, model: Any, pooling: str, normalize: bool) -> Any:
    import torch

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() == 1 else 1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + (parameter == 1.0))
    model.eval().save_pretrained(path)
    if pooling:
        write_sentence_transformers(path, pooling, normalize=normalize)
    return model


def write_sentence_transformers(path: Path, pooling: str, *, normalize: bool) -> None:
    kinds = {"": "Transformer", "1_Pooling": "Pooling"} | ({"2_Normalize": "Normalize"} if normalize else {})
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (folder, kind) in enumerate(kinds.items())
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    flags = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    config = {f"pooling_mode_{name}": mode == pooling for mode, name in (flags | {"lasttoken": "lasttoken"}).items()}
    write_json(path / "1_Pooling" / "config.json", config | {"word_embedding_dimension": 0})


def write_answers(path: Path, *, yes: int, no: int) -> None:
    """sentence-transformers' files of a language model whose answers score a pair of texts."""
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_LogitScore", "type": "a.LogitScore"}]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_LogitScore").mkdir()
    write_json(path / "1_LogitScore" / "config.json", {"true_token_id": yes, "false_token_id": no})


def wanted_embedding(model: Any, ids: Sequence[int], pooling: str, *, normalize: bool) -> NDArray[np.float32]:
    """As sentence-transformers pools what transformers computes."""
    import torch

    with torch.no_grad():
        hidden = model(torch.tensor([list(ids)])).last_hidden_state[0]
    pooled = {
        "cls": hidden[0], "lasttoken": hidden[-1], "mean": hidden.mean(dim=0), "max": hidden.max(dim=0).values
    }[pooling]  # fmt: skip
    found: NDArray[np.float32] = (torch.nn.functional.normalize(pooled, dim=0) if normalize else pooled).numpy()
    return found


def wanted_score(model: Any, ids: Sequence[int], second_segment: int) -> float:
    """Before any sigmoid. `second_segment`: 0 where the network has one type of tokens."""
    import torch

    types = [int(bool(second_segment) and place >= second_segment) for place in range(len(ids))]
    own = {} if model.config.model_type == "qwen3" else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        return float(model(torch.tensor([list(ids)]), **own).logits[0, 0])
