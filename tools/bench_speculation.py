"""Compares the same prompts with and without speculation, in turn, in one run: `make bench-speculation`.

Answers must be equal. There are four kinds of prompts: code to repeat with a change, a text to summarize, a story,
which repeats nothing, and facts to write as JSON with a schema.

Drafts also come from earlier answers, so no engine gets the same prompt twice: each round has its own engines, opened
one after the other, and every other round starts with the drafting one. Each engine first answers a prompt that is not
timed, because the first use of its memory takes up to 0.2 s, and then `--before` other prompts of the kind. Only the
time while all answers of a group run counts.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import statistics
import subprocess
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple, TypeAlias

from llmserve.core import GenerateRequest, Guide, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.machine.cores import usable_cores
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.evaluation.prompts import PromptEncoder
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.settings import SchedulerSettings
from llmserve.stages.chat import Message
from llmserve.stages.guides import GuideCompiler, GuideKind, GuideText
from llmserve.stages.tokenizer import load_tokenizer
from tools.benchmark.lookup.lookup_job import LookupJob

ROOT = Path(__file__).resolve().parents[1]
MOST_SUMMARIES = 100
WARM_UP, WARM_UP_TOKENS = "Say hello to everybody in the room, and count to ten.", 24
BATCH_BEFORE = 8  # prompts that are answered together before the timed ones
Prompts: TypeAlias = Sequence[Sequence[int]]

FUNCTIONS: Sequence[Callable[..., object]] = (
    textwrap.shorten, textwrap.indent, statistics.median_low, statistics.median_high, statistics.quantiles,
    statistics.fmean, inspect.unwrap, inspect.getmodulename, inspect.indentsize, inspect.cleandoc,
    inspect.formatannotation, statistics.harmonic_mean, statistics.median_grouped, textwrap.dedent, textwrap.fill,
    inspect.getdoc,
)  # fmt: skip
SUBJECTS = (
    "a lighthouse", "an old violin", "a lost dog", "the first snow", "a night train", "a broken clock", "two sisters",
    "a baker", "the desert", "a chess game", "an island", "a letter", "a gardener", "the harbour", "a storm", "a map",
)  # fmt: skip


def edits() -> list[str]:
    task = "Repeat this Python code in full, with the docstring removed and every name `value` changed to `number`:"
    return [f"{task}\n\n{inspect.getsource(function)}" for function in FUNCTIONS]


def summaries() -> list[str]:
    lines = (ROOT / "eval/data/docstrings.jsonl").read_text().splitlines()
    documents = sorted((json.loads(line)["document"] for line in lines), key=len, reverse=True)[:MOST_SUMMARIES]
    return [f"Summarize this text, quoting its main sentences:\n\n{document}" for document in documents]


def stories() -> list[str]:
    return [f"Write a story about {subject}." for subject in SUBJECTS]


def facts() -> list[str]:
    return [f"Describe {subject} as JSON: its description, its colour, its age and its price." for subject in SUBJECTS]


KINDS = {"edit": edits, "summary": summaries, "story": stories, "json": facts}
SCHEMA = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 80},
        "main_colour": {"enum": ["red", "green", "blue", "black", "white"]},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 5000},
        "price": {
            "type": "object",
            "properties": {"amount": {"type": "integer"}, "currency": {"enum": ["EUR", "USD", "JPY"]}},
            "required": ["amount", "currency"],
            "additionalProperties": False,
        },
    },
    "required": ["description", "main_colour", "age_in_years", "price"],
    "additionalProperties": False,
}


class Speed(NamedTuple):
    tokens: int
    seconds: float


async def answers(
    engine: Engine, prompts: Prompts, num_tokens: int, guide: Guide | None
) -> tuple[list[list[int]], Speed]:
    """Their tokens, and the speed from the last first token to the first end."""
    firsts: list[float] = []
    ends: list[float] = []
    told: list[tuple[float, int]] = []  # number of tokens at each time

    async def answer(name: str, prompt: Sequence[int]) -> list[int]:
        tokens: list[int] = []
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        request = GenerateRequest(name, tuple(prompt), sampling, guide=guide)
        async with aclosing(engine.submit(request)) as events:
            async for event in events:
                now = time.perf_counter()
                if not tokens:
                    firsts.append(now)
                told.append((now, len(event.token_ids)))
                tokens += event.token_ids
        ends.append(now)
        return tokens

    found = await asyncio.gather(*(answer(str(number), prompt) for number, prompt in enumerate(prompts)))
    start, end = max(firsts), min(ends)
    assert start < end, "an answer was complete before all had begun: give more --tokens, or smaller --batches"
    return found, Speed(sum(count for when, count in told if start < when <= end), end - start)


def measure(
    arguments: argparse.Namespace,
    groups: Sequence[Prompts],
    before: Sequence[Prompts],
    warm_up: Sequence[int],
    speculation: Speculation,
    guide: Guide | None,
) -> str:
    """Returns a row: tokens per second without and with speculation, their ratio, and the share of accepted drafts. The
    prompts of a group are answered together; those in `before` and `warm_up` are not timed."""
    engine_dir, num_tokens = arguments.engine, arguments.tokens
    modes = (Speculation.OFF, speculation)
    settings = {
        mode: EngineSettings(
            threads=arguments.threads,
            scheduler=SchedulerSettings(speculation=mode),
            gpu=GpuSettings(draft_engine=arguments.draft_engine if Speculation.DRAFT in mode else ""),
        )
        for mode in modes
    }
    rates: dict[Speculation, list[float]] = {mode: [] for mode in modes}
    told: dict[Speculation, list[list[int]]] = {}
    drafted, accepted = 0, 0
    for number in range(arguments.rounds):
        for mode in modes[:: -1 if number % 2 else 1]:
            engine = open_engine(engine_dir, settings[mode])
            try:
                asyncio.run(answers(engine, [warm_up] * len(groups[0]), WARM_UP_TOKENS, None))
                for prompts in before:
                    asyncio.run(answers(engine, prompts, num_tokens, guide))
                earlier = engine.stats()
                found = [asyncio.run(answers(engine, group, num_tokens, guide)) for group in groups]
                stats = engine.stats()
            finally:
                engine.close()
            speeds = [speed for _, speed in found]
            rates[mode].append(sum(speed.tokens for speed in speeds) / sum(speed.seconds for speed in speeds))
            told[mode] = [answer for some, _ in found for answer in some]
            drafted += (stats.total_drafted_tokens or 0) - (earlier.total_drafted_tokens or 0)
            accepted += (stats.total_accepted_tokens or 0) - (earlier.total_accepted_tokens or 0)
        assert told[modes[0]] == told[modes[1]], "speculation changed an answer"
    plain, ours = (statistics.median(rates[mode]) for mode in modes)
    return f"{plain:.1f} | {ours:.1f} | {ours / plain:.2f} | {accepted / max(1, drafted):.0%} of {drafted}"


def measure_peer(arguments: argparse.Namespace, peer: str, prompts: Prompts) -> str:
    """Like `measure`, for another engine's prompt lookup at batch 1, without the share of accepted drafts."""
    job = LookupJob(
        str(arguments.gguf.resolve()), [list(prompt) for prompt in prompts], arguments.tokens, arguments.rounds,
        threads=arguments.threads or usable_cores(),
    )  # fmt: skip
    name, _, python = peer.partition("=")
    command = [python, "-m", f"tools.benchmark.lookup.{name}"]
    done = subprocess.run(command, input=job.to_json(), capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1]}"
    found = json.loads(done.stdout.splitlines()[-1])
    return f"{found['without']:.1f} | {found['with']:.1f} | {found['with'] / found['without']:.2f} | "


def schema_guide(engine_dir: Path) -> Guide:
    vocab_size = EngineDirectory.open(engine_dir).info().vocab_size
    return GuideCompiler(load_tokenizer(engine_dir), vocab_size).compile(
        GuideText(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4, help="most groups of prompts, one after another")
    parser.add_argument("--before", type=int, default=0, help="most prompts that are answered before, and not timed")
    parser.add_argument("--threads", type=int, default=0, help="0: the cores")
    parser.add_argument("--draft-engine", default="", help="a smaller engine, which drafts")
    parser.add_argument(
        "--peer", action="append", default=[], help="llama_cpp=PYTHON or openvino_genai=PYTHON, which has it"
    )
    parser.add_argument("--gguf", type=Path, help="the same network for peers; llama_cpp makes Q8_0 of it")
    parser.add_argument("--speculation", default="", help="drafters; without it all, and with a guide only grammar")
    arguments = parser.parse_args()
    encoder = PromptEncoder(arguments.engine, arguments.tokens)
    print("| prompts | batch | tokens/s without | with | ratio | accepted |\n|---|---|---|---|---|---|")
    warm_up = encoder.encode((Message("user", WARM_UP),)).input_ids
    for kind in arguments.kinds.split(","):
        texts = KINDS[kind]()
        prompts = [encoder.encode((Message("user", text),)).input_ids for text in texts]
        guide = schema_guide(arguments.engine) if kind == "json" else None
        speculation = Speculation.GRAMMAR if guide else Speculation.ALL
        if arguments.speculation:
            speculation = Speculation.read(arguments.speculation)
        for batch in map(int, arguments.batches.split(",")):
            starts = range(0, len(FUNCTIONS), batch)[: arguments.groups]
            others = prompts[starts[-1] + batch :][: arguments.before]
            before = [others[start : start + BATCH_BEFORE] for start in range(0, len(others), BATCH_BEFORE)]
            groups = [prompts[start : start + batch] for start in starts]
            row = measure(arguments, groups, before, warm_up, speculation, guide)
            print(f"| {kind} | {batch} | {row} |", flush=True)
        for peer in arguments.peer if not guide else ():
            row = measure_peer(arguments, peer, prompts[: arguments.groups])
            print(f"| {kind}, {peer.partition('=')[0]} | 1 | {row} |", flush=True)


if __name__ == "__main__":
    main()
