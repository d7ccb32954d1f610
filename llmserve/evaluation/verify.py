"""Verifies that an engine produced the answers in a file: every answer is computed again from its receipt.

A receipt (`stages.receipt`) has the prompt's ids, all parameters and the engine's digest. An engine that promises the
same tokens for the same request either returns them again, or did not produce this answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from llmserve.engine.base import Engine
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.identity import told_apart
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings
from llmserve.errors import InvalidArgument, LlmserveError, NotFound, raise_problems
from llmserve.evaluation.candidates import added_adapter
from llmserve.evaluation.judging.statistics import first_divergence
from llmserve.stages.generate import GeneratedEvent, generate
from llmserve.stages.guides import GuideCompiler
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.receipt import Receipt
from llmserve.stages.tokenizer import Tokenizer

HINT = 'ask for one with "return_receipt": true in the request'


class Standing(Enum):
    SAID = "said"
    NOT_SAID = "not said"
    UNKNOWN = "unknown"  # this machine rounds differently from the one that answered


@dataclass(frozen=True, slots=True)
class SaidText:
    """An answer's text, as in the file."""

    text: str | None = None  # None: the file has none
    has_echo: bool = False  # the prompt's text may precede it
    is_part: bool = False  # thoughts and tool calls were removed from it


@dataclass(frozen=True, slots=True)
class Claim:
    """One answer in a file."""

    place: str
    receipt: Receipt
    said: SaidText = SaidText()


@dataclass(frozen=True, slots=True)
class Finding:
    claim: Claim
    standing: Standing
    reason: str

    def __str__(self) -> str:
        return f"{self.claim.place}: {self.standing.value}: {self.reason}"


def read_claims(path: Path) -> list[Claim]:
    """Read a reply of /v1/chat/completions or /v1/completions or its last chunk, of Triton's infer and generate, a bare
    receipt, or a list of these. `InvalidArgument` if there is none, or if one is malformed."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"no such file: {path}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read as JSON: {error}") from error
    found: list[Claim] = []
    problems: list[str] = []
    for place, receipt, said in _receipts(document, ""):
        try:
            parsed = json.loads(receipt) if isinstance(receipt, str) else receipt
            found.append(Claim(place, Receipt.read(parsed), said))
        except (InvalidArgument, ValueError, RecursionError) as error:
            problems.append(f"{place}: {error}")
    raise_problems(InvalidArgument, f"{path} has a receipt that cannot be read", problems)
    if not found:
        raise InvalidArgument(f"{path} has no receipt; {HINT}")
    return found


def verify(claims: Sequence[Claim], path: Path, *, threads: int = 0, adapters: Sequence[Path] = ()) -> list[Finding]:
    """Verify every claim, in order. Hashes the engine's files first: `EngineFileError` if they were changed.
    `adapters`: directories of adapters that answers may come from."""
    directory = EngineDirectory.open(path)
    directory.verify()
    digest = directory.manifest.engine_digest
    if all(claim.receipt.engine["digest"] != digest for claim in claims):
        return [_of_another(claim, digest) for claim in claims]
    engine = open_engine(path, EngineSettings(threads=threads))
    try:
        for adapter in adapters:
            added_adapter(engine, adapter)
        return asyncio.run(_verify_all(claims, engine, Postprocessor.open(path)))
    finally:
        engine.close()


async def _verify_all(claims: Sequence[Claim], engine: Engine, postprocessor: Postprocessor) -> list[Finding]:
    digest = engine.info.digest
    return [
        await _verify(claim, engine, postprocessor)
        if claim.receipt.engine["digest"] == digest
        else _of_another(claim, digest)
        for claim in claims
    ]


def _of_another(claim: Claim, digest: str) -> Finding:
    engine = claim.receipt.engine
    theirs, ours = told_apart(engine["digest"], digest)
    words = f"the receipt is from {engine['name']}, digest {theirs}, but this engine's digest is {ours}"
    return Finding(claim, Standing.NOT_SAID, words)


async def _verify(claim: Claim, engine: Engine, postprocessor: Postprocessor) -> Finding:
    receipt = claim.receipt
    try:
        ids, event = await _derived(receipt, engine, postprocessor.tokenizer)
    except LlmserveError as error:
        advice = "; give its directory with --adapter" if receipt.asked.generate.adapter else ""
        return Finding(claim, Standing.NOT_SAID, f"this engine cannot answer that request: {error}{advice}")
    problem = _difference(receipt, ids, event) or _text_problem(claim, postprocessor)
    kernels, here = receipt.engine["kernels"], engine.info.kernels
    if problem and kernels != here:
        words = (
            f"{problem}; it was computed with {kernels}, but here with {here}, which may round differently; verify it "
            f"on a machine with {kernels}"
        )
        return Finding(claim, Standing.UNKNOWN, words)
    if problem:
        return Finding(claim, Standing.NOT_SAID, problem)
    same = f"{engine.info.name} gives the same {len(ids)} tokens{_also(claim)}"
    cut_off = f"; it was {receipt.finish_reason.value} in the file, so what would follow is not compared"
    return Finding(claim, Standing.SAID, same + (cut_off if receipt.is_cut_off else ""))


def _also(claim: Claim) -> str:
    if claim.said.text is None:
        return "; there is no text to compare"
    return " and, thoughts and calls left out, their text" if claim.said.is_part else " and their text"


async def _derived(receipt: Receipt, engine: Engine, tokenizer: Tokenizer) -> tuple[list[int], GeneratedEvent | None]:
    """The answer's ids and last event, computed again; for an answer that was cut off, only as far as it goes."""
    asked, request = receipt.asked, receipt.asked.generate
    if receipt.is_cut_off:
        if not receipt.output_ids:
            return [], None
        request = replace(request, sampling=replace(request.sampling, max_tokens=len(receipt.output_ids)))
    ids: list[int] = []
    last: GeneratedEvent | None = None
    compiler = GuideCompiler(tokenizer, engine.info.vocab_size) if asked.guide is not None else None
    try:
        if compiler is not None and asked.guide is not None:
            request = replace(request, guide=await compiler.compiled(asked.guide))
        stream = generate(engine, request, tokenizer=tokenizer, stop_strings=asked.stop_strings)
        async with aclosing(stream) as events:
            async for event in events:
                if event.tokens.sequence_index == receipt.sequence_index:
                    ids += event.tokens.token_ids
                    last = event
    finally:
        if compiler is not None:
            compiler.close()
    return ids, last


def _difference(receipt: Receipt, ids: Sequence[int], last: GeneratedEvent | None) -> str:
    """The difference between the receipt and the new answer; empty if there is none."""
    told = receipt.output_ids
    place = first_divergence(told, ids)
    if place is not None and place < min(len(told), len(ids)):
        return f"token {place + 1} of {len(told)} is {told[place]} in the file, but {ids[place]} from this engine"
    if place is not None:
        return f"the answer has {len(told)} tokens in the file, but {len(ids)} from this engine"
    if receipt.is_cut_off or last is None:
        return ""
    reason = last.tokens.finish_reason
    if reason is not receipt.finish_reason:
        return f"it ended with {receipt.finish_reason.value} there, but with {reason.value if reason else '?'} here"
    return "" if last.tail_text == receipt.tail_text else "the text before its stop string differs"


def _text_problem(claim: Claim, postprocessor: Postprocessor) -> str:
    said, receipt = claim.said, claim.receipt
    if said.text is None:
        return ""
    derived = [
        postprocessor.skipping(skips).text(receipt.output_ids, tail=receipt.tail_text) for skips in (True, False)
    ]
    if said.is_part:
        fits = any(said.text.strip() in text for text in derived)
    else:
        fits = said.text in derived or (
            said.has_echo and any(_echoes(said.text, text, receipt, postprocessor) for text in derived)
        )
    return "" if fits else f"the text differs: these tokens decode to {derived[0][:80]!r}"


def _echoes(said: str, answer: str, receipt: Receipt, postprocessor: Postprocessor) -> bool:
    """Whether it is the prompt's text followed by the answer."""
    if not said.endswith(answer):
        return False
    prompt, ids = said[: len(said) - len(answer)], list(receipt.asked.generate.prompt_ids)
    tokenizer = postprocessor.tokenizer
    return ids in [tokenizer.encode(prompt), tokenizer.encode(prompt, True)] or prompt == tokenizer.decode(ids)


def _receipts(document: Any, place: str) -> Iterator[tuple[str, object, SaidText]]:
    """Of each answer in the document: its place, its raw receipt, and its text."""
    if isinstance(document, list):
        for index, item in enumerate(document):
            yield from _receipts(item, f"{place}[{index}]")
    elif not isinstance(document, dict):
        return
    elif "prompt_ids" in document:
        yield place or "receipt", document, SaidText()
    elif isinstance(document.get("outputs"), list):
        values = {each.get("name"): each.get("data") for each in document["outputs"] if isinstance(each, dict)}
        receipts, texts = (_texts(values.get(name)) for name in ("receipt", "text_output"))
        if receipts and receipts[0]:
            yield f"{place}outputs", receipts[0], SaidText(texts[0] if texts else None)
    elif isinstance(document.get("choices"), list):
        is_whole = isinstance(document.get("usage"), dict)  # no chunk of a stream
        for index, choice in enumerate(document["choices"]):
            if isinstance(choice, dict) and choice.get("receipt") is not None:
                yield f"{place}choices[{index}]", choice["receipt"], _of_choice(choice) if is_whole else SaidText()
    elif document.get("receipt"):
        text = document.get("text_output")
        yield place or "answer", document["receipt"], SaidText(text if isinstance(text, str) else None)


def _of_choice(choice: dict[str, Any]) -> SaidText:
    if isinstance(choice.get("text"), str):
        return SaidText(choice["text"], has_echo=True)
    message = choice.get("message")
    if not isinstance(message, dict):
        return SaidText()
    return SaidText(
        str(message.get("content") or ""), is_part=bool(message.get("tool_calls") or message.get("reasoning"))
    )


def _texts(data: object) -> list[str]:
    return [text for text in data if isinstance(text, str)] if isinstance(data, list) else []
