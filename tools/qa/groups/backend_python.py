"""The Python backend: `L0_backend_python`. Tests that need torch, a GPU or the backend's C library are left out."""

from __future__ import annotations

from tools.qa.group import Group
from tools.qa.models import Copied, PythonModel, ResponseSenders, Square

FOLDER = "qa/L0_backend_python"
IDENTITY = PythonModel("identity_fp32")
EXPLICIT = "--model-control-mode=explicit"
# Runs it in its own process, where libraries know it as `model`; in llmserve's threads, with many models, they do not
ALONE = 'parameters { key: "EXECUTION_MODE" value { string_value: "process" } }'


def identity_of(datatype: str, name: str, text: str = "", **changes: str) -> PythonModel:
    return PythonModel(name, "identity_fp32", {"TYPE_FP32": f"TYPE_{datatype}", **changes}, text)


def unit_tests(name: str, *others: PythonModel, flags: tuple[str, ...] = (), known: str = "") -> Group:
    """Tests that a model runs inside itself for a request. `known`: why they fail."""
    return Group(
        name,
        FOLDER,
        ["python_unittest.py"],
        [PythonModel(name, text=ALONE), *others],
        flags=flags,
        environment={"MODEL_NAME": name},
        known={"test_python_unittest": known} if known else {},
    )


GROUPS = (
    Group(
        "python",
        FOLDER,
        ["python_test.py"],
        [
            IDENTITY,
            identity_of(
                "UINT8",
                "identity_uint8",
                "dynamic_batching { preferred_batch_size: [8], max_queue_delay_microseconds: 12000000 }",
                **{"max_batch_size: 64": "max_batch_size: 8"},
            ),
            identity_of("BOOL", "identity_bool"),
            PythonModel("init_args"),
            PythonModel("optional"),
            PythonModel("non_contiguous"),
            PythonModel("string"),
            PythonModel("string_fixed"),
        ],
        select="not growth_error and not pytorch",  # of a shared memory that only Triton's backend has; torch
    ),
    Group(
        "lifecycle",
        f"{FOLDER}/lifecycle",
        ["lifecycle_test.py"],
        [
            PythonModel("error_code"),
            PythonModel("execute_cancel"),
            PythonModel(
                "execute_error",
                changes={"max_batch_size: 64": "max_batch_size: 8"},
                text="dynamic_batching { preferred_batch_size: [8], max_queue_delay_microseconds: 12000000 }",
            ),
            PythonModel("execute_return_error"),
            PythonModel("wrong_model", changes={"TYPE_FP32": "TYPE_UINT32"}),
        ],
        log="lifecycle_server.log",
    ),
    Group(
        "decoupled",
        f"{FOLDER}/decoupled",
        ["decoupled_test.py"],
        [
            Copied(f"{FOLDER}/decoupled/models", without=("decoupled_bls",)),
            IDENTITY,
            PythonModel("execute_cancel", text="model_transaction_policy { decoupled: True }"),
            Square("square_int32"),
        ],
        select="not test_decoupled_bls or stream",  # the other one needs torch
        log="decoupled_server.log",
        known={"test_decoupled_return_response_error": "24.10 says before it which model failed, and so does llmserve"},
    ),
    Group("response_sender", f"{FOLDER}/response_sender", ["response_sender_test.py"],
          [ResponseSenders("qa/python_models/response_sender")]),
    Group("async_execute", f"{FOLDER}/async_execute", ["concurrency_test.py"],
          [PythonModel("async_execute_decouple"), PythonModel("async_execute_decouple_bls")],
          environment={"SERVER_LOG": "concurrency_test.server.log"}, log="concurrency_test.server.log"),
    Group("bls_parameters", f"{FOLDER}/bls", ["bls_parameters_test.py"], [PythonModel("bls_parameters")]),
    Group("model_control", f"{FOLDER}/model_control", ["model_control_test.py"],
          [IDENTITY, PythonModel("simple_identity_fp32"), PythonModel("auto_complete_error")], flags=[EXPLICIT]),
    Group("ensemble", f"{FOLDER}/ensemble", ["ensemble_test.py"],
          [PythonModel("ensemble"), PythonModel("add_sub_1", "add_sub"), PythonModel("add_sub_2", "add_sub")],
          select="not gpu"),
    Group("request_rescheduling", f"{FOLDER}/request_rescheduling", ["grpc_endpoint_test.py"],
          [PythonModel("iterative_sequence"), PythonModel("request_rescheduling_addsub")],
          flags=[EXPLICIT, "--load-model=*"]),
    unit_tests(
        "bls_request_rescheduling",
        PythonModel("wrong_return_type"),
        PythonModel("iterative_sequence"),
        PythonModel("request_rescheduling_addsub"),
        flags=(EXPLICIT, "--load-model=*"),
    ),
    unit_tests("custom_metrics", known="one of eight: a metric can be used when its family has been deleted"),
    Group("argument_validation", FOLDER, ["python_unittest.py"],
          [Copied(f'{FOLDER}/argument_validation/models', text=ALONE)],
          environment={"MODEL_NAME": "argument_validation"}),
)  # fmt: skip
