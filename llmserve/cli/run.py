"""`llmserve run ENGINE`: prompts in, text and tokens per second out, in this process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings
from llmserve.errors import InvalidArgument, raise_problems
from llmserve.scheduler.settings import SchedulerSettings
from llmserve.stages.chat import Message
from llmserve.stages.generate import generate
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.preprocess import Preprocessor, TextPrompt
from llmserve.stages.text import text_from_bytes


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class OneShot:
    """An engine behind the text stages."""

    engine: Engine
    preprocessor: Preprocessor
    postprocessor: Postprocessor
    sampling: SamplingParams
    stop_words: tuple[str, ...]
    as_chat: bool

    async def answer(self, index: int, text: str, *, echo: bool) -> Answer:
        """One prompt to its whole answer; `echo` prints each piece as it comes."""
        prepared = self.preprocessor.prepare(self._prompt(text))
        request = GenerateRequest(
            f"run-{index}",
            prepared.input_ids,
            self.sampling,
            end_id=prepared.end_id if prepared.end_id >= 0 else None,
            stop_ids=prepared.stop_words,
        )
        pieces: list[str] = []
        stream = generate(
            self.engine, request, tokenizer=self.preprocessor.tokenizer, stop_strings=self.stop_words
        )  # fmt: skip
        async with aclosing(stream):
            async for event in stream:
                pieces.append(self.postprocessor.event_text(event))
                if echo:
                    print(pieces[-1], end="", flush=True)
                last = event.tokens
        assert last.usage is not None
        assert last.finish_reason is not None
        return Answer("".join(pieces), last.usage.prompt_tokens, last.usage.completion_tokens, last.finish_reason.value)

    def _prompt(self, text: str) -> TextPrompt:
        limits = {"max_tokens": self.sampling.max_tokens, "stop_words": self.stop_words}
        if self.as_chat:
            return TextPrompt(messages=[Message("user", text)], **limits)  # type: ignore[arg-type]
        return TextPrompt(text, **limits)  # type: ignore[arg-type]


def prompts_of(texts: Sequence[str], file: Path | None) -> list[str]:
    """The prompts of the command line, then those of the file: one a line, empty lines skipped."""
    found = list(texts)
    if file is not None:
        try:
            data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        except OSError as error:
            raise InvalidArgument(f"--input-file {file} cannot be read: {error.strerror}") from error
        found += [line for line in text_from_bytes(data, f"--input-file {file}").splitlines() if line.strip()]
    if not found:
        raise InvalidArgument("no prompt; give --input-text TEXT (repeatable) or --input-file FILE (one prompt a line)")
    return found


async def _run(shot: OneShot, prompts: Sequence[str], *, streaming: bool) -> list[Answer]:
    """All prompts at once, batched in flight; with `streaming` one after the other, so that the output is readable."""
    if not streaming:
        return list(await asyncio.gather(*(shot.answer(i, text, echo=False) for i, text in enumerate(prompts))))
    answers = []
    for index, text in enumerate(prompts):
        print(f"[{index}] {text}\n--> ", end="", flush=True)
        answers.append(await shot.answer(index, text, echo=True))
        print()
    return answers


def _report(prompts: Sequence[str], answers: Sequence[Answer], seconds: float, *, streaming: bool) -> None:
    if not streaming:
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            print(f"[{index}] {prompt}\n--> {answer.text}  ({answer.finish_reason})")
    num_prompt = sum(answer.prompt_tokens for answer in answers)
    num_new = sum(answer.completion_tokens for answer in answers)
    print(
        f"{len(answers)} prompts, {num_prompt} prompt tokens, {num_new} new tokens in {seconds:.2f} s: "
        f"{num_new / seconds:.1f} tokens/s"
    )


def command(
    engine: Annotated[Path, typer.Argument(help="Engine directory, made by llmserve build.")],
    input_text: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    input_file: Annotated[Path | None, typer.Option(help="A file with one prompt a line; - reads stdin.")] = None,
    max_output_len: Annotated[int, typer.Option(help="Most new tokens per prompt.")] = 100,
    streaming: Annotated[bool, typer.Option("--streaming", help="Print each piece of text as it comes.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are user messages in the model's chat format.")] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 switches it off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 switches it off.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 switches it off.")] = 1.0,
    random_seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    stop_words: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0: every core that this process may use.")] = 0,
) -> None:
    """Run an engine on prompts, in this process, and print the answers and tokens/s."""
    prompts = prompts_of(input_text or (), input_file)
    sampling = SamplingParams(
        max_tokens=max_output_len,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=random_seed,
    )
    raise_problems(InvalidArgument, "sampling", sampling.problems())
    every_prompt_waits = SchedulerSettings(max_queue_size=0)
    opened = open_engine(engine, EngineSettings(threads=threads, scheduler=every_prompt_waits))
    try:
        shot = OneShot(
            opened, Preprocessor.open(engine), Postprocessor.open(engine), sampling, tuple(stop_words or ()), chat
        )  # fmt: skip
        started = time.perf_counter()
        answers = asyncio.run(_run(shot, prompts, streaming=streaming))
        _report(prompts, answers, time.perf_counter() - started, streaming=streaming)
    finally:
        opened.close()
