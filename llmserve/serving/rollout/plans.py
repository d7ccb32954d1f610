"""Two plans for a model in a rollout and each ensemble that uses it: with the stable version, with the candidate."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from llmserve.serving.ensemble import StepModel
from llmserve.serving.ensemble_plan import step_models
from llmserve.serving.loading.loader import PreparedModel, serve_ensemble
from llmserve.serving.loading.table import ModelTable
from llmserve.serving.model import ServedModel
from llmserve.serving.rollout.rollout import Rollout
from llmserve.serving.rollout.routing import Answering, CandidateStep, Split, StableStep
from llmserve.serving.schedulers.shared import SharedResources


def make_splits(
    rollout: Rollout, table: ModelTable, ensembles: Mapping[str, PreparedModel], shared: SharedResources
) -> dict[str, Split]:
    """Splits by the names that lead to the model. Raises `ModelConfigError` if an ensemble does not fit it."""
    stable, candidate = rollout.stable, rollout.model
    assert stable is not None
    assert candidate is not None
    on_top = _on_top(rollout.name, ensembles)
    to_stable, to_candidate = StableStep(stable, rollout), CandidateStep(candidate, rollout)
    stable_ways: dict[str, Answering] = {rollout.name: to_stable, **_ways(on_top, stable, to_stable, table, shared)}
    candidate_ways: dict[str, Answering] = {
        rollout.name: to_candidate, **_ways(on_top, candidate, to_candidate, table, shared)
    }  # fmt: skip
    return {
        name: Split(
            stable=way,
            candidate=candidate_ways[name],
            unwatched=partial(table.find, name),
            watch=rollout,
            chance=rollout.chance,
        )
        for name, way in stable_ways.items()
    }


def _ways(
    on_top: list[PreparedModel], model: ServedModel, watched: StepModel, table: ModelTable, shared: SharedResources
) -> dict[str, ServedModel]:
    """The ensembles that use `model`; their requests go to `watched` instead."""
    planned = {model.name: model}

    def find(name: str, version: str) -> ServedModel:
        return planned[name] if name in planned and not version else table.find(name, version)

    for ensemble in on_top:
        name, version = ensemble.source.name, table.find(ensemble.source.name).version
        planned[name] = serve_ensemble(
            ensemble, version, find, shared, step=lambda part: watched if part is model else part
        )
    return {name: one for name, one in planned.items() if one is not model}


def _on_top(name: str, ensembles: Mapping[str, PreparedModel]) -> list[PreparedModel]:
    """The ensembles that use a model, inner ones before those that use them."""
    steps = {user: set(step_models(one.config)) for user, one in ensembles.items()}
    leading = {name}
    while more := {user for user in steps if user not in leading and not leading.isdisjoint(steps[user])}:
        leading |= more
    waiting, ordered = leading - {name}, list[PreparedModel]()
    while waiting:
        due = sorted(user for user in waiting if waiting.isdisjoint(steps[user]))
        ordered += [ensembles[user] for user in due]
        waiting.difference_update(due)
    return ordered
