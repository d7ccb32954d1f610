"""`llmserve run ENGINE`: answers prompts in this process, and prints speed and memory."""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from llmserve.cli.dataclass_command import DataclassCommand, argument, option
from llmserve.cli.engine_flags import DRAFT_HELP, SPECULATION_HELP, draft_settings, speculation_flag
from llmserve.cli.run_files import NO_PROMPT, RunPrompt, check_id_files, prompts_of, write_ids
from llmserve.cli.token_numbers import tokenizer_or_numbers
from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import InvalidArgument, raise_problems
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.settings import SchedulerSettings
from llmserve.stages.chat import Message
from llmserve.stages.files import TextFiles
from llmserve.stages.generate import generate
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.preprocess import PreparedPrompt, Preprocessor, TextPrompt

prompt_option = partial(option, panel="Prompts")
output_option = partial(option, panel="Output")
sampling_option = partial(option, panel="Sampling")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    engine: Path | None = argument(None, "Engine directory, made by llmserve build.")
    prompt: str | None = argument(None, "A prompt.")
    engine_dir: Path | None = option(None, "The same as the argument.")
    tokenizer_dir: Path | None = prompt_option(
        None, "Where to read the tokenizer.", show_default="the engine directory"
    )
    input_text: list[str] | None = prompt_option(None, "A prompt; may be given several times.")
    input_file: Path | None = prompt_option(
        None, "Text with one prompt per line, - reads stdin; .csv and .npy: rows of token ids."
    )
    benchmark: int | None = prompt_option(
        None, "Run this many random prompts of --input-tokens tokens instead, with answers of full length.", min=1
    )
    input_tokens: int = prompt_option(128, "Tokens of a prompt of --benchmark.", min=1)
    chat: bool = prompt_option(False, "Prompts are user messages in the model's chat format.", "--chat")
    max_output_len: int = output_option(100, "Maximum number of new tokens per prompt.")
    streaming: bool = output_option(False, "Print each piece of text as it comes.", "--streaming")
    output_csv: Path | None = output_option(None, "Write token ids, prompt and answer in a row, instead of text.")
    output_npy: Path | None = output_option(None, "The same as an array.")
    stop_words: list[str] | None = output_option(None, "Text that ends the answer; repeatable.")
    bad_words: list[str] | None = output_option(None, "Text that never appears; repeatable.")
    num_beams: int = sampling_option(1, "1: beam search is not supported.")
    temperature: float | None = sampling_option(
        None, "0 is greedy.", show_default="1 with top-k, top-p or min-p, else 0"
    )
    top_k: int = sampling_option(0, "0 switches it off, 1 is greedy.")
    top_p: float = sampling_option(1.0, "1 and 0 switch it off.")
    min_p: float = sampling_option(0.0, "0 switches it off.")
    repetition_penalty: float = sampling_option(1.0, "1 switches it off.")
    presence_penalty: float = sampling_option(0.0, "0 switches it off.")
    frequency_penalty: float = sampling_option(0.0, "0 switches it off.")
    random_seed: int = sampling_option(0, "Seed of the random draws.")
    threads: int = option(0, "CPU threads; 0: every core that this process may use.")
    speculation: str = option(Speculation.ALL.words(), SPECULATION_HELP)
    draft_engine: Path | None = option(None, DRAFT_HELP)

    def engine_directory(self) -> Path:
        if self.engine and self.engine_dir and self.engine != self.engine_dir:
            raise InvalidArgument(f"two engines: {self.engine} and --engine-dir {self.engine_dir}; give one of them")
        directory = self.engine or self.engine_dir
        if directory is None:
            raise InvalidArgument("no engine: give its directory as an argument, or as --engine-dir DIR")
        return directory

    @property
    def texts(self) -> list[str]:
        return [*([] if self.prompt is None else [self.prompt]), *(self.input_text or ())]

    def sampling(self) -> SamplingParams:
        top_p = self.top_p or 1.0  # run.py's default is 0, and means off
        draws = self.top_k > 1 or top_p < 1 or self.min_p > 0
        return SamplingParams(
            max_tokens=self.max_output_len,
            temperature=float(draws) if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.random_seed,
        )

    def problems(self) -> list[str]:
        found = self.sampling().problems()
        if self.num_beams != 1:
            found.append(
                f"num_beams must be 1, got {self.num_beams}: beams are for served engines that were built with "
                "--max-beam-width"
            )
        if self.benchmark and (self.texts or self.input_file or self.streaming or self.chat):
            found.append("--benchmark makes its prompts: leave out other prompts, --chat and --streaming")
        return found


@dataclass(frozen=True, slots=True)
class RunOutput:
    text: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    finish_reason: str
    notes: tuple[str, ...]  # what was truncated
    first_s: float  # until the first token
    last_s: float  # until the last one

    @property
    def between_s(self) -> float | None:
        """Mean time between two tokens; None for an answer of one token."""
        return (self.last_s - self.first_s) / (len(self.ids) - 1) if len(self.ids) > 1 else None


@dataclass(frozen=True, slots=True)
class OneShot:
    """An engine with its text stages."""

    engine: Engine
    preprocessor: Preprocessor
    postprocessor: Postprocessor
    options: RunOptions

    async def answer(self, index: int, prompt: RunPrompt, *, echo: bool) -> RunOutput:
        """The whole answer to one prompt. `echo`: print each piece as it comes."""
        prepared = self._prepared(prompt)
        has_end = prepared.end_id >= 0 and self.options.benchmark is None
        request = GenerateRequest(
            f"run-{index}",
            prepared.input_ids,
            self.options.sampling(),
            end_id=prepared.end_id if has_end else None,
            stop_ids=prepared.stop_words,
            bad_ids=prepared.bad_words,
        )
        pieces: list[str] = []
        ids: list[int] = []
        times: list[float] = []
        started = time.perf_counter()
        stop_strings = tuple(self.options.stop_words or ())
        stream = generate(self.engine, request, tokenizer=self.preprocessor.tokenizer, stop_strings=stop_strings)
        async with aclosing(stream):
            async for event in stream:
                pieces.append(self.postprocessor.event_text(event))
                if echo:
                    print(pieces[-1], end="", flush=True)
                last = event.tokens
                ids += last.token_ids
                if last.token_ids:
                    times.append(time.perf_counter() - started)
        assert last.finish_reason is not None
        notes = (prepared.warning, request.length_warning(self.engine.info.max_seq_len))
        return RunOutput(
            "".join(pieces),
            request.prompt_ids,
            tuple(ids),
            last.finish_reason.value,
            tuple(filter(None, notes)),
            times[0] if times else 0.0,
            times[-1] if times else 0.0,
        )

    def shown(self, prompt: RunPrompt) -> str:
        return prompt if isinstance(prompt, str) else self.preprocessor.tokenizer.decode(prompt)

    def _prepared(self, prompt: RunPrompt) -> PreparedPrompt:
        options = self.options
        text, ids = (prompt, ()) if isinstance(prompt, str) else (None, prompt)
        return self.preprocessor.prepare(
            TextPrompt(
                None if options.chat else text,
                messages=[Message("user", text)] if options.chat and text is not None else (),
                ids=ids,
                max_tokens=options.max_output_len,
                stop_words=tuple(options.stop_words or ()),
                bad_words=tuple(options.bad_words or ()),
            )
        )


async def _timed(shot: OneShot, prompts: Sequence[RunPrompt]) -> tuple[list[RunOutput], float]:
    """The answers, and the seconds that they took. A benchmark begins with its first prompt in reverse, as a warm-up
    that leaves nothing in the prefix cache for the prompts."""
    if shot.options.benchmark is not None:
        await shot.answer(0, prompts[0][::-1], echo=False)
    started = time.perf_counter()
    answers = await _run(shot, prompts)
    return answers, time.perf_counter() - started


async def _run(shot: OneShot, prompts: Sequence[RunPrompt]) -> list[RunOutput]:
    """Run all prompts at once, batched in flight; with streaming, one after the other, so the output is readable."""
    if not shot.options.streaming:
        return list(await asyncio.gather(*(shot.answer(i, prompt, echo=False) for i, prompt in enumerate(prompts))))
    answers = []
    for index, prompt in enumerate(prompts):
        print(f"[{index}] {shot.shown(prompt)}\n--> ", end="", flush=True)
        answers.append(await shot.answer(index, prompt, echo=True))
        print()
    return answers


def _report(shot: OneShot, prompts: Sequence[RunPrompt], answers: Sequence[RunOutput], seconds: float) -> None:
    options = shot.options
    if options.output_csv or options.output_npy:
        rows = [(*answer.prompt_ids, *answer.ids) for answer in answers]
        write_ids(rows, shot.preprocessor.pad_id, csv_file=options.output_csv, npy_file=options.output_npy)
    elif not options.streaming and options.benchmark is None:
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            print(f"[{index}] {shot.shown(prompt)}\n--> {answer.text}  ({answer.finish_reason})")
    num_prompt = sum(len(answer.prompt_ids) for answer in answers)
    num_new = sum(len(answer.ids) for answer in answers)
    print(
        f"{len(answers)} prompts, {num_prompt} prompt tokens, {num_new} new tokens in {seconds:.2f} s: "
        f"{num_new / seconds:.1f} tokens/s",
    )
    print(_speed(answers), flush=True)
    for index, answer in enumerate(answers):
        for note in answer.notes:
            print(f"note: [{index}] {note}", file=sys.stderr)


def _speed(answers: Sequence[RunOutput]) -> str:
    """Speed and memory as text. Latencies are medians over the prompts."""
    told = [f"first token after {1e3 * statistics.median(answer.first_s for answer in answers):.1f} ms"]
    if between := [gap for gap in (answer.between_s for answer in answers) if gap is not None]:
        told.append(f"{1e3 * statistics.median(between):.2f} ms between tokens")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # on Linux in KiB
    return ", ".join([*told, f"peak memory {peak:.0f} MiB"])


def _made_up(options: RunOptions, vocab_size: int) -> list[RunPrompt]:
    """Random prompts, which have nothing in common."""
    size = (options.benchmark or 0, options.input_tokens)
    ids = np.random.default_rng(options.random_seed).integers(vocab_size, size=size)
    return [tuple(row) for row in ids.tolist()]


def run(options: RunOptions) -> None:
    """Run an engine on prompts, in this process, and print the answers and tokens/s."""
    directory = options.engine_directory()
    raise_problems(InvalidArgument, "options", options.problems())
    if options.benchmark is None and not (options.texts or options.input_file):
        raise InvalidArgument(NO_PROMPT)
    check_id_files(options.output_csv, options.output_npy)
    text_files = options.tokenizer_dir or directory
    every_prompt_waits = SchedulerSettings(max_queue_size=0, speculation=speculation_flag(options.speculation))
    gpu = GpuSettings(draft_engine=draft_settings(options.draft_engine))
    opened = open_engine(directory, EngineSettings(threads=options.threads, scheduler=every_prompt_waits, gpu=gpu))
    try:
        files = TextFiles.read(text_files)
        preprocessor = Preprocessor(tokenizer_or_numbers(files), files)
        preprocessor.max_seq_len = opened.info.max_seq_len
        shot = OneShot(opened, preprocessor, Postprocessor(preprocessor.tokenizer), options)
        prompts: Sequence[RunPrompt]
        if options.benchmark is None:
            prompts = prompts_of(options.texts, options.input_file, pad_id=preprocessor.pad_id)
        else:
            prompts = _made_up(options, opened.info.vocab_size)
        _report(shot, prompts, *asyncio.run(_timed(shot, prompts)))
    finally:
        opened.close()


command = DataclassCommand(RunOptions, run)
