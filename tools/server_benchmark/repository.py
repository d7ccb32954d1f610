"""The models of both servers, as files: Python models that compute nothing, so that only serving is measured."""

from __future__ import annotations

from pathlib import Path

TOKENS = 128  # of one stream
SLEEP_MS = 5  # per execution of the slow models, for any batch

IDENTITY = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())]) for request in requests
        ]
"""
# Like IDENTITY, declared as in docs/backends.md. A real Triton ignores that.
BRIEF_IDENTITY = IDENTITY.replace("    def execute", "    llmserve_inline_bytes = 1024\n\n    def execute")
SLOW = f"""
import time

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({SLEEP_MS / 1000})
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())]) for request in requests
        ]
"""
PREPROCESSING = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().item()
            ids = np.frombuffer(text, np.uint8).astype(np.int32)[None]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("IDS", ids)]))
        return answers
"""
TOKENS_MODEL = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().item()
            sender = request.get_response_sender()
            for index in range(count):
                token = pb_utils.Tensor("TOKEN", np.array([[index % 26]], dtype=np.int32))
                sender.send(pb_utils.InferenceResponse([token]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
POSTPROCESSING = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            token = pb_utils.get_input_tensor_by_name(request, "TOKEN").as_numpy().item()
            text = np.array([[chr(97 + token)]], dtype=object)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)]))
        return answers
"""
PYTHON = 'backend: "python"\n'
X, Y = 'name: "X" data_type: TYPE_FP32 dims: [ 16 ]', 'name: "Y" data_type: TYPE_FP32 dims: [ 16 ]'
VECTOR = f"input {{ {X} }} output {{ {Y} }}\n"
BATCHING = "dynamic_batching { }\n"
TEXT_IN = 'input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }\n'
COUNT_IN = 'input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }\n'
IDS, TOKEN = 'name: "IDS" data_type: TYPE_INT32 dims: [ -1 ]', 'name: "TOKEN" data_type: TYPE_INT32 dims: [ 1 ]'
OUT = 'output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }\n'
ENSEMBLE = f"""
platform: "ensemble" max_batch_size: 64
{TEXT_IN} {COUNT_IN} {OUT}
ensemble_scheduling {{
  step {{
    model_name: "preprocessing" model_version: -1
    input_map {{ key: "TEXT" value: "TEXT" }} output_map {{ key: "IDS" value: "ids" }}
  }}
  step {{
    model_name: "tokens" model_version: -1
    input_map {{ key: "IDS" value: "ids" }} input_map {{ key: "COUNT" value: "COUNT" }}
    output_map {{ key: "TOKEN" value: "token" }}
  }}
  step {{
    model_name: "postprocessing" model_version: -1
    input_map {{ key: "TOKEN" value: "token" }} output_map {{ key: "OUT" value: "OUT" }}
  }}
}}
"""


def instances(count: int) -> str:
    return f"instance_group {{ count: {count} kind: KIND_CPU }}\n"


MODELS = {
    "identity": (PYTHON + "max_batch_size: 64\n" + VECTOR + BATCHING + instances(1), IDENTITY),
    "brief_identity": (PYTHON + "max_batch_size: 64\n" + VECTOR + BATCHING + instances(1), BRIEF_IDENTITY),
    "slow": (PYTHON + "max_batch_size: 64\n" + VECTOR + instances(1), SLOW),
    "slow_batched": (PYTHON + "max_batch_size: 64\n" + VECTOR + BATCHING + instances(1), SLOW),
    "slow_instances": (PYTHON + "max_batch_size: 64\n" + VECTOR + instances(4), SLOW),
    "preprocessing": (PYTHON + f"max_batch_size: 64\n{TEXT_IN} output {{ {IDS} }}\n", PREPROCESSING),
    "tokens": (
        PYTHON
        + "max_batch_size: 64\nmodel_transaction_policy { decoupled: true }\n"
        + f"input {{ {IDS} }} {COUNT_IN} output {{ {TOKEN} }}\n"
        + BATCHING,
        TOKENS_MODEL,
    ),
    "postprocessing": (PYTHON + f"max_batch_size: 64\ninput {{ {TOKEN} }} {OUT}", POSTPROCESSING),
    "ensemble": (ENSEMBLE, None),
}


def write_repository(folder: Path) -> Path:
    for name, (config, code) in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if code is not None:
            text = "import triton_python_backend_utils as pb_utils\n" + code
            (folder / name / "1" / "model.py").write_text(text)
    return folder
