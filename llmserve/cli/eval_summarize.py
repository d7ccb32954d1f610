"""The interface of TensorRT-LLM's summarize.py for `llmserve eval`: its flags, its ROUGE output, its threshold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llmserve.cli.dataclass_command import option
from llmserve.cli.eval_bless import EvalOrBlessCommand
from llmserve.cli.old_flags import Translation
from llmserve.cli.trtllm_flags import SUMMARIZE

if TYPE_CHECKING:
    from llmserve.evaluation.reporting.report import Report, Side
    from llmserve.evaluation.suite import Suite

summarize_option = partial(option, panel="Flags of summarize.py")
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
DATA = "eval/suites/cnn_dailymail.yaml"  # the default of summarize.py


class EvalCommand(EvalOrBlessCommand):
    old_flags = SUMMARIZE

    def translated(self, args: Sequence[str]) -> Translation:
        done = super().translated(args)
        flags = {word.partition("=")[0].replace("_", "-") for word in args}
        if flags & {"--test-hf", "--test-trt-llm"} and "--suite" not in flags:
            done.arguments.append(f"--suite={DATA}")
        return done


@dataclass(frozen=True, kw_only=True)
class SummarizeFlags:
    test_hf: bool = summarize_option(False, "Also print the baseline's ROUGE in four lines.", "--test-hf")
    test_trt_llm: bool = summarize_option(False, "Also print the engine's ROUGE in four lines.", "--test-trt-llm")
    max_ite: int | None = summarize_option(None, "Batches: --num-samples by --batch-size.", min=1)
    batch_size: int | None = summarize_option(None, "The same as --concurrency.", min=1)
    check_accuracy: bool = summarize_option(
        False, "Also fail if ROUGE-1 is at or below the threshold.", "--check-accuracy"
    )
    tensorrt_llm_rouge1_threshold: float = summarize_option(15.0, "Threshold of --check-accuracy, in points.")

    def summary(self, report: Report, suite: Suite) -> tuple[list[str], bool]:
        """The requested lines, and whether the engine is above the threshold."""
        if suite.choices_column or not (self.test_hf or self.test_trt_llm or self.check_accuracy):
            return [], True
        sides = {"TensorRT-LLM": (self.test_trt_llm, report.engine), "HF": (self.test_hf, report.baseline)}
        scores = {name: _rouge(side, report, suite) for name, (_, side) in sides.items()}
        lines = [
            line
            for name, (is_asked, side) in sides.items()
            if is_asked
            for line in _lines(name, scores[name], sum(answer.seconds for answer in side.answers))
        ]
        rouge1, least = scores["TensorRT-LLM"]["rouge1"], self.tensorrt_llm_rouge1_threshold
        is_above = not self.check_accuracy or rouge1 > least
        return lines + ([] if is_above else [f"FAIL: rouge1 is {rouge1:.2f}, and must be above {least:g}"]), is_above


def _rouge(side: Side, report: Report, suite: Suite) -> dict[str, float]:
    from llmserve.evaluation.judging.text_metrics import score_texts

    texts, references = [answer.text for answer in side.answers], [sample.reference for sample in report.samples]
    return {name: float(each.mean()) for name, each in score_texts(ROUGE, texts, references, suite.text_rules).items()}


def _lines(name: str, scores: dict[str, float], seconds: float) -> Iterator[str]:
    yield f"{'Hugging Face' if name == 'HF' else name} (total latency: {seconds} sec)"
    yield f"{name} beam 0 result"
    yield from (f"  {metric} : {scores[metric]}" for metric in ROUGE)
