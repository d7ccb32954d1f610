"""What both servers count: statistics and metrics, as differences over a few requests."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.compat.cases import binary, http, streams
from tests.compat.observe import Case, Json, http_call, metrics
from tools.servers import Endpoint

PARTS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
COUNTERS = tuple(f"nv_inference_{name}" for name in ("request_success", "request_failure", "count", "exec_count"))
SETTLED_S = 0.4  # until what earlier requests have left behind, and the end of an answered one, is counted


def counts(endpoint: Endpoint, model: str) -> dict[str, int]:
    (stats,) = http_call(endpoint, "GET", f"/v2/models/{model}/stats")["body"]["model_stats"]
    counted: dict[str, int] = {name: stats[name] for name in ("inference_count", "execution_count")}
    counted |= {part: stats["inference_stats"][part]["count"] for part in PARTS}
    for batch in stats["batch_stats"]:
        for part in ("compute_input", "compute_infer", "compute_output"):
            counted[f"batch {batch['batch_size']} {part}"] = batch[part]["count"]
    return counted


def grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    differences = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: value for name, value in sorted(differences.items()) if value}


def settle(model: str) -> None:
    time.sleep(SETTLED_S if model in ("repeat", "stream") else 0)


def counted(model: str, *requests: Callable[[Endpoint], Json]) -> Case:
    def run(endpoint: Endpoint) -> Json:
        settle(model)
        before = counts(endpoint, model)
        for request in requests:
            request(endpoint)
        settle(model)
        return grown(before, counts(endpoint, model))

    return Case(run)


def measured(model: str, *requests: Callable[[Endpoint], Json]) -> Case:
    """The counters of `/metrics` that grow; labels in alphabetical order, as either server may have them."""

    def counters(endpoint: Endpoint) -> dict[str, float]:
        return {
            f"{name} {','.join(sorted(labels.rstrip('}').split(',')))}": value
            for sample, value in metrics(endpoint).items()
            for name, _, labels in (sample.partition("{"),)
            if name in COUNTERS and f'model="{model}"' in labels
        }

    def run(endpoint: Endpoint) -> Json:
        settle(model)
        before = counters(endpoint)
        for request in requests:
            request(endpoint)
        settle(model)
        return grown(before, counters(endpoint))

    return Case(run)


def duration_samples(endpoint: Endpoint) -> Json:
    http.INFER["two inputs"].run(endpoint)
    return sorted(
        f"{name}{'' if value else ' = 0'}"
        for name, value in metrics(endpoint).items()
        if "duration_us" in name and 'model="add_sub"' in name
    )


def labels(endpoint: Endpoint) -> Json:
    """In the order in which they are written."""
    http.FAILURES["a model that raises"].run(endpoint)
    found = (name.partition("{") for name in metrics(endpoint) if 'model="fail"' in name)
    return sorted({",".join(re.sub('=".*?"', "", text.rstrip("}")).split(",")) for _, _, text in found})


def members(endpoint: Endpoint) -> Json:
    (stats,) = http_call(endpoint, "GET", "/v2/models/twice/stats")["body"]["model_stats"]
    return {"all": sorted(stats), "inference_stats": sorted(stats["inference_stats"])}


def machine(endpoint: Endpoint) -> Json:
    return sorted(name for name in metrics(endpoint) if "{" not in name)


def metrics_port(path: str) -> Callable[[Endpoint], Json]:
    def run(endpoint: Endpoint) -> Json:
        answer = http_call(Endpoint(endpoint.repository, endpoint.metrics_port, 0, 0, 0), "GET", path)
        return {key: answer.get(key) for key in ("status", "type")} | {"is empty": not answer["body"]}

    return run


TWO = (http.INFER["two inputs"].run, http.INFER["a batch of two"].run)
WRONG = (http.ERRORS["a missing input"].run, http.ERRORS["too few elements"].run, binary.ERRORS["too little data"].run)
RAISES = http.FAILURES["a model that raises"].run
CASES: Mapping[str, Case] = {
    "members": Case(members),
    "requests and batches": counted("add_sub", *TWO),
    "an ensemble": counted("ensemble", http.INFER["an ensemble"].run),
    "the step of an ensemble": counted("add_sub", http.INFER["an ensemble"].run),
    "requests that do not fit": counted("add_sub", *WRONG),
    "a model that raises": counted("fail", RAISES),
    "a model that answers an error": counted("fail", http.FAILURES["a model that answers INTERNAL"].run),
    "a decoupled model": counted("repeat", streams.STREAMS["three responses"].run),
    "a decoupled model without a response": counted("repeat", streams.STREAMS["no response"].run),
    "a decoupled model that raises": counted("repeat", streams.STREAMS["a model that raises"].run),
    "a decoupled ensemble": counted("stream", streams.GENERATE["events of an ensemble"].run),
    "metrics of requests": measured("add_sub", *TWO),
    "metrics of an ensemble": measured("ensemble", http.INFER["an ensemble"].run),
    "metrics of requests that do not fit": measured("add_sub", *WRONG),
    "metrics of a model that raises": measured("fail", RAISES),
    "metrics of a decoupled model": measured("repeat", streams.STREAMS["three responses"].run),
    "metrics of a decoupled model that raises": measured("repeat", streams.STREAMS["a model that raises"].run),
    "metrics of an ensemble that fails": measured("stream", streams.STREAMS["an ensemble whose first step raises"].run),
    "labels": Case(labels),
    "names of durations": Case(duration_samples),
    "names of the machine's metrics": Case(machine),
    "the port of metrics": Case(metrics_port("/metrics")),
    "other paths of the port of metrics": Case(metrics_port("/nope")),
}
