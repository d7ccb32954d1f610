"""Checks an engine as it is served: the conditions, the server for each, and the results.

For an engine directory, three servers are started, one after the other, with the shipped pipelines:

    as shipped           alone, one at a time: what all others are compared with; then, with every prompt in the prefix
                         cache, all at once: streamed, unary, over /v1; drawn with seeds; a forced text of many bytes;
                         draws beside those of the sampler's definition
    without prefix cache all at once, so that whole prompts are batched, and staggered
    a small KV cache     all at once; it has room for little more than the longest sequence, so others are preempted

A running server gets all conditions except those that need a separate server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from llmserve.client import Access, AsyncClient
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.build_time import BuildTime
from llmserve.engine.directory.identity import EngineIdentity, told_apart
from llmserve.errors import InvalidArgument, LlmserveError, NotFound, Unavailable
from llmserve.evaluation.answers import Answer, Sample
from llmserve.evaluation.candidates import TOKENS_MODEL
from llmserve.evaluation.served.comparison import ServedResult, compared, difference
from llmserve.evaluation.served.conditions import Told, in_flight, most_at_once, staggered
from llmserve.evaluation.served.draws import judge_draws
from llmserve.evaluation.served.process import OwnServer, own_server
from llmserve.evaluation.served.replies import (
    LOG_PROBS,
    Asker,
    GrpcAsker,
    Question,
    ServedAnswer,
    V1Asker,
    counters,
    grpc_asker,
    v1_asker,
)
from llmserve.evaluation.served.seeds import OTHER_SEED, SEED, judge_seeds, seeded
from llmserve.evaluation.served.speed import Speed, measured

NUM_SAMPLES = 32  # if one answer in ten is spoiled, the probability that none of so many is: 0.9^32 = 3 %
NUM_SEEDED = 8
ARRIVALS = 4.0  # arrivals in the time that one answer takes alone
FORCED = "Grüße, 世界 — 😀 ок"  # letters of two, three and four bytes; a token may be one byte
FORCED_TOKENS = 96
WARM_UP = Question("eval-warm-up", "Hello", 4)
NO_REUSE = ("--parameter", f"{TOKENS_MODEL}.enable_kv_cache_reuse=false")
PREEMPTING = ("--parameter", f"{TOKENS_MODEL}.batch_scheduler_policy=max_utilization")
NOT_TAKEN = ("HTTP 400", "HTTP 422")  # errors of a server without such a field
MOST_ROUNDS = 5  # in a small KV cache
ADAPTED = "eval-adapter"  # name of the adapter that is judged
PREEMPTIONS = {"preemptions": "llmserve_preemptions_total"}


class Watcher(Protocol):
    """See `evaluation.run`."""

    def phase(self, name: str, total: int) -> Told: ...


@dataclass(frozen=True, slots=True)
class Served:
    """Results of all conditions, in order."""

    results: tuple[ServedResult, ...]
    notes: tuple[str, ...]  # what was skipped, and why
    speed: Speed | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """The samples of a suite, and the engine's answers to them in this process, if any."""

    samples: Sequence[Sample]
    answers: Sequence[Answer]
    max_tokens: int
    prompt_ids: Sequence[Sequence[int]] = ()  # ids of each sample; empty: unknown

    def spread(self, count: int) -> Asked:
        """`count` items at equal distances."""
        step = max(1, len(self.samples) // count)
        some = slice(None, count * step, step)
        return Asked(self.samples[some], self.answers[some], self.max_tokens, self.prompt_ids[some])

    def questions(self) -> list[Question]:
        return [Question(sample.id, sample.prompt, self.max_tokens) for sample in self.samples]


async def check_engine(
    directory: EngineDirectory,
    command: Sequence[str],
    asked: Asked,
    watcher: Watcher,
    *,
    threads: int,
    is_judged: bool,
    adapter: Path | None = None,
) -> Served:
    """Check an engine in servers that `command` starts. Raises `Unavailable` if one does not start or ends,
    `InvalidArgument` if it has another engine. `adapter`: directory of the adapter that all requests select."""
    check = Check(asked, is_judged, watcher.phase("as served", 9 * len(asked.samples)))
    name = ADAPTED if adapter else ""
    flags = ["--threads", str(threads)] if threads else []
    flags += ["--adapter", f"{name}={adapter}"] if adapter else []

    @asynccontextmanager
    async def server(*more: str) -> AsyncGenerator[tuple[OwnServer, GrpcAsker], None]:
        with own_server(command, directory.path, (*flags, *more)) as started:
            await started.ready()
            check.server = started
            await require_engine(started.grpc, Access(), directory)
            async with grpc_asker(started.grpc, Access(), name) as grpc:
                yield started, await check.warmed_up(grpc)

    async with server() as (shipped, grpc), v1_asker(shipped.http, Access(), name) as v1:
        await check.alone(grpc)
        check.beside_this_process()
        await check.prefix_hits(grpc)
        await check.other_ways(grpc, v1)
        await check.draws(grpc, EngineIdentity.of(directory.manifest))
        opened, peak = shipped.open_seconds, shipped.peak_bytes()
    async with server(*NO_REUSE) as (cold, grpc):
        in_flight = await check.in_flight(grpc)
        await check.staggered(grpc)
        peak = max(peak, cold.peak_bytes())
    async with server(*PREEMPTING, "--max-kv-tokens", str(check.longest())) as (small, grpc):
        await check.preempted(grpc, small.metrics)
    build_time = BuildTime.load(directory.path)
    built = build_time.here() if build_time else None
    return check.served(measured(check.reference, in_flight, memory=peak, build_seconds=built, open_seconds=opened))


async def check_server(
    url: str, http_url: str, access: Access, asked: Asked, watcher: Watcher, *, is_judged: bool
) -> Served:
    """Check a running server. Raises `LlmserveError` if it no longer answers."""
    check = Check(asked, is_judged, watcher.phase("as served", (7 if http_url else 4) * len(asked.samples)))
    async with AsyncExitStack() as stack:
        grpc = await stack.enter_async_context(grpc_asker(url, access))
        v1 = await stack.enter_async_context(v1_asker(http_url, access)) if http_url else None
        if v1 is None:
            check.notes.append("/v1 was not checked; give its address with --http-url")
        check.notes.append(
            "preemption and batches without prefix cache need the engine directory; give it as an argument"
        )
        grpc = await check.warmed_up(grpc)
        await check.alone(grpc)
        in_flight = await check.in_flight(grpc)
        await check.staggered(grpc)
        await check.other_ways(grpc, v1)
        await check.draws(grpc, await server_identity(url, access))
    return check.served(measured(check.reference, in_flight))


async def server_identity(url: str, access: Access) -> EngineIdentity | None:
    """A server's description of its engine; None if it has none, like other programs."""
    async with AsyncClient(url, access=access) as client:
        try:
            config = await client.config_of(TOKENS_MODEL)
        except NotFound:
            return None
        return EngineIdentity.read({name: entry.string_value for name, entry in config.parameters.items()})


async def require_engine(url: str, access: Access, directory: EngineDirectory) -> EngineIdentity | None:
    """`InvalidArgument` if the server reports another engine than `directory` had when it was opened."""
    identity, digest = await server_identity(url, access), directory.manifest.engine_digest
    if identity is not None and identity.digest != digest:
        theirs, ours = told_apart(identity.digest, digest)
        raise InvalidArgument(
            f"{url} serves another engine (digest {theirs}) than {directory.path} had when this run "
            f"began ({ours}); if you rebuilt it, run this again"
        )
    return identity


@dataclass(slots=True)
class Check:
    """Each condition adds its result."""

    asked: Asked
    is_judged: bool  # if answers may differ, because the engine does not promise identical bits
    told: Told
    server: OwnServer | None = None
    results: list[ServedResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reference: list[ServedAnswer] = field(default_factory=list)

    @property
    def questions(self) -> list[Question]:
        return self.asked.questions()

    def served(self, speed: Speed) -> Served:
        return Served(tuple(self.results), tuple(self.notes), speed)

    def require_answers(self, replies: Sequence[ServedAnswer]) -> None:
        """`Unavailable` if the server has ended: then none of its answers count."""
        gone = next((reply.record for reply in replies if reply.record.is_unreachable), None)
        if gone is None:
            return
        if self.server is not None:
            self.server.require_alive()
        raise Unavailable(f"the server under test is gone: {gone.message or gone.error}")

    async def warmed_up(self, grpc: GrpcAsker) -> GrpcAsker:
        """A client after an untimed question; without log-probs if the engine cannot return them."""
        first = await grpc.ask(WARM_UP)
        self.require_answers([first])
        if not first.record.error:
            return grpc
        without = replace(grpc, inputs=grpc.inputs - {LOG_PROBS})
        second = await without.ask(WARM_UP)
        self.require_answers([second])
        if second.record.error:
            return grpc  # another error, which each condition will report
        if (note := f"log-probs were not compared: {first.record.message}") not in self.notes:
            self.notes.append(note)
        return without

    def longest(self) -> int:
        """Tokens of the longest possible sequence."""
        return max(reply.record.prompt_tokens or 1 for reply in self.reference) + self.asked.max_tokens

    async def alone(self, grpc: GrpcAsker) -> None:
        self.reference = await in_flight(grpc, self.questions, 1, self.told)
        self._add("alone", self.reference)

    def beside_this_process(self) -> None:
        """Compare with the answers of the engine in this process, which were also batched with others."""
        inside = [
            ServedAnswer(text=answer.text, token_ids=None if answer.token_ids is None else list(answer.token_ids))
            for answer in self.asked.answers
        ]
        name = "as in this process"
        self.results.append(compared(name, self.questions, inside, self.reference, is_judged=self.is_judged))

    async def prefix_hits(self, grpc: GrpcAsker) -> None:
        replies = await in_flight(grpc, self.questions, len(self.questions), self.told)
        found = sum(reply.record.cached_tokens or 0 for reply in replies)
        asked = sum(reply.record.prompt_tokens or 0 for reply in replies)
        note = f"{found:,} of {asked:,} prompt tokens were in the cache"
        self._add("prefix hits", replies, note, happened=found > 0)

    async def in_flight(self, grpc: GrpcAsker) -> list[ServedAnswer]:
        replies = await in_flight(grpc, self.questions, len(self.questions), self.told)
        self._add_together("in flight", replies)
        return replies

    async def staggered(self, grpc: GrpcAsker) -> None:
        mean = sum(reply.record.latency for reply in self.reference if reply.record.arrived) / len(self.reference)
        replies = await staggered(grpc, self.questions, ARRIVALS / max(mean, 1e-3), self.told)
        self._add_together("staggered", replies)

    async def preempted(self, grpc: GrpcAsker, metrics: str) -> None:
        """Repeat while no request was preempted, which depends on chance if answers are much shorter than prompts."""
        count = rounds = 0
        while not count and rounds < MOST_ROUNDS:
            replies = await in_flight(grpc, self.questions, len(self.questions), self.told)
            self.require_answers(replies)
            count = int((await counters(metrics, PREEMPTIONS))["preemptions"])
            rounds += 1
        self._add("preempted", replies, f"{count} preemptions", happened=count > 0)

    async def other_ways(self, grpc: GrpcAsker, v1: V1Asker | None) -> None:
        """Unary, over /v1, with seeds, and with a forced text."""
        questions = self.questions
        unary = [question.unary() for question in questions]
        self._add("unary", await in_flight(grpc, unary, len(unary), self.told))
        if v1 is not None:
            streamed = await in_flight(v1, questions, len(questions), self.told)
            self._add("/v1 streamed", streamed)
            whole = await in_flight(v1, unary, len(unary), self.told)
            both = zip(self.reference, streamed, strict=True)
            self._add("/v1 unary", whole, expected=[told if told.has_thoughts else one for one, told in both])
            await self._log_probs(v1)
        await self._seeds(grpc)
        await self._forced([grpc] if v1 is None else [grpc, v1])

    async def _log_probs(self, v1: V1Asker) -> None:
        """Over /v1, every second answer unary. Separate, because answers with log-probs are assembled differently, and
        few clients request them."""
        if any(reply.log_probs is None for reply in self.reference):
            return
        first = await v1.ask(replace(WARM_UP, wants_log_probs=True))
        self.require_answers([first])
        if first.record.error in NOT_TAKEN and self.server is None:  # ours takes it; a running one may be of others
            self.notes.append(f"log-probs were not compared over /v1: {first.record.message or first.record.error}")
            return
        questions = [replace(each, wants_log_probs=True, streams=n % 2 == 0) for n, each in enumerate(self.questions)]
        self._add("/v1 log-probs", await in_flight(v1, questions, len(questions), self.told))

    async def _seeds(self, grpc: GrpcAsker) -> None:
        questions = seeded(self.questions[:NUM_SEEDED], SEED)
        alone = await in_flight(grpc, questions, 1, _untold)
        others = self.questions[NUM_SEEDED:]  # greedy requests in the same batches
        mixed = await in_flight(grpc, [*questions, *others], len(self.questions), _untold)
        again = await in_flight(grpc, seeded(questions, OTHER_SEED), len(questions), _untold)
        self.require_answers([*alone, *mixed, *again])
        result = judge_seeds(questions, alone, mixed[: len(questions)], again, is_judged=self.is_judged)
        self.results.append(result)

    async def draws(self, grpc: GrpcAsker, identity: EngineIdentity | None) -> None:
        """For engines that draw by llmserve's definition: those that promise identical bits."""
        if identity is None or not identity.is_deterministic or not self.asked.prompt_ids:
            self.notes.append(
                "sampled tokens were not compared: the engine does not promise them, or its prompts are unknown"
            )
            return
        questions, prompts = self.questions[:NUM_SEEDED], self.asked.prompt_ids[:NUM_SEEDED]
        try:
            self.results.append(await judge_draws(grpc, questions, prompts, is_judged=self.is_judged))
        except Unavailable:
            if self.server is not None:
                self.server.require_alive()
            raise
        except LlmserveError as error:
            self.notes.append(f"sampled tokens were not compared: {error}")

    async def _forced(self, askers: Sequence[Asker]) -> None:
        question = Question("multi-byte", "Text:", FORCED_TOKENS, text=FORCED)
        ways = [(asker, each) for asker in askers for each in (question, question.unary())]
        replies = [await asker.ask(each) for asker, each in ways]
        self.require_answers(replies)
        if errors := [reply.record for reply in replies if reply.record.error]:
            self.notes.append(f"no text could be forced: {errors[0].message or errors[0].error}")
            return
        expected = ServedAnswer(text=FORCED)
        found = [
            difference(f"{'streamed' if each.streams else 'unary'} over {asker.name}", expected, reply)
            for (asker, each), reply in zip(ways, replies, strict=True)
        ]
        self.results.append(ServedResult("multi-byte", len(ways), tuple(each for each in found if each is not None)))

    def _add_together(self, name: str, replies: Sequence[ServedAnswer]) -> None:
        most = most_at_once([reply.record for reply in replies])
        self._add(name, replies, f"up to {most} at the same time", happened=most > 1)

    def _add(
        self,
        name: str,
        replies: Sequence[ServedAnswer],
        note: str = "",
        *,
        expected: Sequence[ServedAnswer] | None = None,
        happened: bool = True,
    ) -> None:
        """`happened`: false if the condition did not occur; then equal answers show nothing."""
        self.require_answers(replies)
        beside = self.reference if expected is None else expected
        result = compared(name, self.questions, beside, replies, is_judged=self.is_judged, notes=[note] if note else [])
        shows = happened or result.differences
        self.results.append(result if shows else replace(result, is_judged=False))


def _untold(count: int) -> None:
    """Report what the bar does not include."""
