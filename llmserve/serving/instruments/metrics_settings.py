"""Settings of `/metrics`: `--metrics-config KEY=VALUE` and `--metrics-interval-ms`, as in tritonserver."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmserve.errors import InvalidArgument, raise_problems

_SWITCHES = ("counter_latencies", "summary_latencies", "histogram_latencies")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_QUANTILES = "summary_quantiles"


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    counter_latencies: bool = True  # nv_inference_*_duration_us
    summary_latencies: bool = False  # nv_inference_*_summary_us
    histogram_latencies: bool = False  # nv_inference_first_response_histogram_ms
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)
    interval_s: float = 2.0  # how long values of the machine are cached
    shows_cpu: bool = True
    shows_gpu: bool = True


DEFAULT_METRICS = MetricsSettings()


def parse_metrics_config(texts: Iterable[str], *, interval_ms: float, cpu: bool, gpu: bool) -> MetricsSettings:
    """Parse the settings. Raises `InvalidArgument` with all problems."""
    switches: dict[str, bool] = {}
    quantiles = DEFAULT_METRICS.quantiles
    problems = []
    for text in texts:
        key, _, value = text.partition("=")
        if key in _SWITCHES and value.lower() in _BOOLEANS:
            switches[key] = _BOOLEANS[value.lower()]
        elif key in _SWITCHES:
            problems.append(f"{text}: expected {key}=true or {key}=false")
        elif key == _QUANTILES:
            try:
                quantiles = _parse_quantiles(value)
            except ValueError:
                problems.append(f"{text}: expected {key}=QUANTILE:ERROR,..., such as {key}=0.5:0.05,0.99:0.001")
        else:
            problems.append(f"{text}: unknown setting '{key}'; known: {', '.join((*_SWITCHES, _QUANTILES))}")
    raise_problems(InvalidArgument, "--metrics-config", problems)
    return MetricsSettings(**switches, quantiles=quantiles, interval_s=interval_ms / 1000, shows_cpu=cpu, shows_gpu=gpu)


def _parse_quantiles(text: str) -> tuple[float, ...]:
    """The allowed error of each quantile is checked but not used: all of ours are within 1 % of the value."""
    pairs = [tuple(map(float, pair.split(":"))) for pair in text.split(",")]
    if any(len(pair) != 2 or not (0 <= pair[0] <= 1 and 0 <= pair[1] <= 1) for pair in pairs):
        raise ValueError(text)
    return tuple(pair[0] for pair in pairs)
