"""Structured output: a schema, a regular expression or a grammar, compiled to a guide for each token of an engine.

`GuideCompiler` belongs to one engine, because a guide depends on the bytes of its tokenizer. It compiles in a few
threads, where the library releases the GIL, and caches the latest guides and errors. Clients may send anything, so
sizes, the number of waiting guides and the work for compiling and for each token are limited.

llguidance is imported when the first guide arrives.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from llmserve.core import Guide, GuideState
from llmserve.errors import InvalidArgument, ResourceExhausted
from llmserve.stages import token_set
from llmserve.stages.endless_schemas import endless_problem
from llmserve.stages.guide_vocabulary import Vocabulary, unpacked
from llmserve.stages.likely_text import ByteVocabulary, LikelyTexts
from llmserve.stages.token_guide import TokenGuide
from llmserve.stages.token_set import TokenSet
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from llmserve.stages.tool_formats.grammars import WHITE_SPACE

if TYPE_CHECKING:
    from llguidance import LLParserLimits

Kept = TypeVar("Kept")

MAX_TEXT_BYTES = 64 << 10
MAX_GBNF_BYTES = 32 << 10  # with rules, because the library reads GBNF in a time that grows with their product
MAX_RULES = 500  # of a grammar
GBNF_RULE = re.compile(r"(?m)^[^\S\n]*[\w-]+[^\S\n]*::=")
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")
LARK_RULE = re.compile(r"(?m)^[^\S\n]*[?!]?\w.*:")
NUM_THREADS = 4
STACK_BYTES = 256 << 20  # of each: the library recurses over a grammar, and 64 KiB of one took 70 MiB
MAX_WAITING = 64  # guides that wait for compilation
MAX_KEPT = 64  # compiled guides, and as many refused ones
ANY_OBJECT = '{"type": "object"}'
MAX_MESSAGE = 500
NUM_TRIED = 4  # tokens
MAX_TOKEN_S = 0.005


class GuideKind(Enum):
    """Names are TensorRT-LLM's (`guided_decoding_guide_type`)."""

    JSON = "json"  # any JSON object
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf_grammar"  # GBNF (`root ::= ...`), or llguidance's Lark (`start: ...`)
    TOKEN_IDS = token_set.KIND  # the only tokens that an answer may have; llmserve's own


@dataclass(frozen=True, slots=True)
class GuideText:
    """A guide as written by a client."""

    kind: GuideKind
    text: str = ""


class GuideCompiler:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: the engine's, which may exceed the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._kept: OrderedDict[GuideText, Guide] = OrderedDict()
        self._refused: OrderedDict[GuideText, str] = OrderedDict()
        self._num_waiting = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="llmserve-guides")
        self._vocabulary_lock = threading.Lock()

    async def compiled(self, text: GuideText) -> Guide:
        """`InvalidArgument` for a guide that is invalid, too large, or that no answer can follow. A cancelled call
        leaves the queue."""
        if (guide := self._kept.get(text)) is not None:
            self._kept.move_to_end(text)
            return guide
        if (reason := self._refused.get(text)) is not None:
            self._refused.move_to_end(text)
            raise InvalidArgument(reason)
        _check_size(text)
        if self._num_waiting >= MAX_WAITING:
            raise ResourceExhausted(f"{MAX_WAITING} guides are waiting to be compiled; try again later")
        self._num_waiting += 1
        try:
            guide = await asyncio.wrap_future(self._submit(text))
        except InvalidArgument as error:
            _keep(self._refused, text, str(error))
            raise
        finally:
            self._num_waiting -= 1
        _keep(self._kept, text, guide)
        return guide

    def _submit(self, text: GuideText) -> Future[Guide]:
        """Starts a thread here if necessary, with the stack size that it needs."""
        before = threading.stack_size(STACK_BYTES)
        try:
            return self._threads.submit(self._compile_once, text)
        finally:
            threading.stack_size(before)

    def _compile_once(self, text: GuideText) -> Guide:
        """Another caller may have compiled the same guide in the meantime."""
        if (reason := self._refused.get(text)) is not None:
            raise InvalidArgument(reason)
        return self._kept.get(text) or self.compile(text)

    def compile(self, text: GuideText) -> Guide:
        """Compile in this thread."""
        from llguidance import LLMatcher

        try:
            if text.kind is GuideKind.TOKEN_IDS:
                return TokenSet(text.text, self._vocab_size)
            grammar = _grammar(text)
        except (ValueError, RecursionError) as error:
            raise _invalid(text, str(error)) from error
        with self._vocabulary_lock:  # created with the first guide
            vocabulary, byte_vocabulary = self._vocabulary, self._byte_vocabulary
        matcher = LLMatcher(vocabulary.library, grammar, limits=_limits(), log_level=0)
        if matcher.is_error():
            raise _invalid(text, matcher.get_error())
        over_bytes = LLMatcher(byte_vocabulary.library, grammar, limits=_limits(), log_level=0)
        texts = None if over_bytes.is_error() else LikelyTexts(over_bytes, byte_vocabulary)
        guide = TokenGuide(matcher, vocabulary, texts, (text.kind.value, text.text))
        if guide.state is GuideState.STUCK:
            raise _invalid(text, "no answer of this model can follow it")
        if guide.state is GuideState.COMPLETE:
            raise _invalid(text, "it allows only an empty answer")
        _check_work(text, guide)
        return guide

    def close(self) -> None:
        """Waiting guides are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, self._vocab_size)

    @cached_property
    def _byte_vocabulary(self) -> ByteVocabulary:
        return ByteVocabulary(self._vocabulary)


class GuidesOfDirectory:
    """Compiles guides that arrive as text where the engine runs. The first one reads the tokenizer."""

    def __init__(self, tokenizer_dir: Path, vocab_size: int) -> None:
        self._tokenizer_dir = tokenizer_dir
        self._vocab_size = vocab_size

    async def compiled(self, kind: str, text: str) -> Guide:
        return await self._compiler.compiled(GuideText(GuideKind(kind), text))

    @cached_property
    def _compiler(self) -> GuideCompiler:
        return GuideCompiler(load_tokenizer(self._tokenizer_dir), self._vocab_size)


def _keep(kept: OrderedDict[GuideText, Kept], text: GuideText, what: Kept) -> None:
    kept[text] = what
    if len(kept) > MAX_KEPT:
        kept.popitem(last=False)


def _check_size(text: GuideText) -> None:
    """Refuse guides whose size would make them slow to compile, or use much memory."""
    size, most = len(text.text.encode(errors="replace")), MAX_GBNF_BYTES if _is_gbnf(text) else MAX_TEXT_BYTES
    if size > most:
        raise InvalidArgument(f"the {text.kind.value} guide has {size} bytes, more than {most}")
    num_rules = max(text.text.count("::="), len(LARK_RULE.findall(text.text)))
    if text.kind is GuideKind.EBNF_GRAMMAR and num_rules > MAX_RULES:
        raise InvalidArgument(f"the {text.kind.value} guide has {num_rules} rules, more than {MAX_RULES}")


def _check_work(text: GuideText, guide: TokenGuide) -> None:
    """Refuse guides that would delay other answers in every step: tries a few tokens, and takes the shortest time."""
    matcher = guide.start()
    least = math.inf
    for _ in range(NUM_TRIED):
        if matcher.state is not GuideState.OPEN:
            break
        (first, *_) = np.flatnonzero(unpacked(matcher.mask(())))
        matcher.advance(int(first))
        began = time.thread_time()
        matcher.mask(())
        least = min(least, time.thread_time() - began)
    if matcher.reason:
        raise _invalid(text, matcher.reason)
    if MAX_TOKEN_S < least < math.inf:
        raise _invalid(text, f"each token takes {least * 1e3:.0f} ms of work; repeat less, or smaller parts")


def _grammar(text: GuideText) -> str:
    """Convert it to llguidance's format. `ValueError` if it cannot be read."""
    from llguidance import LLMatcher, regex_to_lark

    if text.kind is GuideKind.REGEX:  # \d and \w are ASCII, as in ECMAScript and therefore in JSON Schema
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text.text, use_ascii='dw')}/")
    if text.kind is GuideKind.EBNF_GRAMMAR:
        return LLMatcher.grammar_from_lark(_lark(text.text) if _is_gbnf(text) else text.text)
    schema = ANY_OBJECT if text.kind is GuideKind.JSON else text.text
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITE_SPACE})
    if problem := endless_problem(json.loads(schema)):
        raise ValueError(problem)
    return grammar


def _is_gbnf(text: GuideText) -> bool:
    return text.kind is GuideKind.EBNF_GRAMMAR and GBNF_RULE.search(text.text) is not None


def _lark(gbnf: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(ESCAPE.sub(_written, gbnf))
    except Exception as error:  # border: the library raises no specific errors
        raise ValueError(f"it is not valid GBNF: {error}") from error


def _written(escape: re.Match[str]) -> str:
    """The character itself, because llguidance drops zeros of `\u0041`."""
    code = int(escape[1] or escape[2] or "D800", 16)
    if 0xD800 <= code < 0xE000 or code > sys.maxunicode:  # not a character, or another escape
        return escape[0]
    return chr(code) if code > 127 or chr(code).isalnum() else f"\\x{code:02x}"


def _limits() -> LLParserLimits:
    """With these limits, compiling takes at most about a second and 200 MiB, and a token tens of milliseconds; ordinary
    guides take microseconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=60_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _invalid(text: GuideText, reason: str) -> InvalidArgument:
    reason = " ".join(reason.replace("<non-verbose/>", "").split())
    return InvalidArgument(f"the {text.kind.value} guide cannot be followed: {reason[:MAX_MESSAGE]}")
