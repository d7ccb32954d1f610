"""The tensors of one request -> `GenerateRequest`. Accepts names of both generations; reports all problems.

Sampling follows TensorRT-LLM: without `runtime_top_k` and `runtime_top_p` (or with both 0), the most likely token is
chosen, whatever the temperature, unless `min_p` is positive, which only makes sense for a draw. `len_penalty`,
`early_stopping` and `beam_search_diversity_rate` only affect beam search, so they have no effect if `beam_width` is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmserve.core import BeamSearch, GenerateRequest, SamplingParams
from llmserve.engine.validation import prompt_error
from llmserve.errors import LlmserveError, Unsupported, raise_problems
from llmserve.serving.types import Tensor
from llmserve.stages.guides import GuideKind, GuideText
from llmserve.stages.text import text_from_bytes
from llmserve.stages.word_lists import unpack_word_list

Value = TypeVar("Value")

UNSUPPORTED_INPUTS = (  # refused, not ignored
    "draft_logits", "draft_acceptance_threshold", "encoder_input_features", "encoder_output_lengths",
    "prompt_embedding_table", "prompt_table_extra_ids", "prompt_vocab_size", "cross_attention_mask",
    "skip_cross_attn_blocks", "mrope_rotary_cos_sin",
    "mrope_position_deltas", "lora_weights", "lora_config", "context_phase_params",
    "runtime_top_p_min", "runtime_top_p_decay",
    "runtime_top_p_reset_ids", "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size",
    "retention_token_range_starts", "retention_token_range_ends", "retention_token_range_priorities",
    "retention_token_range_durations_ms", "retention_decode_priority", "retention_decode_duration_ms",
)  # fmt: skip
MAX_TEXTS = 16 * 1024  # maximum in one input
DECODER_INPUTS = ("decoder_input_ids", "decoder_input_lengths")  # one id is what preprocessing makes of no text


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A request, as described by its tensors."""

    generate: GenerateRequest
    streaming: bool
    excludes_input: bool
    stop_strings: tuple[str, ...]
    prompt_warnings: tuple[str, ...] = ()  # from preprocessing, for the client
    guide: GuideText | None = None  # the required format of answers, to be compiled
    wants_receipt: bool = False


def is_stop(inputs: Mapping[str, Tensor]) -> bool:
    """Whether it asks to end the request with its own id."""
    return _RequestReader(inputs).flag("stop")


def read_request(
    inputs: Mapping[str, Tensor], *, request_id: str, max_seq_len: int, vocab_sizes: Set[int], excludes_input: bool,
    max_beam_width: int = 1,
) -> TensorRequest:  # fmt: skip
    """`vocab_sizes`: the tokenizer's, and the engine's, which may be padded; empty without a tokenizer.

    Raises `Unsupported` if every problem is a missing feature of this engine, else `InvalidArgument`; `PromptTooLong`
    for a prompt that is too long.
    """
    reader = _RequestReader(inputs)
    names = UNSUPPORTED_INPUTS + (DECODER_INPUTS if reader.size("decoder_input_ids") > 1 else ())
    unsupported = [f"{name} is not supported by this engine" for name in names if reader.has(name)]
    request = TensorRequest(
        GenerateRequest(
            request_id=request_id,
            prompt_ids=reader.prompt_ids(max_seq_len),
            sampling=_sampling(reader),
            end_id=reader.token("end_id"),
            stop_ids=reader.words("stop_words_list"),
            bad_ids=reader.words("bad_words_list"),
            embedding_bias=reader.bias("embedding_bias", vocab_sizes),
            num_sequences=reader.integer(("num_return_sequences",), 1),
            beam=_beam(reader, max_beam_width),
            return_log_probs=reader.flag("return_log_probs"),
            return_prompt_log_probs=reader.flag("return_prompt_log_probs"),
            num_top_log_probs=reader.integer(("num_top_log_probs",), 0),
            return_context_logits=reader.flag("return_context_logits"),
            return_generation_logits=reader.flag("return_generation_logits"),
            speculation=reader.flag("speculation", True),
            draft_ids=reader.draft_ids(),
        ),
        streaming=reader.flag("streaming"),
        excludes_input=reader.flag("exclude_input_in_output", excludes_input),
        stop_strings=reader.strings("stop_words"),
        prompt_warnings=reader.strings("prompt_warning"),
        guide=_guide(reader),
        wants_receipt=reader.flag("return_receipt"),
    )
    if request.generate.beam and request.streaming:
        reader.problems.append("streaming requires a beam_width of 1, because the best beam is only known at the end")
    if request.generate.beam and request.wants_receipt:
        reader.problems.append("return_receipt requires a beam_width of 1, because beam search is not repeatable")
    if request.generate.num_sequences < 1:
        reader.problems.append(f"num_return_sequences must be at least 1, got {request.generate.num_sequences}")
    problems = reader.problems + unsupported
    error = prompt_error(reader.num_prompt_ids, limit=max_seq_len - 1) if reader.problems else Unsupported
    raise_problems(error, "the request cannot be answered", problems)
    return request


def _beam(reader: _RequestReader, max_beam_width: int) -> BeamSearch | None:
    width = reader.integer(("beam_width",), 1)
    if not 1 <= width <= max_beam_width:
        allowed = (
            "1 (this engine does not support beam search)" if max_beam_width == 1 else f"from 1 to {max_beam_width}"
        )
        reader.problems.append(f"beam_width must be {allowed}, got {width}")
    if width <= 1:
        return None
    return BeamSearch(
        width,
        length_penalty=reader.number(("len_penalty",), 1.0) if reader.has("len_penalty") else None,
        early_stopping=int(reader.flag("early_stopping")) if reader.has("early_stopping") else None,
        diversity_rate=reader.number(("beam_search_diversity_rate",), 0.0)
        if reader.has("beam_search_diversity_rate")
        else None,
    )


def _guide(reader: _RequestReader) -> GuideText | None:
    kinds, texts = reader.strings("guided_decoding_guide_type"), reader.strings("guided_decoding_guide")
    if not kinds and not texts:
        return None
    known = {kind.value: kind for kind in GuideKind}
    kind = known.get(kinds[0]) if len(kinds) == 1 else None
    if kind is None:
        given = ", ".join(kinds) or "nothing"
        reader.problems.append(f"guided_decoding_guide_type must be one of {', '.join(known)}, got {given}")
        return None
    if len(texts) not in ((0, 1) if kind is GuideKind.JSON else (1,)):
        reader.problems.append(f"guided_decoding_guide must be one string for the type {kind.value}, got {len(texts)}")
        return None
    return GuideText(kind, texts[0] if kind is not GuideKind.JSON else "")


def top_k_meant(top_k: int, top_p: float, min_p: float) -> int:
    """The value of `runtime_top_k`; 0 if it is not given."""
    return 1 if top_k == 0 and top_p == 0 and min_p == 0 else top_k


def _sampling(reader: _RequestReader) -> SamplingParams:
    top_k, top_p = reader.integer(("runtime_top_k",), 0), reader.number(("runtime_top_p",), 0.0)
    min_p = reader.number(("min_p",), 0.0)
    sampling = SamplingParams(
        max_tokens=reader.integer(("request_output_len",), 0),
        min_tokens=reader.integer(("min_tokens", "min_length"), 0),
        temperature=reader.number(("temperature",), 1.0),
        top_k=top_k_meant(top_k, top_p, min_p),
        top_p=1.0 if top_p == 0 else top_p,
        min_p=min_p,
        repetition_penalty=reader.number(("repetition_penalty",), 1.0),
        presence_penalty=reader.number(("presence_penalty",), 0.0),
        frequency_penalty=reader.number(("frequency_penalty",), 0.0),
        seed=reader.integer(("seed", "random_seed"), 0),
    )
    names = {"max_tokens": "request_output_len (max_tokens)", "top_k": "runtime_top_k", "top_p": "runtime_top_p"}
    for problem in sampling.problems():
        name, _, rest = problem.partition(" ")
        reader.problems.append(f"{names.get(name, name)} {rest}")
    return sampling


class _RequestReader:
    """Typed access to the inputs of one request; collects problems. An empty tensor counts as absent."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self._inputs = inputs
        self.problems: list[str] = []
        self.num_prompt_ids = 0

    def has(self, name: str) -> bool:
        return self.size(name) > 0

    def size(self, name: str) -> int:
        """Number of elements; 0 when absent."""
        return int(self._inputs[name].data.size) if name in self._inputs else 0

    def flag(self, name: str, default: bool = False) -> bool:
        return self._scalar((name,), default, bool)

    def integer(self, names: tuple[str, ...], default: int) -> int:
        return self._scalar(names, default, int)

    def number(self, names: tuple[str, ...], default: float) -> float:
        return self._scalar(names, default, float)

    def token(self, name: str) -> int | None:
        """A token id; None when it is absent or negative."""
        token = self.integer((name,), -1)
        return token if token >= 0 else None

    def prompt_ids(self, max_seq_len: int) -> tuple[int, ...]:
        """`input_ids`, truncated to `input_lengths`."""
        ids: NDArray[Any] = self._row("input_ids")
        length = self.integer(("input_lengths",), ids.size)
        if length > ids.size:
            self.problems.append(f"input_lengths is {length}, but input_ids has {ids.size} ids")
        elif length <= 0:
            self.problems.append("the prompt is empty: input_ids has no ids")
        elif length >= max_seq_len:
            self.problems.append(
                f"the prompt is too long: it has {length} tokens, and this engine takes at most {max_seq_len - 1}"
            )
        self.num_prompt_ids = max(0, min(length, ids.size))
        return tuple(ids[: max(0, min(length, max_seq_len))].tolist())  # of too long a prompt no more are looked at

    def draft_ids(self) -> tuple[int, ...]:
        """`draft_input_ids`, truncated to `num_draft_tokens`."""
        ids = self._row("draft_input_ids")
        count = self.integer(("num_draft_tokens",), ids.size)
        if not 0 <= count <= ids.size:
            self.problems.append(
                f"num_draft_tokens must be from 0 to {ids.size}, the number of draft_input_ids, got {count}"
            )
        return tuple(ids[: max(0, count)].tolist())

    def words(self, name: str) -> tuple[tuple[int, ...], ...]:
        return self._tried(lambda: unpack_word_list(self._inputs[name].data, name), ()) if self.has(name) else ()

    def strings(self, name: str) -> tuple[str, ...]:
        if not self.has(name):
            return ()
        values = self._inputs[name].data.reshape(-1)
        if len(values) > MAX_TEXTS:
            self.problems.append(f"{name} has {len(values)} entries, more than {MAX_TEXTS}")
            return ()
        return self._tried(lambda: tuple(text for value in values if (text := text_from_bytes(value, name))), ())

    def bias(self, name: str, vocab_sizes: Set[int]) -> tuple[tuple[int, float], ...]:
        """A dense vector with one value per token id -> the values that change something. A single 0 means none."""
        values = self._row(name).astype(np.float32)
        if vocab_sizes and values.size not in vocab_sizes and values.tolist() not in ([], [0]):
            known = " or ".join(map(str, sorted(vocab_sizes)))
            self.problems.append(
                f"{name} must have one value for each token of the vocabulary: {known}, got {values.size}"
            )
        if not np.isfinite(values).all():
            self.problems.append(f"{name} must hold finite numbers only")
        return tuple((int(token), float(values[token])) for token in np.flatnonzero(values))

    def _row(self, name: str) -> NDArray[Any]:
        """A vector, with or without the batch dimension of 1; empty if absent."""
        if not self.has(name):
            return np.zeros(0, np.int32)
        data = self._inputs[name].data
        if data.size != data.shape[-1]:
            self.problems.append(f"{name} must have shape [1, N] (a batch of one), got {list(data.shape)}")
        row: NDArray[Any] = data.reshape(-1)[: data.shape[-1]]
        return row

    def _scalar(self, names: tuple[str, ...], default: Value, convert: Callable[[Any], Value]) -> Value:
        """The value under any of its names."""
        found = {name: self._inputs[name].data.reshape(-1) for name in names if self.has(name)}
        for name, data in found.items():
            if data.size != 1:
                self.problems.append(f"{name} must hold one value, got shape {list(self._inputs[name].shape)}")
        values = [convert(data[0]) for data in found.values()]
        if any(value != values[0] for value in values) and not any(_is_nan(value) for value in values):
            self.problems.append(f"{' and '.join(found)} mean the same, but differ: {values}")
        return values[0] if values else default

    def _tried(self, read: Callable[[], Value], default: Value) -> Value:
        try:
            return read()
        except LlmserveError as error:
            self.problems.append(str(error))
            return default


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
