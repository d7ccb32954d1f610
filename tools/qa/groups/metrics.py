"""The metrics port: `L0_metrics`."""

from __future__ import annotations

from tools.qa.group import Group
from tools.qa.models import Copied, Ensemble, Identity

FOLDER = "qa/L0_metrics"
CONFIG_TEST = "metrics_config_test.py"
EXPLICIT = "--model-control-mode=explicit"
WITHOUT_CACHE = "cache_counters_missing or cache_summaries_missing"
CONFIGS = {  # case -> flags, and its tests
    "default": ([], f"inf_counters_exist or inf_summaries_missing or {WITHOUT_CACHE} or pinned_memory"),
    "summaries": (
        ["--metrics-config=summary_latencies=true"],
        f"inf_counters_exist or (inf_summaries_exist and not with_cache) or {WITHOUT_CACHE}",
    ),
    "no_counters": (
        ["--metrics-config=summary_latencies=true", "--metrics-config=counter_latencies=false"],
        f"inf_counters_missing or (inf_summaries_exist and not with_cache) or {WITHOUT_CACHE}",
    ),
    "cache": (
        [
            "--cache-config=local,size=1048576",
            "--metrics-config=summary_latencies=true",
            "--metrics-config=counter_latencies=true",
        ],
        "inf_counters_exist or inf_summaries_exist_with_cache or cache_counters_exist or cache_summaries_exist",
    ),
    "quantiles": (
        [
            "--metrics-config=summary_latencies=true",
            "--metrics-config=summary_quantiles=0.1:0.01,0.7:0.01,0.75:0.01",
        ],
        "summaries_custom_quantiles",
    ),
}
DELAYED = "dynamic_batching { max_queue_delay_microseconds: 4000000 }"
SEQUENCES = "sequence_batching {{ max_sequence_idle_microseconds: 60000000 {} }}"


def queueing(name: str, text: str, delay_ms: int = 2000) -> Identity:
    return Identity(name, "FP32", [1], max_batch_size=4, delay_ms=delay_ms, text=text)


GROUPS = (
    Group(
        "metrics_queue_size",
        FOLDER,
        ["metrics_queue_size_test.py"],
        [
            queueing("default", ""),
            queueing("dynamic", DELAYED),
            queueing("max_queue_size", DELAYED.replace(" }", " default_queue_policy { max_queue_size: 4 } }")),
            queueing(
                "sequence_direct",
                SEQUENCES.format("direct { max_queue_delay_microseconds: 4000000 minimum_slot_utilization: 1.0 }"),
            ),
            queueing(
                "sequence_oldest",
                SEQUENCES.format("oldest { max_candidate_sequences: 4 max_queue_delay_microseconds: 4000000 }"),
            ),
            queueing("dynamic_composing", DELAYED, delay_ms=500),
            queueing("default_composing", ""),
            Ensemble("ensemble", ["dynamic_composing", "default_composing"]),
        ],
    ),
    *(
        Group(
            f"metrics_config_{case}",
            FOLDER,
            [CONFIG_TEST],
            [Copied(f"{FOLDER}/unit_test_models")],
            flags=[EXPLICIT, f"--load-model=identity_cache_{'on' if case == 'cache' else 'off'}", *flags],
            environment={"SUMMARY_QUANTILES": "0.1:0.01,0.7:0.01,0.75:0.01"},
            select=select,
            known={"test_inf_summaries_exist_with_cache": "requests of a model with a cache are summarized, too"},
        )
        for case, (flags, select) in CONFIGS.items()
    ),
)
