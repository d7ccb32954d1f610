"""Converts log probs of tokens from the ensemble's outputs to the two formats of OpenAI's API.

output_token_ids [1, n]  output_log_probs [1, 1, n]  output_top_ids, output_top_log_probs [1, n, k]
prompt_log_probs [1, m - 1]  prompt_top_ids, prompt_top_log_probs [1, m - 1, k]     of the tokens after the first
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from llmserve.errors import InternalError
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.generation import Arrays, Piece
from llmserve.frontends.text.requests.ensembles import Ensemble, Ensembles, Values

LOWEST = -9999.0  # JSON has no infinity
TokenBytes: TypeAlias = Mapping[int, bytes]
MAX_KNOWN = 300_000  # tokens of one ensemble whose bytes are kept


@dataclass(frozen=True, slots=True)
class Scored:
    """One token, and the k likeliest tokens at its position."""

    token: int
    log_prob: float | None  # None for a prompt's first token
    top: Sequence[tuple[int, float]] = ()


def log_prob_values(num_top: int, *, of_prompt: bool = False) -> Values:
    """The inputs that request log probs from an ensemble."""
    values: dict[str, Sequence[int | bool]] = {"return_log_probs": [True], "return_tokens": [True]}
    if num_top:
        values["num_top_log_probs"] = [num_top]
    if of_prompt:
        values["return_prompt_log_probs"] = [True]
    return values


def scored_output(arrays: Arrays) -> list[Scored]:
    """The new tokens of one response."""
    ids = arrays["output_token_ids"].reshape(-1).tolist()
    log_probs = arrays["output_log_probs"].reshape(-1).tolist()
    if len(log_probs) < len(ids):
        raise InternalError(f"the model returned {len(log_probs)} log probs for {len(ids)} tokens")
    tops = _tops(arrays, "output_top_ids", "output_top_log_probs", len(ids))
    return [Scored(*one) for one in zip(ids, log_probs, tops, strict=False)]


def with_top(tokens: Iterable[Scored], count: int | None) -> list[Scored]:
    """The tokens with at most `count` alternatives: the prompt may have requested more than the answer."""
    return [replace(one, top=one.top[: count or 0]) for one in tokens]


def with_itself(tokens: Iterable[Scored]) -> list[Scored]:
    """The tokens with themselves as the first alternative, because the requested alternatives may not include them."""
    return [
        replace(one, top=[(one.token, one.log_prob or 0.0), *(each for each in one.top if each[0] != one.token)])
        for one in tokens
    ]


def token_ids(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.arrays["output_token_ids"].reshape(-1).tolist()]


def scored_prompt(answers: Sequence[Arrays], ids: Sequence[int]) -> list[Scored]:
    """The tokens of a prompt, from its first answer that has their log probs."""
    count = len(ids) - 1
    found = (one for one in answers if "prompt_log_probs" in one and one["prompt_log_probs"].size == count)
    arrays = next(found, None)
    if arrays is None:
        raise InternalError("the model returned no log probs of the prompt")
    log_probs = arrays["prompt_log_probs"].reshape(-1).tolist()
    tops = _tops(arrays, "prompt_top_ids", "prompt_top_log_probs", len(log_probs))
    return [Scored(ids[0], None), *(Scored(*one) for one in zip(ids[1:], log_probs, tops, strict=True))]


def _tops(arrays: Arrays, ids: str, log_probs: str, count: int) -> list[list[tuple[int, float]]]:
    if ids not in arrays or log_probs not in arrays or not count or not arrays[ids].size:
        return [[]] * count
    rows = zip(arrays[ids].reshape(count, -1).tolist(), arrays[log_probs].reshape(count, -1).tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


class TokenIds(dict[int, bytes]):
    """vLLM's names for tokens by their ids, used instead of texts."""

    def __missing__(self, token: int) -> bytes:
        return f"token_id:{token}".encode()


class TokenTexts:
    """The bytes of the ensembles' tokens, requested from their last step and cached."""

    def __init__(self, ensembles: Ensembles) -> None:
        self._ensembles = ensembles
        self._known: dict[str, tuple[object, dict[int, bytes]]] = {}  # by ensemble: its config, and bytes by token

    async def of(self, ensemble: Ensemble, tokens: Iterable[Scored]) -> dict[int, bytes]:
        """The cached bytes, including those of `tokens`."""
        config = self._ensembles.core.model_config(ensemble.decoder)
        made_from, known = self._known.get(ensemble.name, (None, {}))
        if made_from is not config or len(known) > MAX_KNOWN:  # reloaded, or the cache is full
            known = {}
            self._known[ensemble.name] = config, known
        ids = {token for scored in tokens for token, _ in (*scored.top, (scored.token, 0))}
        if new := [token for token in ids if token not in known]:
            known.update(zip(new, await self._ensembles.bytes_of(ensemble, new), strict=True))
        return known


def token_text(content: bytes) -> str:
    """The text of a token. Bytes that are not valid UTF-8 are in OpenAI's notation."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def chat_log_probs(tokens: Sequence[Scored], texts: TokenBytes, *, with_ids: bool = False) -> list[Json]:
    """`with_ids`: adds the tokens' ids, as llama.cpp does."""

    def told(token: int, log_prob: float) -> dict[str, Json]:
        return ({"id": token} if with_ids else {}) | _chat_token(token, log_prob, texts)

    return [told(one.token, one.log_prob or 0.0) | {"top_logprobs": [told(*top) for top in one.top]} for one in tokens]


def _chat_token(token: int, log_prob: float, texts: TokenBytes) -> dict[str, Json]:
    content = texts[token]
    return {"token": token_text(content), "logprob": max(log_prob, LOWEST), "bytes": list(content)}


class TextOffsets:
    """Offsets in characters of one text's tokens, in order. A character may have several tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = 0

    def of_next(self, token: bytes) -> int:
        offset = self._next
        self._next += len(self._decoder.decode(token))
        return offset


def completion_log_probs(tokens: Sequence[Scored], texts: TokenBytes, offsets: TextOffsets) -> dict[str, Json]:
    return {
        "tokens": [token_text(texts[one.token]) for one in tokens],
        "token_logprobs": [None if one.log_prob is None else max(one.log_prob, LOWEST) for one in tokens],
        "top_logprobs": [_alternatives(one, texts) for one in tokens],
        "text_offset": [offsets.of_next(texts[one.token]) for one in tokens],
    }


def prompt_log_probs(tokens: Sequence[Scored], texts: TokenBytes) -> list[Json]:
    """In vLLM's format: for each position, the likeliest tokens by their ids, and the actual token."""
    return [None if one.log_prob is None else _ranked(one, one.log_prob, texts) for one in tokens]


def _ranked(one: Scored, log_prob: float, texts: TokenBytes) -> Json:
    found: dict[str, Json] = {}
    ranks: dict[int, int] = {token: rank for rank, (token, _) in enumerate(one.top, 1)}
    for token, value in (*one.top, (one.token, log_prob)):
        text = texts[token].decode("utf-8", "replace")
        found[str(token)] = {"logprob": max(value, LOWEST), "rank": ranks.get(token), "decoded_token": text}
    return found


def _alternatives(one: Scored, texts: TokenBytes) -> dict[str, float] | None:
    """The token itself and the likeliest ones. Of two tokens with the same text, the likelier counts."""
    if one.log_prob is None:
        return None
    found: dict[str, float] = {}
    for token, log_prob in ((one.token, one.log_prob), *one.top):
        text = token_text(texts[token])
        found[text] = max(log_prob, found.get(text, LOWEST))
    return found
