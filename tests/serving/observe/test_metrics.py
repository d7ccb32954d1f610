"""What `/metrics` shows beyond counters: summaries, histograms, the cache, GPUs; and what dashboards ask of it."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.errors import InvalidArgument
from llmserve.serving.core import InferenceCore
from llmserve.serving.instruments.latencies import Histogram, Summary
from llmserve.serving.instruments.metrics_settings import MetricsSettings, parse_metrics_config
from llmserve.serving.observe.gpu import Gpus
from llmserve.serving.observe.machine import MachineSampler
from llmserve.serving.settings import ControlMode
from tests.serving.models import collect, floats, identity_config, request, serving, single, write_model

# The expressions of the public dashboards for Triton, without what depends on how they are scraped.
DASHBOARD_QUERIES = (
    "sum(rate(nv_inference_request_success{model=~'$model'}[1m])) by (model, version)",
    "sum(increase(nv_inference_request_failure{reason='BACKEND'}[1m])) by (model)",
    "rate(nv_inference_count[1m]) / rate(nv_inference_exec_count[1m])",
    "avg(rate(nv_inference_queue_duration_us[30s]) / (1 + rate(nv_inference_request_success[30s])))",
    "rate(nv_inference_request_duration_us[1m]) / rate(nv_inference_request_success[1m]) / 1000",
    "sum(rate(nv_inference_compute_input_duration_us[1m])) by (model) / 1000",
    "sum(rate(nv_inference_compute_infer_duration_us[1m])) by (model) / 1000",
    "sum(rate(nv_inference_compute_output_duration_us[1m])) by (model) / 1000",
    "nv_inference_pending_request_count{version='1'}",
    "nv_cpu_utilization * 100",
    "nv_cpu_memory_used_bytes / nv_cpu_memory_total_bytes",
    "nv_pinned_memory_pool_used_bytes / nv_pinned_memory_pool_total_bytes",
    "nv_inference_request_summary_us{quantile='0.99'}",
    "histogram_quantile(0.9, rate(nv_inference_first_response_histogram_ms_bucket{le='500'}[1m]))",
    "nv_cache_num_hits_per_model{model=~'.*'} / nv_cache_num_misses_per_model",
    "nv_cache_util",
)
EVERYTHING = MetricsSettings(summary_latencies=True, histogram_latencies=True)
ENSEMBLE = identity_config(
    'ensemble_scheduling { step { model_name: "m" model_version: -1 input_map { key: "X" value: "X" } '
    'output_map { key: "Y" value: "Y" } } }'
).replace('backend: "identity"', 'platform: "ensemble"')
DECOUPLED = "model_transaction_policy { decoupled: true }"


def samples(core: InferenceCore) -> dict[str, float]:
    lines = [line for line in core.metrics_text().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_summaries(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config("parameters { key: 'execute_delay_ms' value { string_value: '20' } }"))
    settings = MetricsSettings(summary_latencies=True, counter_latencies=False, quantiles=(0.5, 0.99))
    async with serving(tmp_path, metrics=settings) as core:
        before = samples(core)
        for _ in range(3):
            await single(core, request("m", floats(1)))
        after = samples(core)
    name = "nv_inference_compute_infer_summary_us"
    assert math.isnan(before[f'{name}{{model="m",version="1",quantile="0.5"}}'])
    assert after[f'{name}_count{{model="m",version="1"}}'] == 3
    assert 20_000 <= after[f'{name}{{model="m",version="1",quantile="0.99"}}'] * 1.02 < 2_000_000
    assert after[f'{name}_sum{{model="m",version="1"}}'] >= 60_000
    quantiles = {match[1] for sample in after if (match := re.search('quantile="(.*)"', sample))}
    assert quantiles == {"0.5", "0.99"}
    assert not any("_duration_us" in sample for sample in after)


def test_quantiles_are_within_a_hundredth_and_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    summary = Summary()
    for value in range(1, 10_001):
        summary.observe(value)
    for quantile, found in zip((0.01, 0.5, 0.999), summary.quantiles((0.01, 0.5, 0.999)), strict=True):
        assert found == pytest.approx(quantile * 10_000, rel=0.011)
    now += 30
    summary.observe(0)
    assert summary.quantiles((0.0,)) == [0.0]
    now += 45
    assert summary.quantiles((1.0,)) == [0.0]
    now += 20
    assert math.isnan(summary.quantiles((0.5,))[0])
    assert (summary.count, summary.total) == (10_001, 10_000 * 10_001 // 2)


def test_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((500, 100))
    for value in (1, 100, 101, 5000):
        histogram.observe(value)
    assert histogram.cumulative() == [(100, 2), (500, 3), (math.inf, 4)]
    assert histogram.total == 5202


async def test_first_responses_of_decoupled_models(tmp_path: Path) -> None:
    code = (
        "import time\nclass TritonPythonModel:\n    def execute(self, requests):\n"
        "        sender, (x,) = requests[0].get_response_sender(), requests[0].inputs()\n"
        "        for _ in range(3):\n            time.sleep(0.03)\n"
        "            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('Y', x.as_numpy())]))\n"
        "        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n"
    )
    buckets = (
        'model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" } '
        "histogram_options { buckets: [ 1, 2000.5 ] } } }"
    )
    config = identity_config(DECOUPLED).replace('"identity"', '"python"')
    write_model(tmp_path, "usual", config, code)
    write_model(tmp_path, "own", config + buckets, code)
    write_model(tmp_path, "unary", identity_config())
    async with serving(tmp_path, metrics=EVERYTHING) as core:
        for name in ("usual", "own", "unary"):
            await collect(core, request(name, floats(1)))
        found = {name: value for name, value in samples(core).items() if "first_response" in name}
    family = "nv_inference_first_response_histogram_ms"
    assert found[f'{family}_count{{model="usual",version="1"}}'] == 1
    assert 30 <= found[f'{family}_sum{{model="usual",version="1"}}'] < 2000
    assert [re.findall('le="(.*)"', name) for name in found if "_bucket" in name and "usual" in name] == [
        ["100"], ["500"], ["2000"], ["5000"], ["+Inf"],
    ]  # fmt: skip
    assert found[f'{family}_bucket{{model="own",version="1",le="1"}}'] == 0
    assert found[f'{family}_bucket{{model="own",version="1",le="2000.5"}}'] == 1
    assert not any("unary" in name for name in found)


async def test_load_times(tmp_path: Path) -> None:
    wait = "import time\nclass TritonPythonModel:\n    def initialize(self, args):\n        time.sleep(0.2)\n"
    write_model(
        tmp_path,
        "m",
        identity_config().replace('"identity"', '"python"'),
        wait + "    def execute(self, requests):\n        pass\n",
    )
    write_model(tmp_path, "e", ENSEMBLE)
    async with serving(tmp_path, control_mode=ControlMode.EXPLICIT, load_at_start=("e",)) as core:
        before = samples(core)
        await core.load_model("m")  # nothing has changed
        after = samples(core)
        await core.unload_model("e")
        await core.unload_model("m")
        unloaded = samples(core)
    of_model, of_ensemble = (f'nv_model_load_duration_secs{{model="{name}",version="1"}}' for name in "me")
    assert before[of_model] >= 0.2
    assert before[of_ensemble] == 0
    assert (after[of_model], after[of_ensemble]) == (before[of_model], 0)
    assert not {of_model, of_ensemble} & unloaded.keys()


async def test_metric_tags_are_labels_of_all_families(tmp_path: Path) -> None:
    tags = "".join(
        f"metric_tags {{ key: '{key}' value: '{value}' }}"
        for key, value in {"team": 'n"lp', "0": "zero", "cost-center": "7", "_x": "y", "": "z"}.items()
    )
    write_model(tmp_path, "m", identity_config(tags + "response_cache { enable: true }"))
    write_model(tmp_path, "plain", identity_config())
    async with serving(tmp_path, cache_bytes=100_000, metrics=EVERYTHING) as core:
        await collect(core, request("m", floats(1)))
        found = samples(core)
    labels = '_0="zero",_team="n\\"lp",model="m",'
    of_model = {name for name in found if 'model="m"' in name}
    assert [name for name in of_model if f"{{{labels}" not in name] == []
    assert {name.split("{")[0] for name in of_model} >= {
        "nv_inference_request_success", "nv_inference_request_summary_us", "nv_model_load_duration_secs",
        "nv_cache_num_misses_per_model",
    }  # fmt: skip
    assert not any("_team" in name for name in found.keys() - of_model)


async def test_response_cache(tmp_path: Path) -> None:
    write_model(tmp_path, "cached", identity_config("response_cache { enable: true }"))
    write_model(tmp_path, "plain", identity_config())
    async with serving(tmp_path, cache_bytes=100_000, metrics=EVERYTHING) as core:
        for value in (1, 1, 2):
            await single(core, request("cached", floats(value)))
        found = samples(core)
    assert found['nv_cache_num_hits_per_model{model="cached",version="1"}'] == 1
    assert found['nv_cache_num_misses_per_model{model="cached",version="1"}'] == 2
    assert (found["nv_cache_num_lookups"], found["nv_cache_num_hits"], found["nv_cache_num_entries"]) == (3, 1, 2)
    assert 0 < found["nv_cache_util"] < 1
    assert not any("plain" in name and "nv_cache" in name for name in found)
    assert found['nv_inference_compute_infer_summary_us_count{model="cached",version="1"}'] == 2
    assert found['nv_inference_request_summary_us_count{model="cached",version="1"}'] == 3
    assert found['nv_cache_hit_summary_per_model_count{model="cached",version="1"}'] == 1
    assert found['nv_cache_miss_summary_per_model_count{model="cached",version="1"}'] == 2
    assert 'nv_cache_miss_summary_per_model{model="cached",version="1",quantile="0.5"}' in found


async def test_dashboards_find_their_series(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config("response_cache { enable: true }"))
    write_model(tmp_path, "d", identity_config(DECOUPLED))
    async with serving(tmp_path, cache_bytes=100_000, metrics=EVERYTHING) as core:
        found = samples(core)
    for query in DASHBOARD_QUERIES:
        for name, _, wanted in re.findall(r"(nv_\w+)({([^}]*)})?", query):
            series = [sample for sample in found if sample.partition("{")[0] == name]
            exact = [each.replace("'", '"') for each in wanted.split(",") if each and "=~" not in each]
            assert any(all(each in sample for each in exact) for sample in series), (query, name)


def test_settings() -> None:
    given = ["summary_latencies=true", "counter_latencies=0", "summary_quantiles=0.5:0.05,0.99:0.001"]
    assert parse_metrics_config(given, interval_ms=500, cpu=True, gpu=False) == MetricsSettings(
        counter_latencies=False, summary_latencies=True, quantiles=(0.5, 0.99), interval_s=0.5, shows_gpu=False
    )
    wrong = ["summary_latencies=maybe", "summary_quantiles=2:1", "colour=blue", "summary_quantiles=0.5"]
    with pytest.raises(InvalidArgument) as caught:
        parse_metrics_config(wrong, interval_ms=500, cpu=True, gpu=True)
    assert all(text in str(caught.value) for text in wrong)
    assert "unknown setting 'colour'" in str(caught.value)


def test_the_machine_is_read_once_in_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = MachineSampler(3600, gpu=False)
    assert sampler.samples() is sampler.samples()
    assert MachineSampler(0, cpu=False, gpu=False).samples() == []


class FakeNvml:
    """One GPU, which does not tell its power limit."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.energy = 5000

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": b"GPU-1",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=100, used=25),
            "nvmlDeviceGetPowerUsage": 70_000,
            "nvmlDeviceGetTotalEnergyConsumption": self.energy,
        }

        def call(*_: Any) -> Any:
            if name not in answers:
                raise self.NVMLError(name)
            return answers[name]

        return call


def test_gpus_tell_what_they_know() -> None:
    nvml = FakeNvml()
    gpus = Gpus(nvml)
    nvml.energy += 2500
    assert {name: value for name, _, value in gpus.samples()} == {
        "nv_gpu_utilization": 0.5,
        "nv_gpu_memory_total_bytes": 100,
        "nv_gpu_memory_used_bytes": 25,
        "nv_gpu_power_usage": 70.0,
        "nv_energy_consumption": 2.5,
    }
    assert all(labels == {"gpu_uuid": "GPU-1"} for _, labels, _ in gpus.samples())
