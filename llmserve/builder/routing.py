"""Chooses each row's experts and their weights."""

from __future__ import annotations

import numpy as np

from llmserve.builder.activations import sigmoid
from llmserve.builder.attention import softmax
from llmserve.builder.quantization import Matrix
from llmserve.models.graph import Op


def route(op: Op, logits: Matrix, *weights: Matrix) -> Matrix:
    has_bias = bool(op.number("biased"))
    routes = _chosen(op, logits, weights[0] if has_bias else None)
    for of_experts in weights[has_bias:]:
        places, found = np.split(routes, 2, axis=1)
        routes = np.concatenate((places, found * of_experts[places.astype(np.intp)]), axis=1)
    return routes


def _chosen(op: Op, logits: Matrix, bias: Matrix | None) -> Matrix:
    scores = softmax(logits)
    if op.number("sigmoid"):
        scores = sigmoid(logits)
    choice = logits if bias is None else scores + bias
    if num_groups := int(op.number("num_groups")):
        choice = _of_best_groups(op, scores if bias is None else choice, num_groups)
    if op.number("tolerance"):
        return _route_by_mixer(op, logits)
    best = np.argsort(-choice, axis=1, kind="stable")[:, : int(op.number("experts_per_token"))]
    chosen = np.sort(best, axis=1)
    weights = np.take_along_axis(scores, chosen, axis=1)
    if op.attrs["renormalize"]:
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.float32(1e-20))
    weights *= np.float32(op.number("factor"))
    return np.concatenate((chosen.astype(np.float32), weights), axis=1)


def _of_best_groups(op: Op, choice: Matrix, num_groups: int) -> Matrix:
    """`choice`, with minus infinity for experts outside the chosen groups."""
    groups = choice.reshape(len(choice), num_groups, -1)
    sums = np.sort(groups, axis=2)[:, :, -1 if op.number("by_best") else -2 :].sum(axis=2)
    best = np.argsort(-sums, axis=1, kind="stable")[:, : int(op.number("chosen_groups"))]
    allowed = np.zeros(sums.shape, bool)
    np.put_along_axis(allowed, best, True, axis=1)
    return np.where(allowed[:, :, None], groups, np.float32(-np.inf)).reshape(choice.shape)


def _route_by_mixer(op: Op, logits: Matrix) -> Matrix:
    left, places, weights = logits.copy(), [], []
    for _ in range(int(op.number("experts_per_token"))):
        place = left.argmax(axis=1, keepdims=True)
        peak = np.take_along_axis(left, place, axis=1)
        far = (peak - logits) / np.maximum(np.abs(logits), peak) > np.float32(op.number("tolerance"))
        weights.append(1 / np.exp(np.where(far, -np.inf, left) - peak).sum(axis=1, keepdims=True))
        places.append(place)
        np.put_along_axis(left, place, -np.inf, axis=1)
    order = np.argsort(np.hstack(places), axis=1)
    found = [np.take_along_axis(np.hstack(parts), order, axis=1).astype(np.float32) for parts in (places, weights)]
    return np.hstack(found)
