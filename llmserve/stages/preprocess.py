"""The preprocess step: converts text or chat messages to prompt ids, word lists and ids that end an answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmserve.errors import CheckpointError, InvalidArgument, raise_problems
from llmserve.stages.chat import (
    ChatFormat,
    Message,
    TemplateFormat,
    Tools,
    chat_format,
    require_chat_format,
    template_format,
)
from llmserve.stages.chat_style import AUTO, ChatStyle
from llmserve.stages.chat_template import TEMPLATE
from llmserve.stages.files import TextFiles
from llmserve.stages.named_templates import named_template
from llmserve.stages.text import is_unicode
from llmserve.stages.token_lengths import check_length
from llmserve.stages.tokenizer import Tokenizer, tokenizer_of

MAX_GIVEN = 4  # cached templates from requests, each with a process
NEVER = -1  # an end_id or pad_id that matches no token


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A client's prompt as text or messages (or ids, which stay as they are), and its word lists."""

    text: str | None = None
    messages: Sequence[Message] = ()
    ids: Sequence[int] = ()
    add_special_tokens: bool | None = None  # adds special tokens to `text`; None: as the model is configured
    template_values: Mapping[str, Any] = field(default_factory=dict)  # additional variables for the chat template
    tools: Tools = ()  # that the model may call
    max_tokens: int = 16
    stop_words: Sequence[str] = ()
    stop_ids: Sequence[int] = ()  # each of them ends an answer
    bad_words: Sequence[str] = ()
    bias_words: Sequence[str] = ()
    bias_weights: Sequence[float] = ()
    biased_ids: Sequence[int] = ()
    id_weights: Sequence[float] = ()
    end_id: int | None = None  # None: the checkpoint's own end tokens; -1: none
    pad_id: int | None = None

    def problems(self) -> list[str]:
        found = []
        num_prompts = (self.text is not None) + bool(self.messages) + bool(self.ids)
        if not num_prompts:
            found.append(
                'there is no prompt: give text (text_input), or messages such as [{"role": "user", "content": "Hello"}]'
            )
        if num_prompts > 1:
            found.append("there are several prompts; give only one of text, messages and prompt_ids")
        if self.template_values and not self.messages:
            found.append("chat_template_kwargs requires messages, but there are none")
        if self.tools and not self.messages:
            found.append("tools require messages, but there are none")
        if len(self.bias_words) != len(self.bias_weights):
            found.append(
                f"embedding bias needs one weight per word, got {len(self.bias_words)} words and "
                f"{len(self.bias_weights)} weights"
            )
        if len(self.biased_ids) != len(self.id_weights):
            found.append(
                f"logit bias needs one weight per id, got {len(self.biased_ids)} ids and {len(self.id_weights)} weights"
            )
        texts = [self.text or "", *(message.content for message in self.messages)]
        if not all(map(is_unicode, [*texts, *self.stop_words, *self.bad_words, *self.bias_words])):
            found.append("the text has lone surrogates (half a UTF-16 character), which UTF-8 forbids")
        for name, weights in (("embedding", self.bias_weights), ("logit", self.id_weights)):
            if not all(map(math.isfinite, weights)):
                found.append(f"{name} bias weights must be finite")
        return found


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The same as ids."""

    input_ids: tuple[int, ...]
    end_id: int
    pad_id: int
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: tuple[tuple[int, float], ...] = ()
    warning: str = ""  # what did not fit


class Preprocessor:
    """Stateless after construction: it can process any number of requests at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        files: TextFiles,
        *,
        add_special_tokens: bool = True,
        tool_format: str = AUTO,
        reasoning_format: str = AUTO,
        allows_templates: bool = False,
        has_other_template: bool = False,
        tells_date: bool = False,
        template_begins: bool = True,
    ) -> None:
        """`allows_templates`: accept templates in requests. `has_other_template`: the template of `files` replaces the
        checkpoint's format. `template_begins`: it writes the begin token, if any."""
        self.tokenizer = tokenizer
        self._allows_templates = allows_templates
        self._given_format = lru_cache(MAX_GIVEN)(self._make_format)
        self.max_seq_len = files.max_seq_len
        self._files = files
        self._chat: ChatFormat | None = (
            template_format(tokenizer, files, tool_format, reasoning_format)
            if has_other_template
            else chat_format(tokenizer, files, tool_format=tool_format, reasoning_format=reasoning_format)
        )
        if isinstance(self._chat, TemplateFormat):
            self._chat = replace(self._chat, tells_date=tells_date, writes_begin=template_begins)
        self._add_special_tokens = add_special_tokens
        self.declared_end_ids = files.token_ids("eos_token_id")
        self.end_ids = _end_ids(self.declared_end_ids, tokenizer.eos_id, files.vocab_size)
        pad = files.token_ids("pad_token_id") or ((tokenizer.pad_id,) if tokenizer.pad_id is not None else ())
        self.pad_id = (*pad, *self.end_ids, NEVER)[0]

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        add_special_tokens: bool = True,
        tool_format: str = AUTO,
        reasoning_format: str = AUTO,
        allows_templates: bool = False,
        template_file: str = "",
        tells_date: bool = False,
    ) -> Preprocessor:
        """`tool_format`, `reasoning_format`: see `ChatStyle`; `auto`: derived from the chat template. `template_file`:
        a template that replaces the checkpoint's."""
        files = TextFiles.read(path)
        named = named_template(template_file)
        if template_file:
            own = named or _template(Path(template_file))
            files = files.with_template(own, template_file)
        return cls(
            tokenizer_of(files),
            files,
            add_special_tokens=add_special_tokens,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            allows_templates=allows_templates,
            has_other_template=bool(template_file),
            tells_date=tells_date,
            template_begins=named is None,
        )

    @property
    def is_brief(self) -> bool:
        """Whether a short prompt takes microseconds: not if a template has to be run."""
        return not (isinstance(self._chat, TemplateFormat) or self._allows_templates)

    def chat_style(self, values: Mapping[str, Any]) -> ChatStyle:
        """How to read answers to messages; `values`: additional variables for the chat template."""
        chat, values = self._format_for(values)
        style = ChatStyle() if chat is None else chat.style(values)
        files = self._files
        known = {"tokenizer_class": files.tokenizer_class, "chat_template": files.chat_template}
        return replace(style, tokenizer={name: text for name, text in known.items() if text} | files.special_tokens)

    def prepare(self, prompt: TextPrompt) -> PreparedPrompt:
        """Raises `InvalidArgument` listing all problems. The engine checks the prompt's length."""
        raise_problems(InvalidArgument, "the prompt cannot be used", prompt.problems())
        end_id, end_words = self._ends(prompt)
        ids, warning = self._input_ids(prompt)
        return PreparedPrompt(
            input_ids=tuple(ids),
            end_id=end_id,
            pad_id=self.pad_id if prompt.pad_id is None else prompt.pad_id,
            stop_words=(*self._words(prompt.stop_words), *((token,) for token in prompt.stop_ids), *end_words),
            bad_words=self._bad_words(prompt.bad_words),
            embedding_bias=self._bias(prompt),
            warning=warning,
        )

    def _input_ids(self, prompt: TextPrompt) -> tuple[list[int], str]:
        """And a warning if part of the prompt is missing in them."""
        if prompt.ids:
            return list(prompt.ids), ""
        if prompt.text is not None:
            adds = self._add_special_tokens if prompt.add_special_tokens is None else prompt.add_special_tokens
            check_length(prompt.text, self.tokenizer, self.max_seq_len)
            return self.tokenizer.encode(prompt.text, add_special_tokens=adds), ""
        found, values = self._format_for(prompt.template_values)
        chat = found or require_chat_format(self.tokenizer, self._files)
        room = self._room(prompt.max_tokens)
        made = chat.encode(prompt.messages, room, values, prompt.tools)
        missing = made.what_is_missing()
        return made.ids, missing and (
            f"the conversation was truncated, {missing}: there is room for {room} of {self.max_seq_len} tokens; the "
            "rest is reserved for the answer"
        )

    def _format_for(self, values: Mapping[str, Any]) -> tuple[ChatFormat | None, Mapping[str, Any]]:
        """The chat format of a request, whose `values` may include a template; and the other values."""
        given = values.get(TEMPLATE)
        if given is None:
            return self._chat, values
        if not self._allows_templates:
            raise InvalidArgument(f"{TEMPLATE}: this server does not accept it in requests; see --allow-chat-template")
        if not isinstance(given, str) or not given:
            raise InvalidArgument(f"{TEMPLATE} must be a string")
        return self._given_format(given), {name: value for name, value in values.items() if name != TEMPLATE}

    def _make_format(self, template: str) -> ChatFormat:
        try:
            return template_format(self.tokenizer, self._files.with_template(template, ""))
        except CheckpointError as error:
            raise InvalidArgument(f"{TEMPLATE}: {error}") from error

    def _room(self, max_tokens: int) -> int | None:
        """Ids that a conversation may have. The answer reserves at most half, so that the question fits."""
        return None if self.max_seq_len is None else self.max_seq_len - min(max_tokens, self.max_seq_len // 2)

    def _ends(self, prompt: TextPrompt) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """The end id, and the checkpoint's other end tokens as stop words of one id."""
        if prompt.end_id is not None:
            return prompt.end_id, ()
        if not self.end_ids:
            return NEVER, ()
        return self.end_ids[0], tuple((token,) for token in self.end_ids[1:])

    def _words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        encoded = (tuple(self.tokenizer.encode(word)) for word in words if word)
        return tuple(ids for ids in encoded if ids)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Also as written after a space, if those are other tokens, as in vLLM."""
        found: list[tuple[int, ...]] = []
        for word in filter(None, words):
            ids, spaced = (tuple(self.tokenizer.encode(text)) for text in (word, f" {word.lstrip()}"))
            found += (ids, spaced) if len(ids) == len(spaced) and ids[:1] != spaced[:1] else (ids,)
        return tuple(filter(None, found))

    def _bias(self, prompt: TextPrompt) -> tuple[tuple[int, float], ...]:
        """Every id of a word gets the word's weight; several weights of an id are added."""
        total: dict[int, float] = {}
        for token, weight in zip(prompt.biased_ids, prompt.id_weights, strict=True):
            if not 0 <= token < self.tokenizer.vocab_size:
                raise InvalidArgument(
                    f"logit bias of token {token}: the vocabulary has the ids 0 to {self.tokenizer.vocab_size - 1}"
                )
            total[token] = total.get(token, 0.0) + weight
        for word, weight in zip(prompt.bias_words, prompt.bias_weights, strict=True):
            for token in set(self.tokenizer.encode(word)):
                total[token] = total.get(token, 0.0) + weight
        return tuple(sorted(total.items()))


def _end_ids(declared: tuple[int, ...], own: int | None, vocab_size: int | None) -> tuple[int, ...]:
    """The ids that the network can produce, and the tokenizer's own, which many fine-tuned models do not declare; the
    first one if it can produce none, since then no other id may end answers."""
    possible = [token for token in declared if vocab_size is None or 0 <= token < vocab_size]
    if declared and not possible:
        return declared[:1]
    if own is not None and (vocab_size is None or own < vocab_size):
        possible.append(own)
    return tuple(dict.fromkeys(possible))


def _template(path: Path) -> str:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the chat template {path} cannot be read: {error}") from error
    if not text.strip():
        raise CheckpointError(f"the chat template {path} is empty")
    return text
