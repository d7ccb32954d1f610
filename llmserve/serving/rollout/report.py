"""Reports of rollouts: as JSON for people and scripts, as samples for `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from time import monotonic
from typing import Any

from llmserve.serving.backend import GaugeSample
from llmserve.serving.config.rollout_rules import described
from llmserve.serving.rollout.progress import Latencies, Progress
from llmserve.serving.rollout.rollout import Rollout, RolloutState

KINDS = {"first": "first_response", "total": "total"}


def rollout_report(rollout: Rollout) -> dict[str, Any]:
    progress = rollout.progress
    return {
        "model": rollout.name,
        "state": rollout.state,
        "waits_for": progress.waits_for(monotonic()) if rollout.is_on else "",
        "stable_version": rollout.stable_version,
        "candidate_version": rollout.candidate.version,
        "candidate_parameters": dict(rollout.candidate.parameters),
        "adapter": rollout.candidate.adapter,
        "began": rollout.began.isoformat(timespec="seconds"),
        "step": progress.step + 1,
        "num_steps": len(rollout.rules.steps),
        "shadow_share": rollout.rules.shadow if rollout.is_on else 0.0,
        "canary_share": rollout.canary_share,
        "stable": {"requests": asdict(progress.stable), **_medians(progress.latencies["stable"])},
        "candidate": {
            "canary": {**asdict(progress.canary), "rescued": progress.num_rescued},
            "shadow": {"succeeded": progress.shadow.succeeded, "failed": progress.shadow.failed,
                       "not_copied": progress.num_not_copied, **_medians(progress.copies)},
            "last_error": progress.last_error,
            **_medians(progress.latencies["candidate"]),
        },
        "error_rate": progress.errors.rate,
        "agreement": {
            "compared": progress.differences.num_all,
            "equal": progress.differences.num_all - progress.differences.num_bad,
            "fraction": _agreement(progress),
            "not_comparable": progress.num_not_comparable,
        },
        "latency_ratio": {name: progress.ratio(kind) for kind, name in KINDS.items()},
        "rules": described(rollout.rules),
        "decisions": [
            {"at": each.at.isoformat(timespec="milliseconds"), "what": each.what, "reason": each.reason}
            for each in rollout.decisions
        ],
    }  # fmt: skip


def rollout_samples(rollouts: Iterable[Rollout]) -> Iterator[GaugeSample]:
    for rollout in rollouts:
        progress = rollout.progress
        labels = {"model": rollout.name, "version": rollout.candidate.version}
        if rollout.candidate.adapter is not None:
            labels["adapter"] = rollout.candidate.adapter["name"]
        for state in RolloutState:
            yield "llmserve_rollout_state", {**labels, "state": state}, float(rollout.state is state)
        yield "llmserve_rollout_canary_share", labels, rollout.canary_share
        for role, counts in (("stable", progress.stable), ("canary", progress.canary), ("shadow", progress.shadow)):
            for outcome, count in asdict(counts).items():
                yield "llmserve_rollout_requests_total", {**labels, "role": role, "outcome": outcome}, count
        yield "llmserve_rollout_rescued_total", labels, progress.num_rescued
        num_equal = progress.differences.num_all - progress.differences.num_bad
        compared = {"equal": num_equal, "different": progress.differences.num_bad,
                    "not_comparable": progress.num_not_comparable}  # fmt: skip
        for result, count in compared.items():
            yield "llmserve_rollout_compared_total", {**labels, "result": result}, count
        for kind, name in KINDS.items():
            if (ratio := progress.ratio(kind)) is not None:
                yield "llmserve_rollout_latency_ratio", {**labels, "latency": name}, ratio


def _agreement(progress: Progress) -> float | None:
    return 1.0 - progress.differences.rate if progress.differences.num_all else None


def _medians(latencies: Latencies) -> dict[str, float | None]:
    """Medians in milliseconds."""
    medians = {name: latencies.median(kind) for kind, name in KINDS.items()}
    return {f"{name}_ms": None if value is None else round(value * 1000, 3) for name, value in medians.items()}
