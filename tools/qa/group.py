"""Which of Triton's tests are run, on which models, and which of them are known to end otherwise than they want."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tools.qa.models import (
    Copied,
    Ensemble,
    Identity,
    Model,
    ResponseSenders,
)

NO_SUCH_LIMIT = "a limit of releases after 24.10, which llmserve words otherwise"


@dataclass(frozen=True)
class Group:
    """Test files of one folder that want the same models."""

    name: str
    folder: str  # in the clone of server
    files: Sequence[str]  # those of them that the release has are run
    models: Sequence[Model]
    flags: Sequence[str] = ()
    log: str = "server.log"  # which some tests read
    known: Mapping[str, str] = field(default_factory=dict)  # test -> why llmserve fails it


def queueing(name: str, text: str, delay_ms: int = 2000) -> Identity:
    return Identity(name, "FP32", [1], max_batch_size=4, delay_ms=delay_ms, text=text)


DELAYED = "dynamic_batching { max_queue_delay_microseconds: 4000000 }"
SEQUENCES = "sequence_batching {{ max_sequence_idle_microseconds: 60000000 {} }}"
GROUPS = (
    Group(
        "input_validation",
        "qa/L0_input_validation",
        ["input_validation_test.py"],
        [Copied("qa/L0_input_validation/models"), Identity("pt_identity", "FP32", [8], max_batch_size=8)],
    ),
    Group(
        "generate",
        "qa/L0_http",
        ["generate_endpoint_test.py", "generate_error_status_test.py"],
        [Copied("qa/L0_http/generate_models", "qa/python_models/generate_models")],
        known={"test_model_error_status": "the model of 24.10 knows no ERROR_CODE"},
    ),
    Group(
        "http_test",
        "qa/L0_http",
        ["http_test.py"],
        [
            *(
                model
                for framework in ("onnx", "savedmodel")
                for model in (
                    Identity(f"{framework}_zero_1_float32", "FP32", [-1], max_batch_size=8),
                    Identity(f"{framework}_zero_1_object_1_element", "STRING", [1], max_batch_size=8),
                    Identity(f"{framework}_zero_1_object", "STRING", [-1], max_batch_size=8),
                    Identity(f"{framework}_zero_1_float16", "FP16", [-1, -1], max_batch_size=8),
                    Identity(f"{framework}_zero_3_float32", "FP32", [-1], max_batch_size=8, count=3),
                    Identity(
                        f"{framework}_zero_1_float32_queue",
                        "FP32",
                        [-1],
                        max_batch_size=32,
                        text="dynamic_batching { max_queue_delay_microseconds: 1000000 preferred_batch_size: [ 8 ] "
                        "default_queue_policy { max_queue_size: 1 } }",
                    ),
                )
            ),
            Identity("simple_identity", "STRING", [-1], max_batch_size=8),
            Identity("simple_identity_int64", "INT64", [-1], max_batch_size=8),
        ],
        flags=["--model-control-mode=explicit", "--load-model=*"],
        known={
            "test_buffer_size_overflow": NO_SUCH_LIMIT,
            "test_loading_large_invalid_model": NO_SUCH_LIMIT,
            "test_duplicate_output_names": "24.10 answers such an output once, and so does llmserve",
            "test_content_encoding_chunked_manually": "the length of a body is not said in two ways: so requests are "
            "smuggled past proxies",
        },
    ),
    Group(
        "client_timeout",
        "qa/L0_client_timeout",
        ["client_infer_timeout_test.py", "client_timeout_test.py"],
        [Identity("custom_identity_int32", "INT32", [-1], max_batch_size=1, delay_ms=3000)],
    ),
    Group(
        "response_sender",
        "qa/L0_backend_python/response_sender",
        ["response_sender_test.py"],
        [ResponseSenders("qa/python_models/response_sender")],
    ),
    Group(
        "metrics_queue_size",
        "qa/L0_metrics",
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
)
