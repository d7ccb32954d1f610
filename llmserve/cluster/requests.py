"""Converts Dynamo's requests to llmserve's, and events to its chunks. Each field is used or rejected by name.

If a worker dies, its streams fail over to another one. That one gets a request with the same id, whose prompt includes
the tokens answered so far, and with fewer tokens left. Sampling depends on the seed and on positions from the prompt's
beginning, so the answer continues unchanged. Settings that count only the answer's tokens would change it and are
rejected, because a request does not contain where its original prompt ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmserve.core import FinishReason, GenerateRequest, SamplingParams, TokenEvent
from llmserve.errors import InvalidArgument, raise_problems

Fields = Mapping[str, Any]

KNOWN = {  # supported fields; any other that is not null is rejected
    "sampling_options": {
        "n", "best_of", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "seed", "guided_decoding", "use_beam_search", "length_penalty",
        "include_stop_str_in_output",
    },
    "stop_conditions": {
        "max_tokens", "min_tokens", "stop", "stop_token_ids", "stop_token_ids_hidden", "ignore_eos",
        "max_thinking_tokens",
    },
}  # fmt: skip
NEUTRAL: Mapping[str, Sequence[Any]] = {  # values without an effect
    "n": (1,), "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1.0, 0.0),
    "include_stop_str_in_output": (False,), "guided_decoding": ({},), "max_thinking_tokens": (),
}  # fmt: skip
WHY = {
    "n": "only its first answer would be complete; send n requests",
    "guided_decoding": "guided answers cannot fail over to another worker; use llmserve's own server",
}
OUTPUT_ONLY = ("presence_penalty", "frequency_penalty")
FINISH_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "cancelled",
}
MOST_TOP_LOG_PROBS = 20


def request_of(fields: Fields, request_id: str, *, max_seq_len: int, migrates: bool = True) -> GenerateRequest:
    """`migrates`: whether a stream may fail over to another worker. Raises `InvalidArgument` with all problems."""
    prompt = tuple(fields.get("token_ids") or ())
    sampling, stop, output = (
        dict(fields.get(name) or {}) for name in ("sampling_options", "stop_conditions", "output_options")
    )
    raise_problems(InvalidArgument, f"request {request_id}", list(_problems(sampling, stop, output, migrates)))
    ends = [*(() if stop.get("ignore_eos") else stop.get("stop_token_ids_hidden") or ())]
    ends += [token for token in stop.get("stop_token_ids") or () if token not in ends]
    top = output.get("logprobs")
    return GenerateRequest(
        request_id,
        prompt,
        _sampling(sampling, stop, request_id, max(1, max_seq_len - len(prompt))),
        end_id=ends[0] if ends else None,
        stop_ids=tuple((token,) for token in ends[1:]),
        return_log_probs=top is not None,
        num_top_log_probs=int(top or 0),
    )


def _sampling(sampling: Fields, stop: Fields, request_id: str, room: int) -> SamplingParams:
    def value(name: str, default: Any) -> Any:
        given = sampling.get(name)
        return default if given is None else given

    max_tokens = stop.get("max_tokens")
    seed = value("seed", None)
    return SamplingParams(
        max_tokens=room if max_tokens is None else max_tokens,
        min_tokens=stop.get("min_tokens") or 0,
        temperature=value("temperature", 1.0),
        top_k=max(0, value("top_k", 0)),  # -1: all
        top_p=value("top_p", 1.0),
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        seed=_seed_of(request_id) if seed is None else seed % 2**64,
    )


def _seed_of(request_id: str) -> int:
    """The same at every worker that gets the request."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little")


def _problems(sampling: Fields, stop: Fields, output: Fields, migrates: bool) -> Iterator[str]:
    for group, fields in (("sampling_options", sampling), ("stop_conditions", stop)):
        for name in sorted(fields.keys() - KNOWN[group]):
            if fields[name] is not None:
                yield f"{name} is not supported here"
    for name, neutral in NEUTRAL.items():
        given = sampling.get(name, stop.get(name))
        if given is not None and given not in neutral:
            yield f"{name} is not supported" + (f": {WHY[name]}" if name in WHY else "")
    for name in OUTPUT_ONLY:
        if migrates and sampling.get(name):
            yield (
                f"{name} counts the answer's tokens, and a worker that takes a stream over does not know where they "
                "begin; use repetition_penalty, or workers started with --without-migration"
            )
    if output.get("prompt_logprobs") is not None:
        yield "prompt_logprobs is not supported; use llmserve's own server"
    if (top := output.get("logprobs")) is not None and not 0 <= int(top) <= MOST_TOP_LOG_PROBS:
        yield f"logprobs must be from 0 to {MOST_TOP_LOG_PROBS}, got {top}"


def chunk_of(event: TokenEvent) -> dict[str, Any]:
    """A chunk for `generate`. The front end counts tokens: the worker's counts are wrong after a migration."""
    chunk: dict[str, Any] = {"token_ids": list(event.token_ids), "index": event.sequence_index}
    if event.log_probs:
        chunk["log_probs"] = list(event.log_probs)
    if event.top:
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "token": None, "logprob": log_prob}
                for rank, (token, log_prob) in enumerate(zip(top.ids, top.log_probs, strict=True), 1)
            ]
            for top in event.top
        ]
    if event.finish_reason is not None:
        chunk["finish_reason"] = FINISH_REASONS[event.finish_reason]
    return chunk
