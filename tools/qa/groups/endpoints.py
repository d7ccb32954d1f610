"""HTTP, gRPC and their settings and statistics: `L0_http`, `L0_grpc`, `L0_trace` and others."""

from __future__ import annotations

from tools.qa.group import Group
from tools.qa.models import AddSub, Copied, Identity

NO_SUCH_LIMIT = "a limit of releases after 24.10, which llmserve words otherwise"
SIMPLE = AddSub("simple", "INT32", [16], max_batch_size=8)
EXAMPLES = tuple(
    Identity(name, "INT32", [16], max_batch_size=8)
    for name in ("simple_dyna_sequence", "simple_identity", "simple_int8", "simple_sequence", "simple_string", "vision")
)  # as many models as in the client's examples
FORWARDED = {
    "test_params": [],
    "test_headers": ["--grpc-header-forward-pattern=my_header.*", "--http-header-forward-pattern=my_header.*"],
    "test_header_forward_pattern_case_insensitive": [
        "--grpc-header-forward-pattern=MY_HEADER.*",
        "--http-header-forward-pattern=MY_HEADER.*",
    ],
    "test_grpc_header_forward_pattern_case_sensitive": ["--grpc-header-forward-pattern=(?-i)MY_HEADER.*"],
}
GROUPS = (
    Group("input_validation", "qa/L0_input_validation", ["input_validation_test.py"],
          [Copied("qa/L0_input_validation/models"), Identity("pt_identity", "FP32", [8], max_batch_size=8)]),
    Group("generate", "qa/L0_http", ["generate_endpoint_test.py", "generate_error_status_test.py"],
          [Copied("qa/L0_http/generate_models", "qa/python_models/generate_models")],
          known={"test_model_error_status": "the model of 24.10 knows no ERROR_CODE"}),
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
    Group("http_aio", "qa/L0_http", ["python_http_aio_test.py"], [SIMPLE, *EXAMPLES],
          own_flags=["--id=triton", "--allow-client-shm"]),
    Group(
        "http_restricted",
        "qa/L0_http",
        ["http_restricted_api_test.py"],
        [SIMPLE],
        flags=[
            "--http-restricted-api=model-repository:admin-key=admin-value",
            "--http-restricted-api=inference:infer-key=infer-value",
        ],
    ),
    Group("grpc_aio", "qa/L0_grpc", ["python_grpc_aio_test.py"],
          [SIMPLE, *EXAMPLES, Identity("another", "INT32", [16], max_batch_size=8)],
          own_flags=["--id=triton", "--allow-client-shm"], known={"test_register_cuda_shared_memory": "wants a GPU"}),
    Group("grpc_client_plugin", "qa/L0_grpc", ["grpc_client_plugin_test.py"],
          [Copied("qa/L0_grpc/client_plugin_models", "qa/L0_grpc/models")],
          flags=["--http-header-forward-pattern=.*", "--grpc-header-forward-pattern=.*"]),
    Group("client_timeout", "qa/L0_client_timeout", ["client_infer_timeout_test.py", "client_timeout_test.py"],
          [Identity("custom_identity_int32", "INT32", [-1], max_batch_size=1, delay_ms=3000)]),
    *(
        Group(
            f"parameters_{case}",
            "qa/L0_parameters",
            ["parameters_test.py"],
            [Copied("qa/L0_parameters/model_repository")],
            flags=flags,
            environment={"TEST_HEADER": case},
        )
        for case, flags in FORWARDED.items()
    ),
    Group("logging", "qa/L0_logging", ["logging_endpoint_test.py"], [SIMPLE]),
    Group(
        "trace",
        "qa/L0_trace",
        ["trace_endpoint_test.py"],
        [SIMPLE],
        flags=[
            "--trace-config=triton,file=global_unittest.log",
            "--trace-config=level=TIMESTAMPS",
            "--trace-config=rate=1",
        ],
    ),
    *(
        Group(
            f"shared_memory_{protocol}",
            "qa/L0_shared_memory",
            ["shared_memory_test.py"],
            [SIMPLE],
            own_flags=["--allow-client-shm"],
            environment={"CLIENT_TYPE": protocol},
            select="not invalid_create and not client_leak",  # these test only the client
            is_fresh=True,
        )
        for protocol in ("http", "grpc")
    ),
)  # fmt: skip
