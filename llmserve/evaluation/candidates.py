"""The engine's side: an engine in this process or a running server, with several requests in flight."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmserve.at_once import at_once
from llmserve.client import Access, AsyncClient, Parameter
from llmserve.core import GenerateRequest, Guide, PromptScores, SamplingParams, TopTokens, Usage
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import AdapterEngine, Engine
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings
from llmserve.engine.validation import MAX_TOP_LOG_PROBS
from llmserve.errors import InvalidArgument, LlmserveError, NotFound, ResourceExhausted, Unsupported
from llmserve.evaluation.answers import Answer, Performance, Sample
from llmserve.evaluation.choices import likeliest
from llmserve.evaluation.decisions import Decision
from llmserve.evaluation.prompts import ChoicePrompt, PromptEncoder, ids_digest
from llmserve.stages.generate import generate
from llmserve.stages.guides import GuideCompiler, GuideText
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.tokenizer import load_tokenizer

TOKENS_MODEL = "tensorrt_llm"
WARM_UP = "eval-warm-up"  # id of the request whose answer is discarded
PROMPT_OUTPUTS = ("prompt_log_probs", "prompt_top_ids", "prompt_top_log_probs")


class Candidate(Protocol):
    """The subject of the evaluation. `name` is for the report."""

    @property
    def name(self) -> str: ...

    async def answer(self, sample: Sample, request_id: str) -> Answer:
        """The greedy answer, timed from the request to the last token."""
        ...

    async def decide(self, prompt: Sequence[int], tokens: Sequence[int], request_id: str) -> tuple[Decision, ...]:
        """Its decisions on `tokens` after a prompt of token ids, as far as they fit."""
        ...


@dataclass(frozen=True, slots=True)
class CandidateRun:
    answers: list[Answer]  # in the samples' order
    wall_seconds: float
    fresh: tuple[int, ...] | None = None  # samples that were answered in that time; None: all

    @property
    def performance(self) -> Performance:
        answers = self.answers if self.fresh is None else [self.answers[index] for index in self.fresh]
        return Performance.of(answers, self.wall_seconds)


class EngineCandidate:
    """An engine in this process, behind the same stages as when it is served."""

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        postprocessor: Postprocessor,
        max_tokens: int,
        *,
        guide: Guide | None = None,
        adapter: str = "",
    ) -> None:
        """`guide`: the required format of answers; `adapter`: the digest of the adapter that answers."""
        self._engine = engine
        self._adapter = adapter
        self._encoder = encoder
        self._postprocessor = postprocessor
        self._sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._guide = guide

    @property
    def name(self) -> str:
        return self._engine.info.name

    async def answer(self, sample: Sample, request_id: str) -> Answer:
        started = time.perf_counter()
        prompt = self._encoder.encode(sample.prompt)
        request = GenerateRequest(
            request_id,
            prompt.input_ids,
            self._sampling,
            end_id=prompt.end_id if prompt.end_id >= 0 else None,
            stop_ids=prompt.stop_words,
            guide=self._guide,
            adapter=self._adapter,
        )
        ids: list[int] = []
        usage: Usage | None = None
        async with aclosing(generate(self._engine, request)) as stream:
            async for event in stream:
                ids += event.tokens.token_ids
                usage = event.tokens.usage or usage
        text = self._postprocessor.text(ids)
        seconds = time.perf_counter() - started
        return Answer(
            text, len(prompt.input_ids), len(ids), seconds, tuple(ids), prompt_digest=ids_digest(prompt),
            num_drafted=usage.drafted_tokens if usage else 0, num_accepted=usage.accepted_tokens if usage else 0,
        )  # fmt: skip

    async def decide(self, prompt: Sequence[int], tokens: Sequence[int], request_id: str) -> tuple[Decision, ...]:
        tokens = tokens[: self._engine.info.max_seq_len - len(prompt) - 1]
        request = GenerateRequest(
            request_id,
            (*prompt, *tokens),
            SamplingParams(max_tokens=1, temperature=0.0),
            return_prompt_log_probs=True,
            num_top_log_probs=min(MAX_TOP_LOG_PROBS, self._engine.info.vocab_size),
            adapter=self._adapter,
        )
        scores = PromptScores()
        async with aclosing(generate(self._engine, request)) as stream:
            async for event in stream:
                scores = event.tokens.prompt or scores
        return last_decisions(tokens, scores)


def last_decisions(tokens: Sequence[int], scores: PromptScores) -> tuple[Decision, ...]:
    """Decisions on `tokens`, with which a prompt ends; log-probs in the precision of the wire format."""
    begin = len(scores.log_probs) - len(tokens)
    told = zip(tokens, _singles(scores.log_probs[begin:]), scores.top[begin:], strict=True)
    return tuple(
        Decision(token, log_prob, TopTokens(top.ids, _singles(top.log_probs))) for token, log_prob, top in told
    )


def _singles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.array(values, np.float32).tolist())


class ServerCandidate:
    """A server's `ensemble`, over gRPC streams; decisions come from its `tensorrt_llm` model."""

    def __init__(
        self, client: AsyncClient, tokens_client: AsyncClient, max_tokens: int, *, guide: GuideText | None = None
    ) -> None:
        """`guide`: the required format of answers."""
        self._client = client
        self._tokens_client = tokens_client
        self._parameters: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
        if guide is not None:
            self._parameters |= {"guided_decoding_guide_type": guide.kind.value, "guided_decoding_guide": guide.text}

    @property
    def name(self) -> str:
        return self._client.url

    async def answer(self, sample: Sample, request_id: str) -> Answer:
        started = time.perf_counter()
        prompt = sample.prompt
        chat = prompt if isinstance(prompt, str) else [{"role": m.role, "content": m.content} for m in prompt]
        text, num_prompt_tokens, num_tokens, num_drafted, num_accepted = "", 0, 0, 0, 0
        stream = self._client.generate(chat, request_id=request_id, **self._parameters)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                text += delta.text
                num_prompt_tokens = delta.prompt_tokens or num_prompt_tokens
                num_tokens = delta.completion_tokens or num_tokens
                num_drafted, num_accepted = num_drafted + delta.drafted_tokens, num_accepted + delta.accepted_tokens
        seconds = time.perf_counter() - started
        return Answer(text, num_prompt_tokens, num_tokens, seconds, num_drafted=num_drafted, num_accepted=num_accepted)

    async def decide(self, prompt: Sequence[int], tokens: Sequence[int], request_id: str) -> tuple[Decision, ...]:
        """Raises `Unsupported` if the server does not return decisions."""
        inputs: dict[str, Parameter] = {
            "input_ids": [*prompt, *tokens],
            "input_lengths": len(prompt) + len(tokens),
            "request_output_len": 1,
            "return_prompt_log_probs": True,
            "num_top_log_probs": MAX_TOP_LOG_PROBS,
        }
        try:
            outputs = await self._tokens_client.infer(inputs, request_id=request_id)
        except (InvalidArgument, NotFound) as error:  # no such input, or no such model
            raise Unsupported(str(error)) from error
        except LlmserveError as error:
            if type(error) is not LlmserveError:
                raise
            raise Unsupported(str(error)) from error  # a stream reports a refusal as text, without its code
        log_probs, ids, values = (outputs[name][0].tolist() for name in PROMPT_OUTPUTS)
        top = tuple(TopTokens(tuple(i), tuple(v)) for i, v in zip(ids, values, strict=True))
        return last_decisions(tokens, PromptScores(tuple(log_probs), top))


@asynccontextmanager
async def engine_candidate(
    path: Path, *, max_tokens: int, threads: int, guide: GuideText | None = None, adapter: Path | None = None
) -> AsyncGenerator[EngineCandidate, None]:
    encoder, postprocessor = PromptEncoder(path, max_tokens), Postprocessor.open(path)
    engine = open_engine(path, EngineSettings(threads=threads))
    try:
        if engine.info.max_seq_len < (built := EngineDirectory.open(path).info().max_seq_len):
            raise ResourceExhausted(
                f"the KV cache only has room for {engine.info.max_seq_len} tokens of a prompt and its answer, not for "
                f"{built}: free some memory, so that no answer ends early"
            )
        compiled = GuideCompiler(load_tokenizer(path), engine.info.vocab_size).compile(guide) if guide else None
        digest = added_adapter(engine, adapter) if adapter else ""
        yield EngineCandidate(engine, encoder, postprocessor, max_tokens, guide=compiled, adapter=digest)
    finally:
        engine.close()


def added_adapter(engine: Engine, path: Path) -> str:
    """Load the adapter in a directory and return its digest, which requests may then name."""
    if not isinstance(engine, AdapterEngine):
        raise Unsupported(f"{engine.info.name} does not support adapters; leave out --adapter")
    adapter = SealedAdapter.open(path)
    engine.add_adapter(adapter)
    return adapter.digest


@asynccontextmanager
async def server_candidate(
    url: str, access: Access, *, max_tokens: int, guide: GuideText | None = None
) -> AsyncGenerator[ServerCandidate, None]:
    async with (
        AsyncClient(url, access=access) as client,
        AsyncClient(url, model=TOKENS_MODEL, access=access) as tokens_client,
    ):
        yield ServerCandidate(client, tokens_client, max_tokens, guide=guide)


async def run_candidate(
    candidate: Candidate,
    samples: Sequence[Sample],
    *,
    concurrency: int,
    progress: Callable[[int], None] = lambda count: None,
) -> CandidateRun:
    """Answer every sample, `concurrency` at a time, after an untimed warm-up. The first error ends the run."""
    await _ask(candidate, samples[0], WARM_UP)

    async def ask(index: int) -> Answer:
        answer = await _ask(candidate, samples[index], f"eval-{index}")
        progress(1)
        return answer

    started = time.perf_counter()
    answers = await at_once(ask, range(len(samples)), concurrency)
    return CandidateRun(answers, time.perf_counter() - started)


async def decide_all(
    candidate: Candidate,
    samples: Sequence[Sample],
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    *,
    concurrency: int,
    progress: Callable[[int], None] = lambda count: None,
) -> list[tuple[Decision, ...]]:
    """Decisions on `tokens` after each of `prompts`, in the samples' order."""

    async def decide(index: int) -> tuple[Decision, ...]:
        with _named(samples[index]):
            found = await candidate.decide(prompts[index], tokens[index], f"eval-decide-{index}")
        progress(1)
        return found

    return await at_once(decide, range(len(samples)), concurrency)


async def choose_all(
    candidate: Candidate,
    samples: Sequence[Sample],
    prompts: Sequence[ChoicePrompt],
    *,
    concurrency: int,
    progress: Callable[[int], None] = lambda count: None,
) -> CandidateRun:
    """Like `run_candidate`, for multiple choice: the likelihood of each of a sample's choices, one after another."""

    async def choose(index: int, name: str) -> Answer:
        with _named(samples[index]):
            return await _choose(candidate, prompts[index], name)

    async def ask(index: int) -> Answer:
        answer = await choose(index, f"eval-{index}")
        progress(1)
        return answer

    await choose(0, WARM_UP)
    started = time.perf_counter()
    answers = await at_once(ask, range(len(samples)), concurrency)
    return CandidateRun(answers, time.perf_counter() - started)


async def _choose(candidate: Candidate, prompt: ChoicePrompt, name: str) -> Answer:
    started = time.perf_counter()
    found: list[float] = []
    for number, (before, choice) in enumerate(prompt.parts()):
        decisions = await candidate.decide(before, choice, f"{name}-{number}")
        if len(decisions) < len(choice):
            raise InvalidArgument(f"choice {number} has {len(choice)} tokens, but only {len(decisions)} fit")
        found.append(sum(decision.log_prob for decision in decisions))
    return Answer(
        prompt.choices[likeliest(found)],
        len(prompt.input_ids),
        sum(len(choice) for _, choice in prompt.parts()),
        time.perf_counter() - started,
        prompt_digest=ids_digest(prompt),
        log_likelihoods=tuple(found),
    )


async def _ask(candidate: Candidate, sample: Sample, request_id: str) -> Answer:
    with _named(sample):
        return await candidate.answer(sample, request_id)


@contextmanager
def _named(sample: Sample) -> Iterator[None]:
    """Add the sample's name to an error."""
    try:
        yield
    except LlmserveError as error:
        raise type(error)(f"sample {sample.id}: {error}") from error
