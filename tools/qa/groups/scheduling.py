"""Queues, batches, sequences, ensembles and streams: everything between a request and its model."""

from __future__ import annotations

from collections.abc import Mapping

from tools.qa.group import Group
from tools.qa.models import AddSub, AroundAddSub, Copied, Ensemble, Identity, Repeat, Square

PREFERRED = "preferred_batch_size: [ 4, 8 ]"
WAITING = f"{PREFERRED} max_queue_delay_microseconds: 10000000"
QUEUES: Mapping[str, tuple[str, int]] = {  # test -> dynamic_batching, and the model's milliseconds
    "test_max_queue_size": (f"{PREFERRED} default_queue_policy {{ max_queue_size: 8 }}", 1000),
    "test_policy_delay": (
        f"{WAITING} default_queue_policy {{ timeout_action: DELAY default_timeout_microseconds: 100000 }}",
        0,
    ),
    "test_policy_reject": (f"{WAITING} default_queue_policy {{ default_timeout_microseconds: 100000 }}", 0),
    "test_timeout_override": (
        f"{WAITING} default_queue_policy {{ allow_timeout_override: true default_timeout_microseconds: 1000000 }}",
        0,
    ),
    "test_priority_levels": (f"{WAITING} priority_levels: 2 default_priority_level: 2", 0),
    "test_max_priority_levels": (
        f"{WAITING} priority_levels: {2**64 - 1} default_priority_level: {2**32}",
        0,
    ),
    "test_priority_with_policy": (
        "preferred_batch_size: [ 4, 8, 32 ] max_queue_delay_microseconds: 10000000 priority_levels: 2 "
        "default_priority_level: 2 default_queue_policy { timeout_action: DELAY allow_timeout_override: true "
        "default_timeout_microseconds: 11000000 } priority_queue_policy { key: 2 value: { timeout_action: REJECT "
        "allow_timeout_override: true default_timeout_microseconds: 11000000 } }",
        0,
    ),
}
CACHED = AddSub("onnx_float32_float32_float32", "FP32", [16], max_batch_size=8, versions=(1, 3))


def slow(name: str, max_batch_size: int, text: str) -> Identity:
    return Identity(name, "FP32", [-1], max_batch_size=max_batch_size, delay_ms=6000, text=text)


GROUPS = (
    *(
        Group(
            f"queue_{test.removeprefix('test_')}",
            "qa/L0_model_queue",
            ["model_queue_test.py"],
            [
                Identity(
                    "custom_zero_1_float32",
                    "FP32",
                    [-1],
                    max_batch_size=32,
                    delay_ms=delay_ms,
                    text=f"dynamic_batching {{ {batching} }}",
                ),
                Ensemble("ensemble_zero_1_float32", ["custom_zero_1_float32"], ("INPUT0", "OUTPUT0"), 32, [-1]),
            ],
            select=f"{test} and not {test}_",
        )
        for test, (batching, delay_ms) in QUEUES.items()
    ),
    Group(
        "optional_input",
        "qa/L0_optional_input",
        ["optional_input_test.py"],
        [Copied("qa/L0_optional_input/models")],
        select="not optional_pipeline",  # needs the zeros that the identity backend returns for a missing input
        is_fresh=True,
    ),
    Group("grpc_cancellation", "qa/L0_request_cancellation", ["grpc_cancellation_test.py"],
          [Identity("custom_identity_int32", "INT32", [-1], max_batch_size=1024, delay_ms=10000)],
          select="test_grpc_async_infer or stream_infer or test_aio_grpc_async_infer", is_fresh=True),
    Group(
        "scheduler_cancellation",
        "qa/L0_request_cancellation",
        ["scheduler_test.py"],
        [
            slow("dynamic_batch", 2, "dynamic_batching { max_queue_delay_microseconds: 600000 }"),
            slow("sequence_direct", 1, "sequence_batching { direct { } max_sequence_idle_microseconds: 6000000 }"),
            slow(
                "sequence_oldest",
                1,
                "sequence_batching { oldest { max_candidate_sequences: 1 } max_sequence_idle_microseconds: 6000000 }",
            ),
            Ensemble("ensemble_model", ["dynamic_batch"] * 2, ("INPUT0", "OUTPUT0"), 1, [-1]),
        ],
    ),
    Group(
        "streams",
        "qa/L0_decoupled",
        ["decoupled_test.py"],
        [
            Copied("qa/L0_decoupled/models"),
            Repeat("repeat_int32"),
            Square("square_int32"),
            AddSub("libtorch_nobatch_int32_int32_int32", "INT32", [1], between="__", is_swapped=True),
        ],
        select="DecoupledTest and not NonDecoupled and not multi_many",  # the last one needs a build with delays
    ),
    *(
        Group(
            f"response_cache_{size}",
            "qa/L0_response_cache",
            ["ensemble_cache_test.py"],
            [
                CACHED,
                AroundAddSub(f"simple_{CACHED.name}", CACHED),
            ],
            flags=["--model-control-mode=explicit", "--load-model=*", f"--cache-config=local,size={size}"],
            select=select,
            is_fresh=True,
            repository="models/ensemble_models",
        )
        for size, select in ((1048576, "not insertion_failure"), (200, "insertion_failure"))
    ),
)  # fmt: skip
