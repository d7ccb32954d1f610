"""GET /v1/models, and additions to OpenAI's API for clients of vLLM and llama.cpp: /tokenize, /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from fastapi import Request, Response
from pydantic import Field, model_validator

from llmserve.core import MAX_MODEL_LEN, POOLING
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.event_stream import json_answer
from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.answers.log_probs import Scored, token_text
from llmserve.frontends.text.openai.chat_fields import Messages
from llmserve.frontends.text.requests.ensembles import Ensemble, Values
from llmserve.frontends.text.requests.fields import ModelName, TemplateValues, TokenId
from llmserve.frontends.text.requests.tools import Choice, Tools, tool_use
from llmserve.frontends.text.requests.validation import Strict
from llmserve.frontends.text.state import ApiState

OWNER = "llmserve"


class TokenizeRequest(Strict):
    model: ModelName = ""
    prompt: str | None = Field(None, description="The text to tokenize, or give messages.")
    messages: Messages | None = Field(None, description="The conversation to tokenize.")
    add_special_tokens: bool | None = Field(None, description="Of a prompt. Default: as the model is configured.")
    return_token_strs: bool | None = Field(None, description="Return the text of each token.")
    chat_template_kwargs: TemplateValues | None = None
    tools: Tools | None = Field(None, description="Functions in the conversation's prompt.")
    content: str | None = Field(None, description="The text, as llama.cpp names it, for the three fields below.")
    add_special: bool | None = Field(None, description="Add special tokens before and after content. Off by default.")
    parse_special: Literal[True] | None = Field(None, description="No effect: special tokens are always recognized.")
    with_pieces: bool | None = Field(None, description="Return the text of each token of content.")

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if [self.prompt, self.messages, self.content].count(None) != 2:
            raise ValueError("give one of prompt, messages and content")
        if self.content is None and (self.add_special is not None or self.with_pieces is not None):
            raise ValueError("add_special and with_pieces require content")
        if self.content is not None and (self.add_special_tokens is not None or self.return_token_strs is not None):
            raise ValueError("add_special_tokens and return_token_strs require prompt or messages")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs require messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens requires a prompt: the chat template adds its own special tokens")
        return self


class DetokenizeRequest(Strict):
    model: ModelName = ""
    tokens: list[TokenId] = Field(description="The token ids to convert to text.")


@dataclass(frozen=True, slots=True)
class Models:
    state: ApiState

    async def list(self) -> Response:
        """List the models."""
        return json_answer({"object": "list", "data": [self._document(name) for name in self.state.listed()]})

    async def retrieve(self, model: str) -> Response:
        """Describe one model."""
        return json_answer(self._document(model))

    async def retrieve_owned(self, owner: str, name: str) -> Response:
        """Describe a model whose name contains a slash."""
        return await self.retrieve(f"{owner}/{name}")

    def _document(self, name: str) -> Json:
        """The document of a model, by a name that clients use for it."""
        ensembles, embedders = self.state.ensembles, self.state.embedders
        ensemble = (embedders if embedders.has(name) else ensembles).find(name)
        facts = ensembles.core.facts(ensemble.name)
        document: dict[str, Json] = {
            "id": name, "object": "model", "created": self.state.created, "owned_by": OWNER, "root": ensemble.name,
            **({"engine": dict(facts)} if facts else {}),
            **({MAX_MODEL_LEN: facts[MAX_MODEL_LEN]} if MAX_MODEL_LEN in facts else {}),
        }  # fmt: skip
        if not ensemble.adapter:
            return document
        listed = ensembles.listed()
        parent = ensemble.name if ensemble.name in listed else listed[0]
        return {**document, "parent": parent, "adapter": dict(ensembles.core.adapters(ensemble.name)[name])}

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """Convert a prompt or a conversation to token ids."""
        embedders, ensembles = self.state.embedders, self.state.ensembles
        if embedders.has(body.model) or not (body.model or list(ensembles.names())):
            return await self._embedders_ids(embedders.find(body.model), body)
        ensemble = ensembles.find(body.model)
        ids = await ensembles.prompt_ids(ensemble, await self._prompt(ensemble, body))
        if body.content is not None:
            return json_answer({"tokens": await self._pieces(ensemble, ids) if body.with_pieces else ids})
        texts = None
        if body.return_token_strs:
            known = await self.state.token_texts.of(ensemble, [Scored(token, None) for token in ids])
            texts = [token_text(known[token]) for token in ids]
        longest = ensembles.core.facts(ensemble.name).get(MAX_MODEL_LEN)
        return json_answer({"count": len(ids), MAX_MODEL_LEN: longest, "tokens": ids, "token_strs": texts})

    async def _embedders_ids(self, ensemble: Ensemble, body: TokenizeRequest) -> Response:
        """The ids of a text with its special tokens, for clients that shorten long texts themselves."""
        if body.prompt is None or body.add_special_tokens is False or body.return_token_strs:
            raise Refused(f"model '{ensemble.name}' is an embedding model: give prompt and no other field", "prompt")
        ids = await self.state.embedders.prompt_ids(ensemble, {"text_input": [body.prompt]})
        longest = self.state.embedders.core.facts(ensemble.name).get(POOLING, {}).get("max_tokens")
        return json_answer({"count": len(ids), MAX_MODEL_LEN: longest, "tokens": ids, "token_strs": None})

    async def _pieces(self, ensemble: Ensemble, ids: Sequence[int]) -> Json:
        """Tokens in llama.cpp's format: bytes that are not valid UTF-8 on their own are numbers."""
        stands_for = dict(zip(ids, await self.state.ensembles.bytes_of(ensemble, ids), strict=True))
        return [{"id": token, "piece": _text_or_numbers(stands_for[token])} for token in ids]

    async def _prompt(self, ensemble: Ensemble, body: TokenizeRequest) -> Values:
        if body.messages is not None:
            listed = [one.listed() for one in body.messages]
            tools = tool_use([tool.function for tool in body.tools or ()], Choice(), several=True)
            conversations = self.state.conversations
            further = conversations.with_defaults(body.chat_template_kwargs)
            return await conversations.values(ensemble, listed, further, tools)
        if body.content is not None:
            return {"text_input": [body.content], "add_special_tokens": [bool(body.add_special)]}
        values: Values = {"text_input": [body.prompt]}
        adds = body.add_special_tokens
        return values if adds is None else {**values, "add_special_tokens": [adds]}

    async def tokenizer_info(self) -> Response:
        """The texts of the special tokens. Evaluation harnesses ask for them before they tokenize prompts here."""
        ensembles, ensemble = self.state.ensembles, self.state.ensembles.only()
        end, pad = await ensembles.end_ids(ensemble)
        opened = await ensembles.prompt_ids(ensemble, {"text_input": [""], "add_special_tokens": [True]})
        wanted = {"eos_token": end, "pad_token": pad, "bos_token": opened[0] if opened else -1}
        texts = await ensembles.bytes_of(ensemble, list(wanted.values()))
        found = {name: text.decode("utf-8", "replace") or None for name, text in zip(wanted, texts, strict=True)}
        style = await self.state.conversations.style(ensemble)
        return json_answer({"tokenizer_class": None, "chat_template": None, **found, **style.tokenizer})

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """Convert token ids to text, without special tokens."""
        ensemble = self.state.ensembles.find(body.model)
        if not body.tokens:
            return json_answer({"prompt": "", "content": ""})
        if self.state.ensembles.reads(ensemble, "RETURN_TOKENS"):
            ids = [*dict.fromkeys(body.tokens)]
            texts = await self.state.ensembles.bytes_of(ensemble, ids)
            if unknown := [token for token, text in zip(ids, texts, strict=True) if not text]:
                raise Refused(f"tokens: the vocabulary has no id {unknown[0]}", "tokens")
        text = await self.state.ensembles.text_of(ensemble, body.tokens)
        return json_answer({"prompt": text, "content": text})  # vLLM's name, and llama.cpp's


def _text_or_numbers(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]
