"""`triton_python_backend_utils` beyond requests and responses: DLPack, types, metrics, other models' life."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from llmserve.backends.python import dtypes
from llmserve.backends.python.bls import NoServer
from llmserve.backends.python.errors import TritonModelException
from llmserve.backends.python.metric_store import MetricStore
from llmserve.backends.python.tensors import Tensor
from llmserve.backends.python.utils_module import make_utils_module
from llmserve.errors import Cancelled
from llmserve.serving.settings import ControlMode
from llmserve.serving.types import Tensor as WireTensor
from tests.backends.python.test_execute import DECOUPLED, ECHO_CONFIG, echo_model
from tests.backends.python.test_loading import COUNT, INNER, reason
from tests.backends.python.test_process import PROCESS
from tests.serving.models import appears, collect, floats, request, serving, single, values, write_model

MODES = pytest.mark.parametrize("mode", ["", PROCESS], ids=["thread", "process"])


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"])
def test_tensors_go_to_torch_and_back(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = torch.from_dlpack(Tensor("X", array))
    assert tensor.numpy().tolist() == array.tolist()
    for source in (tensor, torch.utils.dlpack.to_dlpack(tensor)):
        back = Tensor.from_dlpack("Y", source)
        assert back.as_numpy().tolist() == array.tolist()
        assert back.name() == "Y"


@pytest.mark.parametrize("copy", [True, False])
def test_a_masked_array_is_its_data(copy: bool) -> None:
    """As in Triton: what is masked stays what it was, whichever way the tensor goes."""
    masked = np.ma.masked_array(np.array([[1, 2], [3, 4]]), mask=np.array([[False, True], [False, False]]))
    data = Tensor("X", masked.T).to_wire(copy=copy).data
    assert type(data) is np.ndarray
    assert data.tobytes() == np.array([1, 3, 2, 4]).tobytes()


def test_bfloat16_goes_to_torch_and_back() -> None:
    bits = np.array([[0x3F80, 0x4000, 0xC040]], np.uint16)  # 1, 2, -3
    tensor: torch.Tensor = torch.from_dlpack(Tensor.borrow(WireTensor("X", "BF16", bits)))
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [[1, 2, -3]]
    tensor += 1
    assert bits.tolist() == [[0x3F80, 0x4000, 0xC040]]  # the client's own are left alone
    for source in (tensor, torch.utils.dlpack.to_dlpack(tensor)):
        back = Tensor.from_dlpack("Y", source)
        assert back.triton_dtype() == "BF16"
        assert (back.to_wire().datatype, back.to_wire().data.tolist()) == ("BF16", [[0x4000, 0x4040, 0xC000]])
        with pytest.raises(TritonModelException, match="BF16 and cannot be converted to NumPy"):
            back.as_numpy()
    own = Tensor("Z", np.array([1.5], ml_dtypes.bfloat16))
    assert torch.from_dlpack(own).tolist() == [1.5]


def test_memory_that_is_not_contiguous_or_not_writable() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert torch.from_dlpack(Tensor("X", array[:, ::2])).tolist() == array[:, ::2].tolist()
    assert torch.from_dlpack(Tensor("X", array.T)).tolist() == array.T.tolist()
    turned = Tensor.from_dlpack("Y", torch.arange(6).reshape(2, 3).T)
    assert turned.to_wire().data.tolist() == [[0, 3], [1, 4], [2, 5]]
    frozen = np.frombuffer(b"\1\2", np.uint8)
    assert torch.from_dlpack(Tensor("X", frozen)).tolist() == [1, 2]


def test_memory_is_shared_without_a_copy() -> None:
    array = np.zeros(3, np.float32)
    torch.from_dlpack(Tensor("X", array))[0] = 5
    assert array[0] == 5


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (object(), "it is not a DLPack tensor"),
        (torch.zeros(1, dtype=torch.complex64), "no Triton datatype"),
        (torch.zeros(1, device="meta"), "cannot be read through DLPack"),
    ],
)
def test_what_cannot_be_read_through_dlpack(source: Any, problem: str) -> None:
    with pytest.raises(TritonModelException, match=problem):
        Tensor.from_dlpack("X", source)


def test_strings_have_no_dlpack_form() -> None:
    with pytest.raises(TritonModelException, match="strings"):
        Tensor("X", np.array([b"a"], dtype=object)).to_dlpack()


def test_a_capsule_is_consumed_once() -> None:
    capsule = Tensor("X", np.zeros(1)).to_dlpack()
    assert Tensor.from_dlpack("Y", capsule).shape() == [1]
    with pytest.raises(TritonModelException, match="already consumed"):
        Tensor.from_dlpack("Y", capsule)


def test_types() -> None:
    assert dtypes.triton_string_to_numpy("TYPE_BOOL") is np.bool_
    assert dtypes.triton_string_to_numpy("TYPE_STRING") is np.object_
    for number, name in ((1, np.bool_), (5, np.uint64), (10, np.float16), (12, np.float64), (13, np.object_)):
        assert dtypes.triton_to_numpy_type(number) is name
        assert dtypes.numpy_to_triton_type(name) == number
    assert dtypes.numpy_to_triton_type(np.bytes_) == 13
    assert (dtypes.triton_to_numpy_type(14), dtypes.numpy_to_triton_type(np.complex64)) == (None, None)


def test_strings_as_bytes() -> None:
    words = np.array([[b"ab", "ö"], [b"", "c"]], dtype=object)
    encoded = dtypes.serialize_byte_tensor(words)
    assert encoded == b"\2\0\0\0ab\2\0\0\0\xc3\xb6\0\0\0\0\1\0\0\0c"
    assert dtypes.deserialize_bytes_tensor(encoded).tolist() == [b"ab", "ö".encode(), b"", b"c"]
    assert dtypes.serialize_byte_tensor(np.array([], dtype=object)) is None
    for broken in (b"\1\0\0", b"\5\0\0\0ab"):
        with pytest.raises(TritonModelException, match="ends within"):
            dtypes.deserialize_bytes_tensor(broken)


def test_names_that_models_use() -> None:
    utils = make_utils_module("m_0", NoServer())
    names = (
        "InferenceTrace Logger MetricFamily ModelConfig PreferredMemory Tensor TritonError TritonModelException "
        "TRITONSERVER_MEMORY_CPU TRITONSERVER_MEMORY_GPU TRITONSERVER_REQUEST_FLAG_SEQUENCE_END "
        "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START TRITONSERVER_REQUEST_RELEASE_ALL "
        "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE TRITONSERVER_RESPONSE_COMPLETE_FINAL TRITON_STRING_TO_NUMPY"
    )
    assert [name for name in names.split() if not hasattr(utils, name)] == []
    assert not hasattr(utils, "NoSuchName")
    inner = utils.InferenceRequest(
        request_id="r", correlation_id="c", inputs=[utils.Tensor("X", np.zeros(1))], requested_output_names=["Y"],
        model_name="m", model_version=2, flags=1, timeout=7,
        preferred_memory=utils.PreferredMemory(utils.TRITONSERVER_MEMORY_GPU, 0), trace=utils.InferenceTrace(),
        parameters={"a": 1},
    )  # fmt: skip
    assert (inner.request_id(), inner.correlation_id(), inner.flags(), inner.timeout()) == ("r", "c", 1, 7)
    assert (inner.trace().get_context(), json.loads(inner.parameters())) == (None, {"a": 1})
    inner.set_flags(3)
    assert inner.flags() == 3
    with pytest.raises(TypeError, match="requires inputs"):
        utils.InferenceRequest(model_name="m")
    with pytest.raises(utils.TritonModelException, match="Correlation ID"):
        utils.InferenceRequest(model_name="m", inputs=[], requested_output_names=[], correlation_id=1.5)


METERED = """
class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily
        requests = family(name="requests_seen", description="Seen.", kind=family.COUNTER)
        self.count = requests.Metric(labels={"model": "m"})
        self.level = family("level", "Level.", family.GAUGE).Metric(labels={"a": 'q"', "b": "x"})
        self.sizes = family(name="sizes", description="Sizes.", kind=family.HISTOGRAM).Metric(buckets=[1, 2.5])
    def execute(self, requests):
        return [self.answer(request) for request in requests]
    def answer(self, request):
        x = request.inputs()[0].as_numpy()
        self.count.increment(1)
        self.level.set(10)
        self.level.increment(-0.5)
        self.sizes.observe(float(x[0]))
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 0 + self.count.value() + self.level.value())])
"""


@MODES
async def test_custom_metrics(tmp_path: Path, mode: str) -> None:
    write_model(tmp_path, "m", ECHO_CONFIG + mode, METERED)
    write_model(tmp_path, "other", ECHO_CONFIG + mode, METERED)
    async with serving(tmp_path, control_mode=ControlMode.EXPLICIT, load_at_start=("m", "other")) as core:
        assert values(await single(core, request("m", floats(2)))) == [1 + 9.5]
        assert values(await single(core, request("other", floats(9)))) == [2 + 9.5]
        text = core.metrics_text()
        for line in (
            "# HELP requests_seen Seen.",
            "# TYPE requests_seen counter",
            'requests_seen{model="m"} 2',
            '# TYPE level gauge\nlevel{a="q\\"",b="x"} 9.5',
            "# TYPE sizes histogram",
            'sizes_bucket{le="1"} 0',
            'sizes_bucket{le="2.5"} 1',
            'sizes_bucket{le="+Inf"} 2',
            "sizes_count 2",
            "sizes_sum 11",
        ):
            assert line in text, line
        await core.unload_model("m")
        assert "requests_seen" in core.metrics_text()  # the other model's too
        await core.unload_model("other")
        for _ in range(500):
            if "requests_seen" not in core.metrics_text():
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("metrics of unloaded models are still there")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("pb_utils.MetricFamily('f', '', 'dial')", "kind must be COUNTER"),
        ("pb_utils.MetricFamily('a b', '', 'gauge')", "'a b' is not a valid name for a metric family"),
        ("pb_utils.MetricFamily('f', '', 'gauge').Metric({'a b': '1'})", "'a b' is not a valid name for a label"),
        ("pb_utils.MetricFamily('f', '', 'gauge').Metric({}, [1])", "gauge 'f' does not support buckets"),
        ("pb_utils.MetricFamily('f', '', 'histogram').Metric()", "needs buckets in ascending order"),
        ("pb_utils.MetricFamily('f', '', 'histogram').Metric({}, [2, 1])", "needs buckets in ascending order"),
        ("pb_utils.MetricFamily('f', '', 'counter').Metric().increment(-1)", "it can only grow"),
        ("pb_utils.MetricFamily('f', '', 'counter').Metric().set(1)", "counter 'f' has no operation set"),
        ("pb_utils.MetricFamily('f', '', 'histogram').Metric({}, [1]).value()", "has no single value"),
        (
            "m = pb_utils.MetricFamily('f', '', 'gauge').Metric(); pb_utils.MetricFamily('f', '', 'counter')",
            "already exists as a gauge",
        ),
        ("f = pb_utils.MetricFamily; f('f', '', f.GAUGE), f('f', '', f.COUNTER)", "already exists as a gauge"),
    ],
)
async def test_wrong_metrics(tmp_path: Path, lines: str, problem: str) -> None:
    initialize = f"    def initialize(self, args):\n        {lines}\n"
    write_model(tmp_path, "m", ECHO_CONFIG, INNER + initialize)
    async with serving(tmp_path) as core:
        assert problem in reason(core, "m")


LOADER = echo_model(
    """
        if request.request_id() == "load":
            pb_utils.load_model(model_name="late")
        if request.request_id() == "replace":
            config = '{"backend": "identity", "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}], '
            config += '"output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}]}'
            pb_utils.load_model("late", config, files={"file:1/none": b""})
        if request.request_id() == "unload":
            pb_utils.unload_model("late")
        if request.request_id() == "nobody":
            pb_utils.load_model("nobody")
        ready = pb_utils.is_model_ready(model_name="late"), pb_utils.is_model_ready("late", "7")
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(ready, np.float32))])"""
)


@MODES
async def test_models_load_and_unload_models(tmp_path: Path, mode: str) -> None:
    initialize = "    def initialize(self, args):\n        assert not pb_utils.is_model_ready('late')\n"
    write_model(tmp_path, "loader", ECHO_CONFIG + mode, LOADER + initialize)
    write_model(tmp_path, "late", ECHO_CONFIG, INNER)
    async with serving(tmp_path, control_mode=ControlMode.EXPLICIT, load_at_start=("loader",)) as core:

        async def ask(what: str) -> list[float]:
            return values(await single(core, request("loader", floats(0), request_id=what)))

        assert await ask("") == [0, 0]
        assert await ask("load") == [1, 0]
        assert values(await single(core, request("late", floats(1)))) == [2]
        assert await ask("unload") == [0, 0]
        with pytest.raises(Exception, match="TritonModelException: failed to load 'nobody'"):
            await ask("nobody")


REPLACER = echo_model(
    """
        config = '{"backend": "python", "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}], '
        config += '"output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}]}'
        code = pathlib.Path(__file__).with_name("late.txt").read_bytes()
        pb_utils.load_model("late", config, files={"file:1/model.py": code})
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1, np.float32))])"""
)


@MODES
async def test_a_model_loads_another_from_files(tmp_path: Path, mode: str) -> None:
    write_model(tmp_path, "loader", ECHO_CONFIG + mode, "import pathlib\n" + REPLACER)
    (tmp_path / "loader/1/late.txt").write_text("import triton_python_backend_utils as pb_utils\n" + INNER)
    async with serving(tmp_path, control_mode=ControlMode.EXPLICIT, load_at_start=("loader",)) as core:
        await single(core, request("loader", floats(0)))
        assert values(await single(core, request("late", floats(1)))) == [2]


@MODES
async def test_async_exec_begins_at_once_and_iterators_can_be_cancelled(tmp_path: Path, mode: str) -> None:
    has_begun = tmp_path / "begun"
    code = f"""
import asyncio, pathlib
class TritonPythonModel:
    async def execute(self, requests):
        (request,) = requests
        ask = lambda name: pb_utils.InferenceRequest("", 0, request.inputs(), ["Y"], name)
        running = ask("one").async_exec()
        while not pathlib.Path({str(has_begun)!r}).exists():
            await asyncio.sleep(0.01)
        answer = (await running).output_tensors()[0].as_numpy()
        responses = await ask("count").async_exec(decoupled=True)
        await anext(responses)
        responses.cancel()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer)])]
"""
    write_model(tmp_path, "outer", ECHO_CONFIG + mode, code)
    one = f"open({str(has_begun)!r}, 'w').close(); return pb_utils.InferenceResponse([pb_utils.Tensor('Y', x + 1)])"
    write_model(tmp_path, "one", ECHO_CONFIG, echo_model(one))
    count = write_model(tmp_path, "count", ECHO_CONFIG + DECOUPLED, COUNT)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("outer", floats(9000)))) == [9001]
        assert await appears(count / "1/cancelled")


@MODES
async def test_a_models_loop_runs_on_until_the_first_response_of_a_call(tmp_path: Path, mode: str) -> None:
    code = """
import asyncio
import numpy as np
class TritonPythonModel:
    async def execute(self, requests):
        others = asyncio.create_task(self.tick(ticks := []))
        inner = pb_utils.InferenceRequest("", 0, requests[0].inputs(), ["Y"], "late")
        responses = await inner.async_exec(decoupled=True)
        others.cancel()
        total = sum(tensor.as_numpy() for response in responses for tensor in response.output_tensors())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.append(total, len(ticks)).astype(np.float32))])]

    async def tick(self, ticks):
        while True:
            ticks.append(0)
            await asyncio.sleep(0.01)
"""
    write_model(tmp_path, "outer", ECHO_CONFIG + mode, code)
    late = COUNT.replace("sender, x =", "time.sleep(0.5); sender, x =")
    write_model(tmp_path, "late", ECHO_CONFIG + DECOUPLED, late)
    async with serving(tmp_path) as core:
        total, num_ticks = values(await single(core, request("outer", floats(4))))
    assert (total, num_ticks > 5) == (0 + 1 + 2 + 3, True)


@MODES
async def test_responses_without_tensors_are_responses(tmp_path: Path, mode: str) -> None:
    """As in Triton: parameters may be all that a model has to say."""
    code = echo_model(
        """ask = lambda name: pb_utils.InferenceRequest("", 0, request.inputs(), ["Y"], name)
        answers = [ask("one").exec(), *ask("two").exec(decoupled=True)]
        assert not any(answer.has_error() for answer in answers)
        found = [f"{answer.parameters()} {len(answer.output_tensors())}" for answer in answers]
        return pb_utils.InferenceResponse([], parameters={"found": "; ".join(found)})"""
    )
    write_model(tmp_path, "outer", ECHO_CONFIG + mode, code)
    write_model(tmp_path, "one", ECHO_CONFIG + mode, echo_model("return pb_utils.InferenceResponse([])"))
    two = """
class TritonPythonModel:
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        sender.send(pb_utils.InferenceResponse([], parameters={"n": 1}))
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", requests[0].inputs()[0].as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    write_model(tmp_path, "two", ECHO_CONFIG + DECOUPLED + mode, two)
    async with serving(tmp_path) as core:
        answer = await single(core, request("outer", floats(1)))
    assert answer.parameters == {"found": '{} 0; {"n": 1} 0; {} 1; {} 0'}


@MODES
async def test_a_response_may_come_after_the_loop_that_waited_for_it(tmp_path: Path, mode: str) -> None:
    """A model with a loop for each request, which it leaves while another model still works for it."""
    has_left = tmp_path / "left"
    code = f"""
import asyncio, pathlib
class TritonPythonModel:
    def execute(self, requests):
        asyncio.run(self.begin(requests[0]))
        pathlib.Path({str(has_left)!r}).touch()
        return [self.ask(requests[0]).exec()]
    def ask(self, request):
        return pb_utils.InferenceRequest("", 0, request.inputs(), ["Y"], "late")
    async def begin(self, request):
        waiting = [self.ask(request).async_exec(), self.ask(request).async_exec(decoupled=True)]
        await asyncio.sleep(0)
"""
    write_model(tmp_path, "outer", ECHO_CONFIG + mode, code)
    late = f"""
        while not pathlib.Path({str(has_left)!r}).exists():
            time.sleep(0.01)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])"""
    write_model(tmp_path, "late", ECHO_CONFIG, "import pathlib, time\n" + echo_model(late))
    async with serving(tmp_path) as core, asyncio.timeout(60):
        assert values(await single(core, request("outer", floats(7)))) == [7]


@MODES
async def test_a_call_can_be_cancelled(tmp_path: Path, mode: str) -> None:
    code = """
class TritonPythonModel:
    async def execute(self, requests):
        inner = pb_utils.InferenceRequest("", 0, requests[0].inputs(), ["Y"], "slow")
        running = inner.async_exec()
        inner.cancel()
        error = (await running).error()
        assert error.code() == pb_utils.TritonError.CANCELLED
        return [pb_utils.InferenceResponse(error=error)]
"""
    write_model(tmp_path, "outer", ECHO_CONFIG + mode, code)
    slow = f"""
        while not pathlib.Path({str(tmp_path / "released")!r}).exists():
            time.sleep(0.01)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + 1)])"""
    write_model(tmp_path, "slow", ECHO_CONFIG, "import pathlib, time\n" + echo_model(slow))
    async with serving(tmp_path) as core:
        with pytest.raises(Cancelled, match="the request of model 'slow' was cancelled"):
            await asyncio.wait_for(single(core, request("outer", floats(1))), 60)
        (tmp_path / "released").touch()


TALKATIVE = """
class Talkative(type(sys)):  # installed packages have modules that answer to every name
    def __getattr__(self, name):
        return object()
sys.modules["talkative"] = Talkative("talkative")
"""


async def test_files_of_the_models_directory_can_be_imported(tmp_path: Path) -> None:
    """As well as those beside model.py; a folder without __init__.py is a package."""
    code = "import shared\nfrom lib.decode import VALUE\nimport json.decoder\n" + echo_model(
        "return pb_utils.InferenceResponse([pb_utils.Tensor('Y', x + shared.VALUE + VALUE)])"
    )
    for name, value in (("one", 1), ("two", 2)):
        directory = write_model(tmp_path, name, ECHO_CONFIG, code)
        (directory / "shared.py").write_text(f"import sys\nVALUE = {value}\n{TALKATIVE}")
        for folder in ("lib", "json"):
            (directory / "1" / folder).mkdir()
        (directory / "1/lib/decode.py").write_text(f"from lib.deeper import VALUE\nVALUE += {value * 100}\n")
        (directory / "1/lib/deeper.py").write_text(f"VALUE = {value * 10}\n")
    async with serving(tmp_path) as core:
        assert values(await single(core, request("one", floats(0)))) == [111]
        assert values(await single(core, request("two", floats(0)))) == [222]
    del sys.modules["talkative"]


async def test_asking_from_a_thread_of_the_model(tmp_path: Path) -> None:
    body = """
        import threading
        answers = []
        def ask():
            inner = pb_utils.InferenceRequest(model_name="inner", requested_output_names=["Y"], inputs=request.inputs())
            answers.append(inner.exec().output_tensors()[0].as_numpy())
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", answers[0])])"""
    write_model(tmp_path, "outer", ECHO_CONFIG, echo_model(body))
    write_model(tmp_path, "inner", ECHO_CONFIG, INNER)
    async with serving(tmp_path) as core:
        start = time.monotonic()
        assert values((await collect(core, request("outer", floats(1))))[0]) == [2]
        assert time.monotonic() - start < 30


COMPLETING = (
    INNER
    + """
    @staticmethod
    def auto_complete_config(config):
        {lines}
        return config
"""
)


@pytest.mark.parametrize(
    ("config", "lines", "problem"),
    [
        ("max_batch_size: 8", "config.set_max_batch_size(4)", "specified max_batch_size 8"),
        ("sequence_batching {}", "config.set_dynamic_batching()", "scheduling_choice as 'sequence_batching'"),
        (
            "model_transaction_policy { decoupled: false }",
            "config.set_model_transaction_policy({'decoupled': True})",
            "which is already set to 'False'",
        ),
        ("", "config.set_model_transaction_policy({'coupled': True})", "is not 'decoupled': coupled"),
        (
            "",
            "config.add_input({'name': 'X', 'data_type': 'TYPE_FP32', 'dims': [-1], 'shape': []})",
            "unknown properties",
        ),
        ("", "config.add_input({'name': 'X', 'dims': [-1]})", "lacks properties: data_type"),
        (
            "",
            "config.add_output({'name': 'Y', 'data_type': 'TYPE_INT8', 'dims': [-1]})",
            "is TYPE_FP32 in config",
        ),
        (
            "",
            "config.add_output({'name': 'Y', 'data_type': 'TYPE_FP32', 'dims': [2]})",
            "has dims [-1] in config",
        ),
    ],
)
async def test_what_a_model_may_not_complete(tmp_path: Path, config: str, lines: str, problem: str) -> None:
    write_model(tmp_path, "m", ECHO_CONFIG + config, COMPLETING.replace("{lines}", lines))
    async with serving(tmp_path) as core:
        assert problem in reason(core, "m")


async def test_what_a_model_may_complete(tmp_path: Path) -> None:
    lines = """
        assert config.as_dict()["name"] == "m"
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": False})
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1], "optional": True})
        config.add_output({"name": "Z", "data_type": "TYPE_STRING", "dims": [1]})"""
    write_model(tmp_path, "m", ECHO_CONFIG + "max_batch_size: 4", COMPLETING.replace("{lines}", lines))
    async with serving(tmp_path) as core:
        config = core.model_config("m")
        assert (config.max_batch_size, config.HasField("dynamic_batching")) == (8, True)
        assert config.input[0].optional
        assert [output.name for output in config.output] == ["Y", "Z"]


def test_scalars_keep_their_shape_on_the_way_to_the_server() -> None:
    for copy in (True, False):
        assert Tensor("X", np.array(1.0)).to_wire(copy=copy).shape == ()


@pytest.mark.parametrize(
    "lines",
    [
        "pb_utils.Tensor(None, np.zeros(1))",
        "pb_utils.Tensor('X', None)",
        "pb_utils.Tensor('X', [1])",
        "pb_utils.InferenceResponse(None)",
        "pb_utils.InferenceRequest(model_name='m', inputs=[], requested_output_names=[None])",
        "pb_utils.InferenceRequest(model_name='m', inputs=[], requested_output_names=None)",
        "pb_utils.InferenceRequest(model_name='m', inputs=[], requested_output_names=[], flags=None)",
        "pb_utils.InferenceRequest(model_name='m', inputs=[], requested_output_names=[], model_version=None)",
        "pb_utils.Logger.log('text', None)",
        "pb_utils.Logger.log('text', 1)",
        "pb_utils.Logger.log_info(None)",
    ],
)
def test_arguments_of_the_wrong_type_are_type_errors(lines: str) -> None:
    """As of Triton's functions, which are C++."""
    utils = make_utils_module("m_0", NoServer())
    with pytest.raises(TypeError):
        eval(lines, {"pb_utils": utils, "np": np})
    utils.Logger.log("text", utils.Logger.WARNING)
    assert utils.InferenceResponse().output_tensors() == []


def test_the_first_description_of_a_family_stays() -> None:
    store, one, other = MetricStore(), object(), object()
    store.add_family("f", "first", "gauge", owner=one)
    store.add_family("f", "second", "gauge", owner=other)
    store.add("f", {}, (), owner=other)
    store.forget(one)
    assert [family.documentation for family in store.collect()] == ["first"]
    store.forget(other)
    store.add_family("f", "third", "counter", owner=one)
