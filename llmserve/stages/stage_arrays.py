"""The pre- and postprocess steps on named arrays, called by the shims in `pipelines/`.

Every array has a batch dimension, the same for all. Each row is a separate request. Strings are object arrays of
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import InvalidArgument, LlmserveError, Unsupported, raise_problems
from llmserve.stages.chat import Message, parse_messages
from llmserve.stages.json_values import MAX_VALUES, may_have_many, num_values
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.preprocess import PreparedPrompt, Preprocessor, TextPrompt
from llmserve.stages.text import text_from_bytes
from llmserve.stages.word_lists import pack_word_lists

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

UNSUPPORTED_INPUTS = {  # refused, not ignored; with the ensemble's name of each
    "DECODER_QUERY": "decoder_text_input",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}


WORD_INPUTS = ("STOP_WORDS_DICT", "BAD_WORDS_DICT", "EMBEDDING_BIAS_WORDS")
BIAS_INPUTS = ("EMBEDDING_BIAS_WEIGHTS", "LOGIT_BIAS_IDS", "LOGIT_BIAS_WEIGHTS")
MAX_BATCH_NUMBERS = 4 * 2**20  # of the prompts of a batch, padded, or of their biases
MAX_WORDS = 16 * 1024  # in a list: engines accept no more tokens in all words
MAX_WORDS_BYTES = 1024 * 1024
JSON_INPUTS = {  # bytes: reading JSON texts holds the GIL
    "MESSAGES": 8 * 1024 * 1024,
    "TOOLS": 1024 * 1024,
    "CHAT_TEMPLATE_KWARGS": 64 * 1024,
}


def prepare_arrays(stage: Preprocessor, inputs: Arrays) -> dict[str, NDArray[Any]]:
    """QUERY, MESSAGES or PROMPT_IDS, and word lists -> INPUT_ID and the other inputs of the `tensorrt_llm` step.

    `EMBEDDING_BIAS` is `[B, vocab_size]`, or `[B, 0]` without bias words. INPUT_ID and the word lists are padded on the
    right to the longest of the batch. With RETURN_CHAT_STYLE, the only output is CHAT_STYLE: how to read answers to
    messages, as JSON.
    """
    if _flag(inputs, "RETURN_CHAT_STYLE"):
        style = stage.chat_style(_object(inputs, "CHAT_TEMPLATE_KWARGS"))
        return {"CHAT_STYLE": np.array([[style.to_json().encode()]], dtype=object)}
    rows = _rows(inputs)
    raise_problems(
        Unsupported,
        "the request cannot be answered",
        [
            f"{name} ({ensemble_name}) is not supported"
            for name, ensemble_name in UNSUPPORTED_INPUTS.items()
            if _is_given(inputs, name)
        ],
    )
    raise_problems(InvalidArgument, "the prompt cannot be used", _size_problems(inputs, stage.tokenizer.vocab_size))
    return _to_arrays(list(_prepared(stage, rows)), inputs["REQUEST_OUTPUT_LEN"], stage.tokenizer.vocab_size)


def text_arrays(stage: Postprocessor, inputs: Arrays) -> dict[str, NDArray[Any]]:
    """TOKENS_BATCH `[B, beams, n]` -> OUTPUT `[B * beams]`.

    Without FINISH_REASON, the ids are a whole answer; with it, WINDOW_IDS are the ids before them, and an empty reason
    means that more will follow. SKIP_SPECIAL_TOKENS says whether a request's special tokens are left out. With
    RETURN_TOKENS, TOKEN_IDS and TOKEN_BYTES `[B, ids]` are also returned: the new ids of all beams, and the bytes of
    each; shorter rows are padded with -1 and no bytes.
    """
    if len(inputs["TOKENS_BATCH"]) == 1:  # each streamed token
        return _text_arrays(stage, inputs)
    made = [_text_arrays(stage, row) for row in _rows(inputs)]
    joined = {"OUTPUT": np.concatenate([row["OUTPUT"] for row in made])}
    longest = max(row["TOKEN_IDS"].size if "TOKEN_IDS" in row else 0 for row in made)
    if any("TOKEN_IDS" in row for row in made):
        joined["TOKEN_IDS"] = np.full((len(made), longest), -1, np.int32)
        joined["TOKEN_BYTES"] = np.full((len(made), longest), b"", dtype=object)
    for at, row in enumerate(made):
        for name in row.keys() - {"OUTPUT"}:
            joined[name][at, : row[name].size] = row[name][0]
    return joined


def _text_arrays(stage: Postprocessor, inputs: Arrays) -> dict[str, NDArray[Any]]:
    tokens = inputs["TOKENS_BATCH"]
    lengths = inputs["SEQUENCE_LENGTH"].reshape(-1).tolist()
    if tokens.size != len(lengths) * tokens.shape[-1]:
        raise InvalidArgument(f"TOKENS_BATCH {list(tokens.shape)} requires one SEQUENCE_LENGTH per row, got {lengths}")
    rows = tokens.reshape(len(lengths), tokens.shape[-1])
    window = inputs["WINDOW_IDS"].reshape(-1).tolist() if "WINDOW_IDS" in inputs else []
    is_final = "FINISH_REASON" not in inputs or bool(_text(inputs, "FINISH_REASON"))
    tail = _text(inputs, "TAIL_TEXT") or ""
    skips = _flag(inputs, "SKIP_SPECIAL_TOKENS") if "SKIP_SPECIAL_TOKENS" in inputs else None
    if skips is not None:
        stage = stage.skipping(skips)
    texts = [
        stage.text(row[:length].tolist(), window, final=is_final, tail=tail)
        for row, length in zip(rows, lengths, strict=True)
    ]
    made = {"OUTPUT": np.array([text.encode() for text in texts], dtype=object)}
    if "RETURN_TOKENS" in inputs and _flag(inputs, "RETURN_TOKENS"):
        made |= _tokens(stage, rows, lengths)
    return made


def _tokens(stage: Postprocessor, rows: NDArray[Any], lengths: Sequence[int]) -> dict[str, NDArray[Any]]:
    ids = [token for row, length in zip(rows, lengths, strict=True) for token in row[:length].tolist()]
    return {
        "TOKEN_IDS": np.array([ids], np.int32),
        "TOKEN_BYTES": np.array([[*map(stage.tokenizer.token_bytes, ids)]], dtype=object),
    }


def _to_prompt(inputs: Arrays) -> TextPrompt:
    text, listed = _text(inputs, "QUERY"), _text(inputs, "MESSAGES")
    messages: list[Message] = parse_messages(listed) if listed else []
    return TextPrompt(
        text=None if messages and not text else text,
        messages=messages,
        ids=_numbers(inputs, "PROMPT_IDS"),
        add_special_tokens=_flag(inputs, "ADD_SPECIAL_TOKENS"),
        template_values=_object(inputs, "CHAT_TEMPLATE_KWARGS"),
        tools=_tools(inputs),
        max_tokens=_integer(inputs, "REQUEST_OUTPUT_LEN") or 0,
        stop_words=_texts(inputs, "STOP_WORDS_DICT"),
        stop_ids=_numbers(inputs, "STOP_TOKEN_IDS"),
        bad_words=_texts(inputs, "BAD_WORDS_DICT"),
        bias_words=_texts(inputs, "EMBEDDING_BIAS_WORDS"),
        bias_weights=_numbers(inputs, "EMBEDDING_BIAS_WEIGHTS"),
        biased_ids=_numbers(inputs, "LOGIT_BIAS_IDS"),
        id_weights=_numbers(inputs, "LOGIT_BIAS_WEIGHTS"),
        end_id=_integer(inputs, "END_ID"),
        pad_id=_integer(inputs, "PAD_ID"),
    )


def _to_arrays(prompts: Sequence[PreparedPrompt], max_tokens: NDArray[Any], vocab_size: int) -> dict[str, NDArray[Any]]:
    bias_size = vocab_size if any(prompt.embedding_bias for prompt in prompts) else 0
    longest = max(len(prompt.input_ids) for prompt in prompts)
    if len(prompts) > 1 and len(prompts) * max(bias_size, longest) > MAX_BATCH_NUMBERS:
        raise InvalidArgument(
            f"{len(prompts)} rows, each as long as the longest prompt ({longest} tokens), with a bias for each of "
            f"{bias_size} tokens, need too much memory; send one request each: they are batched in flight"
        )
    bias = np.zeros((len(prompts), bias_size), np.float32)
    for row, prompt in zip(bias, prompts, strict=True):
        for token, weight in prompt.embedding_bias:
            row[token] = weight
    padded = [[*prompt.input_ids, *[prompt.pad_id] * (longest - len(prompt.input_ids))] for prompt in prompts]
    return {
        "INPUT_ID": np.array(padded, np.int32),
        "REQUEST_INPUT_LEN": np.array([[len(prompt.input_ids)] for prompt in prompts], np.int32),
        "REQUEST_OUTPUT_LEN": max_tokens.astype(np.int32),
        "BAD_WORDS_IDS": pack_word_lists([prompt.bad_words for prompt in prompts]),
        "STOP_WORDS_IDS": pack_word_lists([prompt.stop_words for prompt in prompts]),
        "EMBEDDING_BIAS": bias,
        "OUT_END_ID": np.array([[prompt.end_id] for prompt in prompts], np.int32),
        "OUT_PAD_ID": np.array([[prompt.pad_id] for prompt in prompts], np.int32),
        "PROMPT_WARNING": np.array([[prompt.warning.encode()] for prompt in prompts], dtype=object),
    }


def _prepared(stage: Preprocessor, rows: Sequence[Arrays]) -> Iterator[PreparedPrompt]:
    for index, row in enumerate(rows):
        try:
            yield stage.prepare(_to_prompt(row))
        except LlmserveError as error:
            if len(rows) == 1:
                raise
            raise error.at(f"in row {index} of the batch") from None


def _rows(inputs: Arrays) -> Sequence[Arrays]:
    sizes = {name: array.shape[0] for name, array in inputs.items() if array.ndim}
    if len(set(sizes.values())) > 1:
        listed = [f"{name} has a batch of {size}" for name, size in sizes.items()]
        raise_problems(InvalidArgument, "all inputs must have the same batch size", listed)
    size = max(sizes.values(), default=1)
    if size < 2:
        return [inputs]
    return [
        {name: array[row : row + 1] if array.ndim else array for name, array in inputs.items()} for row in range(size)
    ]


def _size_problems(inputs: Arrays, vocab_size: int) -> list[str]:
    """Checked before anything large is created."""
    most = dict.fromkeys((*WORD_INPUTS, "STOP_TOKEN_IDS"), MAX_WORDS) | dict.fromkeys(
        BIAS_INPUTS, max(MAX_WORDS, vocab_size)
    )
    found = [
        f"{name} has {inputs[name].size} entries, more than {count}"
        for name, count in most.items()
        if name in inputs and inputs[name].size > count
    ]
    if found:
        return found
    limits = dict.fromkeys(WORD_INPUTS, MAX_WORDS_BYTES) | JSON_INPUTS
    sizes = {name: sum(map(len, inputs[name].flat)) for name in limits if name in inputs}
    found = [
        f"{name} has {size} bytes, more than {limits[name]}" for name, size in sizes.items() if size > limits[name]
    ]
    large = [] if found else [name for name in JSON_INPUTS if may_have_many(sizes.get(name, 0))]
    counts = {name: sum(map(num_values, inputs[name].flat)) for name in large}
    return found + [
        f"{name} has {count} JSON values, more than {MAX_VALUES}"
        for name, count in counts.items()
        if count > MAX_VALUES
    ]


def _is_given(inputs: Arrays, name: str) -> bool:
    """Whether there is a value; clients send an empty string for none."""
    return name in inputs and any(value not in (b"", "") for value in inputs[name].reshape(-1).tolist())


def _texts(inputs: Arrays, name: str) -> tuple[str, ...]:
    if name not in inputs:
        return ()
    return tuple([text_from_bytes(value, name) for value in inputs[name].reshape(-1)])


def _text(inputs: Arrays, name: str) -> str | None:
    """The only string of `name`; None if it is missing."""
    texts = _texts(inputs, name)
    if len(texts) > 1:
        raise InvalidArgument(f"{name} must hold one string, got {len(texts)}")
    return texts[0] if texts else None


def _numbers(inputs: Arrays, name: str) -> Sequence[Any]:
    """Empty if it is missing."""
    return inputs[name].reshape(-1).tolist() if name in inputs else ()


def _flag(inputs: Arrays, name: str) -> bool | None:
    values = _numbers(inputs, name)
    return bool(values[0]) if values else None


def _object(inputs: Arrays, name: str) -> Mapping[str, Any]:
    """The object of a JSON text; empty if it is missing."""
    text = _text(inputs, name)
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{name} must be a JSON object")
    return found


def _tools(inputs: Arrays) -> Sequence[Mapping[str, Any]]:
    """A list of objects, as JSON; empty if it is missing."""
    text = _text(inputs, "TOOLS")
    try:
        found = json.loads(text) if text else []
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"TOOLS is not valid JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise InvalidArgument("TOOLS must be a JSON list of objects")
    return found


def _integer(inputs: Arrays, name: str) -> int | None:
    values = _numbers(inputs, name)
    if len(values) > 1:
        raise InvalidArgument(f"{name} must hold one number, got {len(values)}")
    return int(values[0]) if values else None
