"""`llmserve worker` with an engine that computes nothing: a step takes as long as the environment says."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.settings import EngineSettings
from llmserve.scheduler.plan import StepPlan

STEP_S, TOKEN_S, KV_TOKENS, BATCH = (f"TIMED_WORKER_{name}" for name in ("STEP_S", "TOKEN_S", "KV_TOKENS", "BATCH"))
TOKEN = 1000  # of each answer


class TimedRunner:
    """A step takes `step_s`, and `token_s` for each token of a prompt in it."""

    def __init__(self, info: RunnerInfo, step_s: float, token_s: float) -> None:
        self.info = info
        self._step_s, self._token_s = step_s, token_s

    def step(self, plan: StepPlan) -> StepResult:
        num_samples = sum(chunk.num_samples for chunk in plan.chunks)
        time.sleep(self._step_s + self._token_s * (plan.num_tokens - num_samples))
        return StepResult([TOKEN] * num_samples, [0.0] * num_samples)

    def close(self) -> None:
        pass


class TimedRuntime:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._told = {name: float(environment[name]) for name in (STEP_S, TOKEN_S, KV_TOKENS, BATCH)}

    def open(self, directory: EngineDirectory, settings: EngineSettings) -> InflightEngine:
        told, max_num_tokens = self._told, 2048
        info = replace(directory.info(), max_batch_size=int(told[BATCH]), max_num_tokens=max_num_tokens)
        block_size = int(directory.manifest.options["tokens_per_block"])
        runner = RunnerInfo(
            vocab_size=info.vocab_size, block_size=block_size, num_blocks=int(told[KV_TOKENS]) // block_size,
            max_num_tokens=max_num_tokens, max_batch_size=info.max_batch_size, max_seq_len=info.max_seq_len,
        )  # fmt: skip
        return InflightEngine(TimedRunner(runner, told[STEP_S], told[TOKEN_S]), info, settings.scheduler)


def main() -> None:
    from llmserve.cli.main import main as llmserve
    from llmserve.cluster import worker

    vars(worker)["runtime_for"] = lambda target: TimedRuntime(os.environ)
    sys.argv = ["llmserve", "worker", *sys.argv[1:]]
    llmserve()


if __name__ == "__main__":
    main()
