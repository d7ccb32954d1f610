"""llama.cpp's own routes: POST /completion and /apply-template, GET /props, and token counts of prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from fastapi import Request, Response
from pydantic import JsonValue

from llmserve import __version__
from llmserve.at_once import at_once
from llmserve.core import MAX_MODEL_LEN, SAMPLING_DEFAULTS
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.event_stream import EventStream, data, json_answer
from llmserve.frontends.text.answers.generation import Caller, Piece, Sampling, answers
from llmserve.frontends.text.answers.log_probs import chat_log_probs, scored_output, token_ids
from llmserve.frontends.text.answers.replies import LIMITS, NOTHING
from llmserve.frontends.text.llama_cpp.fields import Item, NativeRequest
from llmserve.frontends.text.openai.chat_fields import ChatRequest
from llmserve.frontends.text.requests.ensembles import Ensemble, Values
from llmserve.frontends.text.state import ApiState

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request, and the settings of all its prompts."""

    body: NativeRequest
    ensemble: Ensemble
    sampling: Sampling
    settings: Json


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    state: ApiState

    async def completion(self, body: NativeRequest, request: Request) -> Response:
        """Generate the continuation of one or several prompts."""
        ensemble = self.state.ensembles.named(body)
        biases = await self._biases(ensemble, body)
        sampling = await self.state.sampling(ensemble, body.asked(biases))
        told: list[Json] = [{"token": token, "bias": bias} for token, bias in biases.items()]
        if body.ignore_eos:
            end, _ = await self.state.ensembles.end_ids(ensemble)
            told.append({"token": end, "bias": None})  # JSON has no infinity
        asked = _Asked(body, ensemble, sampling, {**body.settings(sampling), "logit_bias": told})
        caller = self.state.caller(request)
        prompts = body.prompts()
        if body.stream:
            return EventStream(self._events(asked, caller, prompts[0]))

        def whole(index: int) -> Awaitable[Json]:
            return self._whole(asked, caller, prompts[index], index)

        found = await at_once(whole, range(len(prompts)), caller.most_at_once(sampling.num_answers))
        return json_answer(found if isinstance(body.prompt, list) and len(found) > 1 else found[0])

    async def apply_template(self, body: ChatRequest, request: Request) -> Response:
        """Apply the chat template: return the prompt of a conversation, with its special tokens."""
        ensemble, ids = await self._chat_ids(body)
        return json_answer({"prompt": await self.state.ensembles.text_of(ensemble, ids, with_special=True)})

    async def count_chat(self, body: ChatRequest, request: Request) -> Response:
        """Count the tokens of a conversation."""
        return json_answer({"object": "response.input_tokens", "input_tokens": len((await self._chat_ids(body))[1])})

    async def props(self) -> Response:
        """Describe the server's only model, as llama.cpp's clients expect."""
        ensembles = self.state.ensembles
        ensemble = ensembles.only()
        facts = ensembles.core.facts(ensemble.name)
        style = await self.state.conversations.style(ensemble)
        return json_answer({
            "default_generation_settings": {
                "params": {**facts.get(SAMPLING_DEFAULTS, {}), **self.state.settings.sampling},
                "n_ctx": facts.get(MAX_MODEL_LEN),
            },
            "model_alias": ensembles.listed()[0],
            "chat_template": style.tokenizer.get("chat_template", ""),
            "bos_token": style.tokenizer.get("bos_token", ""),
            "eos_token": style.tokenizer.get("eos_token", ""),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"llmserve {__version__}",
        })  # fmt: skip

    async def _chat_ids(self, body: ChatRequest) -> tuple[Ensemble, list[int]]:
        ensemble = self.state.ensembles.named(body)
        prepared = await self.state.conversations.prepared(ensemble, body.talk())
        return ensemble, await self.state.ensembles.prompt_ids(ensemble, prepared.prompt)

    async def _biases(self, ensemble: Ensemble, body: NativeRequest) -> dict[int, float]:
        """The biases by token; a text's bias applies to each of its tokens."""
        found: dict[int, float] = {}
        for key, bias in body.logit_bias or ():
            for token in [key] if isinstance(key, int) else await self.state.ensembles.text_ids(ensemble, key):
                found[token] = bias
        return found

    async def _values(self, ensemble: Ensemble, prompt: Sequence[Item]) -> Values:
        if len(prompt) == 1 and isinstance(prompt[0], str):
            return {"text_input": [prompt[0]]}
        ids: list[int] = []
        for item in prompt:
            ids += [item] if isinstance(item, int) else await self.state.ensembles.text_ids(ensemble, item)
        return {"prompt_ids": ids}

    async def _whole(self, asked: _Asked, caller: Caller, prompt: Sequence[Item], index: int) -> Json:
        values = await self._values(asked.ensemble, prompt)
        pieces = caller.pieces(asked.ensemble, values, asked.sampling, streaming=False, wants_tokens=True)
        (answer,) = await answers(pieces, 1)
        text, told = ("", []) if asked.body.says_nothing else (answer.text, answer.pieces)
        document = {
            **await self._ending(asked, answer.last, prompt, text, index),
            "tokens": token_ids(told) if asked.body.return_tokens else [],
            **await self._probabilities(asked, told),
        }
        if not asked.body.response_fields:
            return document
        return {name: found for name in asked.body.response_fields if (found := _member(document, name)) is not None}

    async def _events(self, asked: _Asked, caller: Caller, prompt: Sequence[Item]) -> AsyncGenerator[bytes, None]:
        values = await self._values(asked.ensemble, prompt)
        pieces = caller.pieces(asked.ensemble, values, asked.sampling, streaming=True, wants_tokens=True)
        texts: list[str] = []
        async with aclosing(pieces):
            async for piece in pieces:
                ids = token_ids([piece]) if piece.arrays else []
                if ids and not asked.body.says_nothing:
                    texts.append(piece.text)
                    yield data({
                        "index": 0, "content": piece.text, "tokens": ids, "stop": False, "id_slot": NO_SLOT,
                        **await self._probabilities(asked, [piece]),
                    })  # fmt: skip
                if piece.finish_reason:
                    ending = await self._ending(asked, piece, prompt, "".join(texts), 0)
                    yield data({**ending, "content": "", "tokens": []})

    async def _ending(
        self, asked: _Asked, last: Piece, prompt: Sequence[Item], text: str, index: int
    ) -> dict[str, Json]:
        usage, timings, ensembles = last.usage, last.timings, self.state.ensembles
        if asked.body.says_nothing:  # engines generate one token anyway
            last = replace(last, finish_reason="length", stop_word="")
            usage = usage and replace(usage, completion=0)
            timings = timings and {**timings, "predicted_n": 0}
        is_text = len(prompt) == 1 and isinstance(prompt[0], str)
        ids = [] if is_text else (await self._values(asked.ensemble, prompt))["prompt_ids"]
        return {
            "index": index, "content": text, "id_slot": NO_SLOT, "stop": True, "model": asked.body.model,
            "tokens_predicted": 0 if usage is None else usage.completion,
            "tokens_evaluated": 0 if usage is None else usage.prompt,
            "tokens_cached": 0 if usage is None else usage.cached,
            "generation_settings": asked.settings,
            "prompt": prompt[0] if is_text else await ensembles.text_of(asked.ensemble, ids, with_special=True),
            "has_new_line": "\n" in text,
            "truncated": False,
            "stop_type": "limit" if last.finish_reason in LIMITS else "word" if last.stop_word else "eos",
            "stopping_word": last.stop_word,
            "timings": timings,
            **({"warning": last.warning} if last.warning else {}),
        }  # fmt: skip

    async def _probabilities(self, asked: _Asked, pieces: Sequence[Piece]) -> Json:
        if not asked.body.n_probs:
            return NOTHING
        tokens = [one for piece in pieces for one in scored_output(piece.arrays)]
        texts = await self.state.token_texts.of(asked.ensemble, tokens)
        return {"completion_probabilities": chat_log_probs(tokens, texts, with_ids=True)}


def _member(document: JsonValue, path: str) -> JsonValue:
    """A member by its path, such as `generation_settings/seed`; None if it does not exist."""
    for name in path.split("/"):
        document = document.get(name) if isinstance(document, dict) else None
    return document
