"""Checks that every engine makes before a request enters a queue; reports all problems at once as `InvalidArgument`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from llmserve.core import GenerateRequest
from llmserve.errors import InvalidArgument, PromptTooLong, raise_problems

MAX_NUM_SEQUENCES = 128
MAX_TOP_LOG_PROBS = 20
MAX_LOGITS_BYTES = 2**28  # of one request
MAX_WORD_LENGTH = 64
MAX_WORD_TOKENS = 16384  # of all words of a list together: they are indexed, and looked up after every token


def check_request(
    request: GenerateRequest, *, vocab_size: int, max_seq_len: int, max_beam_width: int = 1, pools: bool = False,
    adapters: Collection[str] = (),
) -> None:  # fmt: skip
    """Raises `InvalidArgument` unless an engine with these limits can answer the request.

    `pools`: it makes embeddings or scores, not tokens. `adapters`: digests of its adapters.
    """
    problems = [
        *_kind_problems(request, pools),
        *_prompt_problems(request, vocab_size, max_seq_len),
        *request.sampling.problems(),
        *_limit_problems(request),
        *_beam_problems(request, max_beam_width),
        *_score_problems(request, vocab_size, max_seq_len),
        *_draft_problems(request, vocab_size, max_seq_len),
        *_word_problems("stop_ids", request.stop_ids, vocab_size),
        *_word_problems("bad_ids", request.bad_ids, vocab_size),
        *_ban_problems(request, vocab_size),
        *_bias_problems(request, vocab_size),
        *_adapter_problems(request, adapters),
    ]
    error = prompt_error(len(request.prompt_ids), limit=longest_prompt(request, max_seq_len))
    raise_problems(error, f"request {request.request_id!r} is not valid", problems)


def longest_prompt(request: GenerateRequest, max_seq_len: int) -> int:
    """Leaves one token for an answer."""
    return max_seq_len if request.pooled else max_seq_len - 1


def prompt_error(num_tokens: int, *, limit: int) -> Callable[[str], InvalidArgument]:
    """Returns the error class: a prompt of more than `limit` tokens has its own, even if there are other problems."""
    return partial(PromptTooLong, num_tokens=num_tokens, limit=limit) if num_tokens > limit else InvalidArgument


def _prompt_problems(request: GenerateRequest, vocab_size: int, max_seq_len: int) -> Iterator[str]:
    num_prompt = len(request.prompt_ids)
    if num_prompt == 0:
        yield "the prompt is empty; give at least one token"
    if request.pooled and num_prompt > max_seq_len:
        yield f"the text has {num_prompt} tokens, but this engine takes at most {max_seq_len}; shorten it"
    elif num_prompt >= max_seq_len and not request.pooled:
        yield (
            f"the prompt has {num_prompt} tokens, but this engine takes at most {max_seq_len - 1} "
            f"(max_seq_len {max_seq_len}, one left for the answer)"
        )
    yield from _id_problems("prompt_ids", request.prompt_ids, vocab_size)


def _kind_problems(request: GenerateRequest, pools: bool) -> Iterator[str]:
    if pools and not request.pooled:
        yield "this engine makes embeddings or scores of texts, not tokens"
    if request.pooled and not pools:
        yield "this engine makes tokens, not embeddings or scores"
    if not 0 <= request.second_segment <= max(0, len(request.prompt_ids) - 1):
        yield f"second_segment must be a position of the prompt, got {request.second_segment}"


def _draft_problems(request: GenerateRequest, vocab_size: int, max_seq_len: int) -> Iterator[str]:
    if len(request.draft_ids) > max_seq_len:
        yield f"draft_ids has {len(request.draft_ids)} tokens, but answers of this engine have at most {max_seq_len}"
    yield from _id_problems("draft_ids", request.draft_ids, vocab_size)


def _limit_problems(request: GenerateRequest) -> Iterator[str]:
    sampling = request.sampling
    if 1 <= sampling.max_tokens < sampling.min_tokens:
        yield f"min_tokens ({sampling.min_tokens}) must not exceed max_tokens ({sampling.max_tokens})"
    if not 1 <= request.num_sequences <= MAX_NUM_SEQUENCES:
        yield f"num_sequences must be from 1 to {MAX_NUM_SEQUENCES}, got {request.num_sequences}"
    if request.deadline is not None and math.isnan(request.deadline):
        yield "the deadline is not a number"


def _beam_problems(request: GenerateRequest, max_beam_width: int) -> Iterator[str]:
    if request.beam is None:
        return
    if not 1 <= request.beam.width <= max_beam_width:
        yield f"the beam width must be from 1 to {max_beam_width} on this engine, got {request.beam.width}"
    if request.num_sequences != 1:
        yield f"beam search returns one set of answers, so num_sequences must be 1, got {request.num_sequences}"


def _adapter_problems(request: GenerateRequest, adapters: Collection[str]) -> Iterator[str]:
    if request.adapter and request.adapter not in adapters:
        yield f"the engine has no adapter {request.adapter}"


def _score_problems(request: GenerateRequest, vocab_size: int, max_seq_len: int) -> Iterator[str]:
    most = min(MAX_TOP_LOG_PROBS, vocab_size)
    if not 0 <= request.num_top_log_probs <= most:
        yield f"num_top_log_probs must be from 0 to {most}, got {request.num_top_log_probs}"
    num_new = request.num_sequences * max(0, request.max_new_tokens(max_seq_len))
    num_rows = len(request.prompt_ids) * request.return_context_logits + num_new * request.return_generation_logits
    if (size := 4 * num_rows * vocab_size) > MAX_LOGITS_BYTES:
        yield (
            f"the logits asked for are {size} bytes ({num_rows} tokens, {vocab_size} numbers of 4 bytes each), more "
            f"than {MAX_LOGITS_BYTES}; ask for fewer tokens, or for log probs"
        )


def _word_problems(name: str, words: Sequence[Sequence[int]], vocab_size: int) -> Iterator[str]:
    if not all(words):
        yield f"{name} has an empty word"
    if any(len(word) > MAX_WORD_LENGTH for word in words):
        yield f"{name} has a word of more than {MAX_WORD_LENGTH} tokens"
    if (num_tokens := sum(map(len, words))) > MAX_WORD_TOKENS:
        yield f"{name} has {num_tokens} tokens in all its words, more than {MAX_WORD_TOKENS}"
    yield from _id_problems(name, [token for word in words for token in word], vocab_size)


def _ban_problems(request: GenerateRequest, vocab_size: int) -> Iterator[str]:
    """Checks that at least one token is always allowed; only tokens that end a word can be banned."""
    banned = {word[-1] for word in request.bad_ids if word}
    if request.sampling.min_tokens > 0:
        banned |= {word[0] for word in request.stop_ids if len(word) == 1}
        banned |= set() if request.end_id is None else {request.end_id}  # any id, the vocabulary's or not
    if sum(0 <= token < vocab_size for token in banned) >= vocab_size:
        yield "bad_ids and the tokens that min_tokens bans cover the whole vocabulary; ban fewer tokens"


def _bias_problems(request: GenerateRequest, vocab_size: int) -> Iterator[str]:
    token_ids = [token for token, _ in request.embedding_bias]
    yield from _id_problems("embedding_bias", token_ids, vocab_size)
    if len(set(token_ids)) < len(token_ids):
        twice = next(token for token, count in Counter(token_ids).items() if count > 1)
        yield f"embedding_bias names token {twice} more than once"
    if not all(math.isfinite(bias) for _, bias in request.embedding_bias):
        yield "embedding_bias has a value that is not a finite number"


def _id_problems(name: str, token_ids: Sequence[int], vocab_size: int) -> Iterator[str]:
    outside = [token for token in token_ids if not 0 <= token < vocab_size]
    if outside:
        yield f"{name} has {len(outside)} ids outside the vocabulary (0 to {vocab_size - 1}); the first is {outside[0]}"
