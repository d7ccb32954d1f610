"""One complete evaluation: suite -> samples -> baseline and engine answers -> scores -> gate -> report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from llmserve.checkpoint.adapters.adapted import open_checkpoint
from llmserve.checkpoint.reader import Checkpoint
from llmserve.client import Access
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.identity import EngineIdentity
from llmserve.engine.machine.description import machine_name
from llmserve.errors import InvalidArgument, NotFound, Unsupported, raise_problems
from llmserve.evaluation.answers import Answer, Performance, Sample
from llmserve.evaluation.baseline import hf
from llmserve.evaluation.baseline.computed import compute_baseline, compute_choices, kept_batches, with_rounding
from llmserve.evaluation.baseline.engine_baseline import engine_baseline, engine_facts
from llmserve.evaluation.baseline.folder import model_folder, text_folder
from llmserve.evaluation.baseline.prompt_ids import PromptIds, second_opinion
from llmserve.evaluation.baseline.stored import (
    Baseline,
    BaselineKey,
    load_baseline,
    missing_baseline,
    replaceable_baseline,
    require_mergeable,
    this_environment,
)
from llmserve.evaluation.candidates import (
    Candidate,
    CandidateRun,
    choose_all,
    decide_all,
    engine_candidate,
    run_candidate,
    server_candidate,
)
from llmserve.evaluation.data import load_samples, suite_digest
from llmserve.evaluation.decisions import Decision
from llmserve.evaluation.judging.evidence import Evidence
from llmserve.evaluation.judging.gate import GateResult, GroupedResult, judge, judge_losses
from llmserve.evaluation.judging.parity import compare_tokens
from llmserve.evaluation.judging.rounding import loss_margins
from llmserve.evaluation.judging.scoring import require_metrics, scores_of
from llmserve.evaluation.kept import KeptAnswers, identity_of, kept_answers, timed
from llmserve.evaluation.prompts import ChoicePrompt, PromptEncoder, text_digest
from llmserve.evaluation.reporting.report import STORED, Report, Side
from llmserve.evaluation.reporting.versions import package_versions
from llmserve.evaluation.same_prompts import (
    require_room,
    require_same_adapter,
    require_same_ids,
    require_same_prompts,
)
from llmserve.evaluation.served.check import Asked
from llmserve.evaluation.served.run import ServedOptions, Subject, with_served
from llmserve.evaluation.suite import Suite, load_suite
from llmserve.models.number_formats import FLOAT16, FLOAT32, FLOATS
from llmserve.stages.preprocess import PreparedPrompt


class Watcher(Protocol):
    """Receives events of a run; draws the progress bars."""

    def phase(self, name: str, total: int) -> Callable[[int], None]:
        """A phase begins; the returned function receives the number of samples just done."""
        ...


@dataclass(frozen=True, slots=True)
class EvalOptions:
    suite: Path
    checkpoint: Path | None = None  # the checkpoint whose Hugging Face model is the baseline
    baseline: Path | None = None  # or the engine that is the baseline
    engine: Path | None = None
    url: str = ""  # of a running server, which is judged instead of `engine`
    num_samples: int | None = None  # None: the suite's
    dtype: str = ""  # of the baseline; "": the engine's dtype
    refresh_baseline: bool = False
    baseline_batch_size: int = 1
    concurrency: int = 8
    threads: int = 0  # for the engine; 0: every core
    access: Access = field(default_factory=Access)  # to the server
    kept_answers: Path | None = None  # file that keeps an engine's answers until the run has ended; None: none
    served: ServedOptions | None = None  # None: the engine as served is not checked
    lora: Path | None = None  # adapter that is merged into the checkpoint
    adapter: Path | None = None  # directory of the adapter that answers with the engine

    def problems(self) -> list[str]:
        rules = [
            (self.engine is not None or self.url, "give an engine directory, or --url of a running server"),
            (
                self.checkpoint or self.baseline,
                "give the checkpoint with --hf-model-dir, or another engine with --baseline",
            ),
            (
                not (self.checkpoint and self.baseline),
                "--hf-model-dir and --baseline both select a baseline; give only one of them",
            ),
            (not self.adapter or not self.url, "--adapter requires an engine directory; leave out --url"),
            (
                not self.adapter or self.lora or self.baseline,
                "--adapter changes the engine; give the baseline the same adapter, as PEFT saved it, with --lora",
            ),
            (self.checkpoint or not self.lora, "--lora changes the checkpoint of --hf-model-dir; give that, too"),
            (
                not self.baseline or not (self.dtype or self.refresh_baseline or self.baseline_batch_size != 1),
                "--dtype, --refresh-baseline and --baseline-batch-size are for a Hugging Face model; leave them out "
                "with --baseline",
            ),
        ]
        return [text for holds, text in rules if not holds] + self.value_problems()

    def value_problems(self) -> list[str]:
        rules = [
            (self.num_samples is None or self.num_samples >= 1, "--num-samples must be at least 1"),
            (not self.dtype or self.dtype in FLOATS, f"--dtype must be one of {', '.join(FLOATS)}, got {self.dtype!r}"),
            (self.concurrency >= 1, "--concurrency must be at least 1"),
            (self.baseline_batch_size >= 1, "--baseline-batch-size must be at least 1"),
            *(self.served.rules(url=self.url) if self.served else ()),
        ]
        return [text for holds, text in rules if not holds]


def evaluate(options: EvalOptions, watcher: Watcher) -> Report:
    """Checks all inputs before any model is loaded."""
    raise_problems(InvalidArgument, "eval", options.problems())
    suite = load_suite(options.suite)
    require_metrics(suite)
    directory = EngineDirectory.open(options.engine) if options.engine else None
    subject = Subject.of(directory, options.url, options.access, options.adapter)
    ask = _ask_engine if options.baseline else _ask_hugging_face
    questions, baseline_side = ask(options, suite, directory, watcher)
    with _kept(options, suite, questions, directory) as kept:
        run, decisions = asyncio.run(_run_engine(options, suite, questions, watcher, kept))
    engine_side = candidate_side(directory, options, run, subject.identity)
    report = compare(
        suite, suite_digest(suite), questions.samples, baseline_side, engine_side, decisions, questions.prompt_ids
    )
    asked = Asked(questions.samples, run.answers, suite.max_tokens, [prompt.input_ids for prompt in questions.prompts])
    served = options.served if suite.is_plain else None
    return with_served(report, suite, subject, served, asked, watcher)


def _ask_hugging_face(
    options: EvalOptions, suite: Suite, directory: EngineDirectory | None, watcher: Watcher
) -> tuple[Questions, Side]:
    assert options.checkpoint is not None, "checked with the options"
    if not options.checkpoint.exists():
        raise NotFound(f"checkpoint {options.checkpoint} does not exist; give the one that the engine was built from")
    with open_checkpoint(options.checkpoint, options.lora) as checkpoint, text_folder(checkpoint) as texts:
        if options.adapter and options.lora and directory:
            require_same_adapter(options.adapter, options.lora, directory)
        samples, prompts = _asked(options, suite, texts, directory)
        dtype = options.dtype or usual_dtype(checkpoint, directory)
        key = BaselineKey(checkpoint.digest(), text_digest(texts), suite_digest(suite), dtype)
        side = _baseline_side(options, checkpoint, suite, key, prompts, watcher)
        ids = second_opinion(texts, samples, prompts)
    side = replace(side, facts={**side.facts, "prompt_ids": str(ids)})
    return Questions(samples, prompts, side.answers, (ids,)), side


def _ask_engine(
    options: EvalOptions, suite: Suite, directory: EngineDirectory | None, watcher: Watcher
) -> tuple[Questions, Side]:
    assert options.baseline is not None, "checked with the options"
    other = EngineDirectory.open(options.baseline)
    samples, prompts = _asked(options, suite, options.baseline, directory)
    side = asyncio.run(
        engine_baseline(
            other,
            samples,
            prompts,
            max_tokens=suite.max_tokens,
            concurrency=options.concurrency,
            threads=options.threads,
            phase=watcher.phase,
        )
    )
    return Questions(samples, prompts, side.answers), side


def _asked(
    options: EvalOptions, suite: Suite, texts: Path, directory: EngineDirectory | None
) -> tuple[list[Sample], list[PreparedPrompt]]:
    """`texts`: the files that convert text to ids."""
    encoder = PromptEncoder(texts, suite.max_tokens)
    samples = load_samples(suite, options.num_samples or suite.num_samples, encoder.count_ids)
    prompts = encoder.encode_samples(samples)
    if directory:
        require_room(samples, prompts, suite.max_tokens, directory.path.name, directory.info().max_seq_len)
        require_same_ids(samples, prompts, PromptEncoder(directory.path, suite.max_tokens).encode_samples(samples))
    return samples, prompts


def usual_dtype(checkpoint: Checkpoint, directory: EngineDirectory | None) -> str:
    """The baseline's dtype: the engine's, if it is available here. Dequantized numbers are compared in float32."""
    if checkpoint.is_expanded:
        return FLOAT32.name
    return str(directory.manifest.options["dtype"]) if directory else FLOAT16.name


def compare(
    suite: Suite,
    digest: str,
    samples: Sequence[Sample],
    baseline: Side,
    engine: Side,
    decisions: Decided,
    others: Sequence[GroupedResult] = (),
) -> Report:
    """Compute both sides' answers and the engine's decisions on the baseline's; then scores, verdict and report."""
    require_same_prompts(samples, baseline.answers, engine.answers)
    scores = [scores_of(suite, samples, side.answers) for side in (baseline, engine)]
    evidence = (
        decisions if isinstance(decisions, str) else Evidence.of([a.decisions for a in baseline.answers], decisions)
    )
    margins, rounding = loss_margins(suite, baseline.facts, baseline.answers, engine.facts)
    is_judged = suite.needs_evidence or isinstance(evidence, Evidence)
    gate = GateResult(
        judge(*scores, margins=suite.margins, floors=suite.floors).metrics,
        judge_losses(evidence, margins if is_judged else {}),
        tuple(others),
    )
    return Report(
        suite=suite.name,
        suite_digest=digest,
        rules=suite.rules(),
        samples=samples,
        baseline=baseline,
        engine=replace(engine, facts={**engine.facts, **({"rounding": rounding} if rounding else {})}),
        scores=(scores[0], scores[1]),
        gate=gate,
        evidence=evidence,
        parity=compare_tokens(samples, baseline.answers, engine.answers),
        passed=gate.passes(inconclusive=suite.inconclusive_passes),
        versions=package_versions(),
    )


def _baseline_side(
    options: EvalOptions,
    checkpoint: Checkpoint,
    suite: Suite,
    key: BaselineKey,
    prompts: Sequence[PreparedPrompt],
    watcher: Watcher,
) -> Side:
    """The stored baseline, or one that is computed here and stored."""
    load = replaceable_baseline if options.refresh_baseline else load_baseline
    stored = load(suite.baselines, key)
    answers = stored.select(prompts) if stored and not options.refresh_baseline else None
    if stored and answers:
        return _hf_side(stored, answers, f"{STORED}, computed on {stored.environment['machine']}")
    if not hf.is_available():
        raise hf.unavailable() if options.refresh_baseline else missing_baseline(suite.baselines, key)
    choices = [prompt for prompt in prompts if isinstance(prompt, ChoicePrompt)]
    batch_size = 1 if choices else options.baseline_batch_size
    environment = this_environment(batch_size)
    require_mergeable(stored, prompts, environment)
    with kept_batches(suite.baselines, key, environment) as kept, model_folder(checkpoint, watcher.phase) as folder:
        progress = watcher.phase("Hugging Face", len(prompts))
        computed = (
            compute_choices(folder, kept, choices, progress=progress)
            if choices
            else compute_baseline(folder, kept, prompts, max_tokens=suite.max_tokens, progress=progress)
        )
        if suite.rounding_margins:
            progress = watcher.phase("cost of rounding", len(prompts))
            computed = with_rounding(folder, computed, prompts, progress)
        computed.merged_with(stored).save(suite.baselines)
        kept.remove()
    answers = computed.select(prompts)
    assert answers is not None, "every prompt was just answered"
    return _hf_side(computed, answers, "computed in this run")


def _hf_side(baseline: Baseline, answers: Sequence[Answer], source: str) -> Side:
    environment = baseline.environment
    key = baseline.key
    facts = {
        "name": "Hugging Face", "checkpoint_digest": key.checkpoint_digest, "text_digest": key.text_digest,
        "dtype": key.dtype,
    }  # fmt: skip
    # each answer has its batch's time, so the sum counts a batch once per answer
    wall_seconds = sum(answer.seconds for answer in answers) / int(environment["batch_size"])
    return Side(
        facts | {"source": source, "in_flight": environment["batch_size"], **environment},
        answers,
        Performance.of(answers, wall_seconds),
    )


Decided: TypeAlias = list[tuple[Decision, ...]] | str  # decisions on each sample, or why the engine returns none


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions for the engine, sample by sample."""

    samples: Sequence[Sample]
    prompts: Sequence[PreparedPrompt]
    baseline: Sequence[Answer]
    prompt_ids: tuple[PromptIds, ...] = ()  # transformers' opinion of them; none for an engine's


@contextmanager
def _kept(
    options: EvalOptions, suite: Suite, questions: Questions, directory: EngineDirectory | None
) -> Iterator[KeptAnswers | None]:
    """Answers of this run before an interruption; a server's are not kept, because it may change in between."""
    if options.kept_answers is None or options.url or directory is None:
        yield None
        return
    asked: list[Any] = [suite.max_tokens, suite.guide, *questions.samples, *questions.prompts]
    asked += [[decision.token for decision in answer.decisions] for answer in questions.baseline]
    how = {"in_flight": options.concurrency, "threads": options.threads, "machine": machine_name()}
    how |= {"adapter": SealedAdapter.open(options.adapter).digest} if options.adapter else {}
    with kept_answers(options.kept_answers, identity_of(directory, asked, how | package_versions())) as kept:
        yield kept


async def _run_engine(
    options: EvalOptions, suite: Suite, questions: Questions, watcher: Watcher, kept: KeptAnswers | None
) -> tuple[CandidateRun, Decided]:
    """The engine's own answers, and its decisions on the baseline's."""
    samples = questions.samples
    progress = watcher.phase("engine", len(samples))
    async with _open_candidate(options, suite) as opened:
        candidate = kept.candidate(opened) if kept else opened
        if suite.choices_column:
            run = await choose_all(
                candidate, samples, _choices(options, questions), concurrency=options.concurrency, progress=progress
            )
            return timed(run, kept), "choices are scored, not generated"
        run = await run_candidate(candidate, samples, concurrency=options.concurrency, progress=progress)
        run = timed(run, kept)
        try:
            decisions = await decide_all(
                candidate,
                samples,
                [prompt.input_ids for prompt in questions.prompts],
                [[decision.token for decision in answer.decisions] for answer in questions.baseline],
                concurrency=options.concurrency,
                progress=watcher.phase("evidence", len(samples)),
            )
        except Unsupported as error:  # a server or engine of another project
            return run, str(error)
        return run, decisions


def _choices(options: EvalOptions, questions: Questions) -> list[ChoicePrompt]:
    """Choices as ids: with an engine's own tokenizer, or for a server with the checkpoint's."""
    prompts = questions.prompts
    if options.engine and not options.url:
        prompts = PromptEncoder(options.engine, 1).encode_samples(questions.samples)
    return [prompt for prompt in prompts if isinstance(prompt, ChoicePrompt)]


def _open_candidate(options: EvalOptions, suite: Suite) -> AbstractAsyncContextManager[Candidate]:
    if options.url:
        return server_candidate(options.url, options.access, max_tokens=suite.max_tokens, guide=suite.guide)
    assert options.engine is not None, "checked with the options"
    return engine_candidate(
        options.engine, max_tokens=suite.max_tokens, threads=options.threads, guide=suite.guide, adapter=options.adapter
    )


def candidate_side(
    directory: EngineDirectory | None, options: EvalOptions, run: CandidateRun, identity: EngineIdentity | None = None
) -> Side:
    """Facts about the engine that answered; for a server, only what it reports, whatever is on this disk."""
    if options.url:
        facts = {"name": options.url, "url": options.url}
        if identity is not None:
            facts |= {
                "target": identity.target, "dtype": identity.dtype, "precision": identity.precision,
                "engine_digest": identity.digest,
            }  # fmt: skip
    else:
        assert directory is not None, "checked with the options"
        facts = engine_facts(directory)
    if options.adapter:
        name = f"{facts['name']} with adapter {options.adapter.resolve().name}"
        facts |= {"name": name, "adapter_digest": SealedAdapter.open(options.adapter).digest}
    facts |= {"in_flight": str(options.concurrency), "machine": machine_name()}
    if run.fresh is not None and (num_kept := len(run.answers) - len(run.fresh)):
        facts["kept_answers"] = str(num_kept)
    return Side(facts, run.answers, run.performance)
