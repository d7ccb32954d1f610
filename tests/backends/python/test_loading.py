"""How model.py files are found, imported apart from each other, initialized and completed."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from llmserve.serving.core import InferenceCore
from llmserve.serving.types import Tensor
from tests.backends.python.test_execute import DECOUPLED, ECHO_CONFIG, TEXT_CONFIG, echo_model
from tests.backends.python.test_failures import SENDER
from tests.serving.models import appears, collect, floats, request, serving, single, tensors, values, write_model

IN_INITIALIZE = "class TritonPythonModel:\n  def execute(self, requests): ...\n  def initialize(self, args): "
INNER = echo_model("return pb_utils.InferenceResponse([pb_utils.Tensor('Y', x + 1)])")


def threads_of(model: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(f"model-{model}_")]


def reason(core: InferenceCore, name: str) -> str:
    (status,) = [status for status in core.repository_index() if status.name == name]
    assert status.state == "UNAVAILABLE"
    return status.reason


async def test_initialize_gets_tritons_arguments_and_finalize_runs(tmp_path: Path) -> None:
    code = """
import json, pathlib
import numpy as np
class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        config = json.loads(args["model_config"])
        assert pb_utils.get_input_config_by_name(config, "X")["dims"] == [-1]
        assert pb_utils.get_output_config_by_name(config, "nope") is None
        data_type = pb_utils.get_output_config_by_name(config, "Y")["data_type"]
        assert pb_utils.triton_string_to_numpy(data_type) is np.object_
        assert not pb_utils.using_decoupled_model_transaction_policy(config)
    def execute(self, requests):
        answer = np.array([json.dumps(self.args)], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer)])]
    def finalize(self):
        pathlib.Path(__file__).with_name("finalized").touch()
"""
    config = f'backend: "python"\n{tensors("input", X="FP32 [ -1 ]")}\n{tensors("output", Y="STRING [ 1 ]")}'
    directory = write_model(tmp_path, "args", config + 'parameters { key: "k" value { string_value: "v" } }', code)
    async with serving(tmp_path, parameter_overrides={"args": {"k2": "v2"}}) as core:
        args = json.loads(values(await single(core, request("args", floats(1))))[0])
    model_config = json.loads(args.pop("model_config"))
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_instance_name": "args_0",
        "model_repository": str(directory),
        "model_version": "1",
        "model_name": "args",
    }
    assert model_config["parameters"] == {"k": {"string_value": "v"}, "k2": {"string_value": "v2"}}
    assert model_config["max_batch_size"] == 0
    assert model_config["version_policy"] == {"latest": {"num_versions": 1}}
    assert (directory / "1" / "finalized").exists()


async def test_files_beside_the_model_belong_to_it_alone(tmp_path: Path) -> None:
    body = "return pb_utils.InferenceResponse([pb_utils.Tensor('Y', x + neighbour.VALUE)])"
    code = "import neighbour\n" + echo_model(body)
    for name, value in (("one", 1), ("two", 2)):
        directory = write_model(tmp_path, name, ECHO_CONFIG, code)
        (directory / "1" / "neighbour.py").write_text(f"VALUE = {value}\n")
    path_before, modules_before = list(sys.path), set(sys.modules)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("one", floats(0)))) == [1]
        assert values(await single(core, request("two", floats(0)))) == [2]
        assert "neighbour" not in sys.modules
        assert sys.path == path_before
    assert not [name for name in sys.modules.keys() - modules_before if name.startswith("triton_model_")]


async def test_folders_that_models_put_on_the_path_belong_to_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    body = "return pb_utils.InferenceResponse([pb_utils.Tensor('Y', x + tools_of_model.VALUE)])"
    config = ECHO_CONFIG + "version_policy { all {} }"
    for name, version, place in (("one", 1, "lib"), ("one", 2, "lib"), ("two", 3, "../lib")):
        code = f"import os, sys\nsys.path.append(os.path.dirname(__file__) + '/{place}')\nimport tools_of_model\n"
        folder = write_model(tmp_path, name, config, code + echo_model(body), version) / str(version) / place
        folder.mkdir()
        (folder / "tools_of_model.py").write_text(f"VALUE = {version}\n")
    async with serving(tmp_path) as core:
        for name, value in (("one", 1), ("one", 2), ("two", 3)):
            assert values(await single(core, request(name, floats(0), model_version=str(value)))) == [value]
        assert "tools_of_model" not in sys.modules


async def test_files_beside_a_model_of_a_repository_with_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import neighbour\n" + echo_model(
        "return pb_utils.InferenceResponse([pb_utils.Tensor('Y', x + neighbour.VALUE)])"
    )
    (write_model(tmp_path / "models", "m", ECHO_CONFIG, code) / "1/neighbour.py").write_text("VALUE = 1\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    async with serving(Path("../models")) as core:
        assert values(await single(core, request("m", floats(1)))) == [2]


async def test_files_beside_the_model_can_be_imported_relatively(tmp_path: Path) -> None:
    """In Triton, the folder of a version is a package."""
    code = "from . import neighbour\nfrom .package import VALUE\n" + echo_model(
        """from .late import VALUE as late
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + neighbour.VALUE + VALUE + late)])"""
    )
    for name, value in (("one", 1), ("two", 2)):
        directory = write_model(tmp_path, name, ECHO_CONFIG, code) / "1"
        (directory / "neighbour.py").write_text(f"from .late import VALUE\nVALUE += {value}\n")
        (directory / "package").mkdir()
        (directory / "package/__init__.py").write_text("from ..neighbour import VALUE\n")
        (directory / "late.py").write_text(f"VALUE = {value * 10}\n")
    modules_before = set(sys.modules)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("one", floats(0)))) == [11 + 11 + 10]
        assert values(await single(core, request("two", floats(0)))) == [22 + 22 + 20]
        assert {"1", "1.neighbour", "1.package", "1.late", "neighbour"}.isdisjoint(sys.modules.keys() - modules_before)


LATE = """
import importlib, threading
import numpy as np
class TritonPythonModel:
    def initialize(self, args):
        import neighbour
        from package.part import VALUE
        self.offset = neighbour.VALUE + VALUE
    def execute(self, requests):
        import triton_python_backend_utils as late
        from neighbour import in_own_thread
        assert late is pb_utils
        importlib.import_module("triton_python_backend_utils").Logger.log_warn("foreign")
        x = requests[0].inputs()[0].as_numpy()
        return [late.InferenceResponse([late.Tensor("Y", x + self.offset + in_own_thread(late))])]
"""
NEIGHBOUR = """
import threading
VALUE = {value}
def in_own_thread(expected):
    seen = []
    def work():
        import triton_python_backend_utils as late
        import later
        assert late is expected
        seen.append(later.VALUE)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return seen[0]
"""


async def test_late_imports_belong_to_the_model_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, value in (("one", 1), ("two", 2)):
        directory = write_model(tmp_path, name, ECHO_CONFIG, LATE) / "1"
        (directory / "package").mkdir()
        (directory / "neighbour.py").write_text(NEIGHBOUR.format(value=value))
        (directory / "later.py").write_text(f"VALUE = {value * 100}\n")
        (directory / "package/__init__.py").write_text("")
        (directory / "package/part.py").write_text(f"from . import other\nVALUE = other.VALUE + {value}\n")
        (directory / "package/other.py").write_text(f"VALUE = {value * 10}\n")
    path_before, finders_before = list(sys.path), list(sys.meta_path)
    async with serving(tmp_path) as core:
        for _ in range(2):
            assert values(await single(core, request("one", floats(0)))) == [112]
            assert values(await single(core, request("two", floats(0)))) == [224]
        assert {"neighbour", "later", "package", "package.part"}.isdisjoint(sys.modules)
        assert (sys.path, sys.meta_path) == (path_before, finders_before)
    senders = [name for name, _, text in caplog.record_tuples if text == "foreign"]
    assert senders == ["llmserve.model.one_0", "llmserve.model.two_0"] * 2


async def test_instances_do_not_share_module_globals_or_threads(tmp_path: Path) -> None:
    code = """
import threading, numpy as np
SEEN = []
class TritonPythonModel:
    def initialize(self, args):
        SEEN.append(args["model_instance_name"])
        self.thread = threading.current_thread()
    def execute(self, requests):
        assert threading.current_thread() is self.thread
        import time; time.sleep(0.05)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([",".join(SEEN)], dtype=object))])]
"""
    config = f'backend: "python"\n{tensors("input", X="FP32 [ -1 ]")}\n{tensors("output", Y="STRING [ 1 ]")}'
    write_model(tmp_path, "pair", config + "instance_group { count: 2 }", code)
    async with serving(tmp_path) as core:
        answers = await asyncio.gather(*(single(core, request("pair", floats(1))) for _ in range(2)))
    assert sorted(values(answer)[0] for answer in answers) == [b"pair_0_0", b"pair_0_1"]
    assert threads_of("pair") == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import surely_not_installed\n", "ModuleNotFoundError: No module named 'surely_not_installed'"),
        ("def broken(:\n", "SyntaxError"),
        ("import sys; sys.exit('bye')\n", "cannot be imported: SystemExit: bye"),
        (
            "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config): exit('bye')\n"
            "    def execute(self, requests): pass\n",
            "auto_complete_config: SystemExit: bye",
        ),
        (
            "class TritonPythonModel:\n    def initialize(self, args): exit('bye')\n"
            "    def execute(self, requests): pass\n",
            "failed to initialize: SystemExit: bye",
        ),
        ("class Other: pass\n", "has no class TritonPythonModel with a method execute"),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        raise RuntimeError('no luck')\n"
            "    def execute(self, requests): pass\n",
            "model instance 'bad_0' failed to initialize: RuntimeError: no luck",
        ),
    ],
)
async def test_broken_model_is_reported_and_others_load(tmp_path: Path, code: str, expected: str) -> None:
    write_model(tmp_path, "bad", ECHO_CONFIG, code)
    write_model(tmp_path, "good", ECHO_CONFIG, INNER)
    async with serving(tmp_path) as core:
        assert expected in reason(core, "bad")
        assert not core.ready()
        assert core.model_ready("good")
        assert not core.model_ready("bad")
    assert threads_of("good") == []


async def test_names_and_loops_that_models_for_triton_use(tmp_path: Path) -> None:
    """Its classes have a second module there, and `initialize` and `execute` run in a main thread."""
    code = """
import asyncio
import numpy as np
from c_python_backend_utils import InferenceResponse, Tensor
class TritonPythonModel:
    def initialize(self, args):
        assert Tensor is pb_utils.Tensor
        assert pb_utils.np is np
        self.loop = asyncio.get_event_loop()
        self.loop.run_until_complete(asyncio.sleep(0))
    def execute(self, requests):
        assert asyncio.get_event_loop() is self.loop
        return [InferenceResponse([Tensor("Y", self.loop.run_until_complete(self.answer(r)))]) for r in requests]
    async def answer(self, request):
        return request.inputs()[0].as_numpy() + 1
"""
    write_model(tmp_path, "m", ECHO_CONFIG, code)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("m", floats(1)))) == [2]


async def test_a_model_that_needs_a_main_thread_learns_how_to_get_one(tmp_path: Path) -> None:
    write_model(tmp_path, "m", ECHO_CONFIG, "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)")
    async with serving(tmp_path) as core:
        assert "set the parameter EXECUTION_MODE to process" in reason(core, "m")


async def test_missing_model_file(tmp_path: Path) -> None:
    write_model(tmp_path, "empty", ECHO_CONFIG)
    async with serving(tmp_path) as core:
        assert reason(core, "empty").endswith("empty/1/model.py does not exist")


AUTO_COMPLETE = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": False})
        assert config.as_dict()["max_batch_size"] == 4
        return config
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""


async def test_auto_complete_fills_the_config(tmp_path: Path) -> None:
    write_model(tmp_path, "auto", 'backend: "python"', AUTO_COMPLETE)
    async with serving(tmp_path) as core:
        config = core.model_config("auto")
        assert [list(tensor.dims) for tensor in config.input] == [[-1]]
        assert config.max_batch_size == 4
        assert config.HasField("dynamic_batching")
        assert config.default_model_filename == "model.py"


async def test_auto_complete_may_not_contradict_the_config(tmp_path: Path) -> None:
    write_model(tmp_path, "auto", f'backend: "python"\n{tensors("input", X="INT32 [ -1 ]")}', AUTO_COMPLETE)
    async with serving(tmp_path) as core:
        assert "tensor 'X' is TYPE_INT32 in config.pbtxt and TYPE_FP32 in the model" in reason(core, "auto")


CALLER = """
import numpy as np
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]
    def answer(self, request):
        inner = pb_utils.InferenceRequest(
            model_name="inner", requested_output_names=["Y"],
            inputs=[pb_utils.Tensor("X", request.inputs()[0].as_numpy())])
        response = inner.exec()
        if response.has_error():
            error = response.error()
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("inner: " + error.message(), error.code()))
        y = pb_utils.get_output_tensor_by_name(response, "Y").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y * 10)])
"""
COUNT = """
import pathlib
import time
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, x = request.get_response_sender(), request.inputs()[0].as_numpy()
            for i in range(int(x[0])):
                if sender.is_cancelled():
                    pathlib.Path(__file__).with_name("cancelled").touch()
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 0 + i)]))
                time.sleep(0.001)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


async def test_a_model_calls_another(tmp_path: Path) -> None:
    write_model(tmp_path, "outer", ECHO_CONFIG + "instance_group { count: 2 }", CALLER)
    write_model(tmp_path, "inner", ECHO_CONFIG, INNER)
    async with serving(tmp_path) as core:
        answers = await asyncio.gather(*(single(core, request("outer", floats(i))) for i in range(20)))
        assert [values(answer) for answer in answers] == [[(i + 1) * 10] for i in range(20)]
        assert core.statistics("inner")[0].inference_stats.success.count == 20


async def test_the_called_model_may_answer_through_a_sender(tmp_path: Path) -> None:
    write_model(tmp_path, "outer", ECHO_CONFIG, CALLER)
    write_model(tmp_path, "inner", ECHO_CONFIG, SENDER)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("outer", floats(1)))) == [10]


async def test_errors_of_the_called_model_are_error_responses(tmp_path: Path) -> None:
    write_model(tmp_path, "outer", ECHO_CONFIG, CALLER)
    async with serving(tmp_path) as core:
        with pytest.raises(Exception, match="inner: Request for unknown model: 'inner' is not found"):
            await single(core, request("outer", floats(1)))


async def test_calling_a_decoupled_model_needs_decoupled(tmp_path: Path) -> None:
    write_model(tmp_path, "outer", ECHO_CONFIG, CALLER)
    write_model(tmp_path, "inner", ECHO_CONFIG + DECOUPLED, COUNT)
    async with serving(tmp_path) as core:
        with pytest.raises(Exception, match="decoupled=True"):
            await single(core, request("outer", floats(3)))


async def test_iterating_over_a_decoupled_model(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        inner = pb_utils.InferenceRequest("", 0, request.inputs(), ["Y"], "inner")
        lengths = []
        for response in inner.exec(decoupled=True):
            lengths.append(len(response.output_tensors()))
            if lengths[-1]:
                sender.send(pb_utils.InferenceResponse(response.output_tensors()))
        assert lengths == [1, 1, 1, 0]
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    write_model(tmp_path, "outer", ECHO_CONFIG + DECOUPLED, code)
    write_model(tmp_path, "inner", ECHO_CONFIG + DECOUPLED, COUNT)
    async with serving(tmp_path) as core:
        responses = await collect(core, request("outer", floats(3)))
    assert [values(response) for response in responses[:-1]] == [[0], [1], [2]]


@pytest.mark.parametrize("extra", ["", 'parameters { key: "EXECUTION_MODE" value { string_value: "process" } }'])
async def test_a_last_response_that_says_so_is_the_last_one(tmp_path: Path, extra: str) -> None:
    """As in Triton: the empty one comes only where the end comes alone."""
    caller = echo_model(
        """
        inner = pb_utils.InferenceRequest("", 0, request.inputs(), ["Y"], "inner").exec(decoupled=True)
        lengths = [len(response.output_tensors()) for response in inner]
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(lengths, np.float32))])"""
    )
    inner = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, x = request.get_response_sender(), request.inputs()[0].as_numpy()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
            last = pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])
            sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    write_model(tmp_path, "outer", ECHO_CONFIG + extra, "import numpy as np\n" + caller)
    write_model(tmp_path, "inner", ECHO_CONFIG + DECOUPLED, inner)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("outer", floats(5)))) == [1, 1]


async def test_many_callers_of_a_decoupled_model_at_once(tmp_path: Path) -> None:
    code = echo_model(
        """
        inner = pb_utils.InferenceRequest("", 0, request.inputs(), ["Y"], "inner").exec(decoupled=True)
        total = sum(tensor.as_numpy() for response in inner for tensor in response.output_tensors())
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", total)])"""
    )
    write_model(tmp_path, "outer", ECHO_CONFIG + "instance_group { count: 16 }", code)
    write_model(tmp_path, "inner", ECHO_CONFIG + DECOUPLED + "instance_group { count: 4 }", COUNT)
    async with serving(tmp_path) as core:
        answers = await asyncio.gather(*(single(core, request("outer", floats(1 + i % 5))) for i in range(64)))
        assert [values(answer) for answer in answers] == [[sum(range(1 + i % 5))] for i in range(64)]
        assert core.ready()


async def test_leaving_the_iterator_cancels_the_called_model(tmp_path: Path) -> None:
    code = echo_model(
        """
        for response in pb_utils.InferenceRequest("", 0, request.inputs(), ["Y"], "inner").exec(decoupled=True):
            return pb_utils.InferenceResponse(response.output_tensors())"""
    )
    write_model(tmp_path, "outer", ECHO_CONFIG, code)
    inner = write_model(tmp_path, "inner", ECHO_CONFIG + DECOUPLED, COUNT)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("outer", floats(5000)))) == [0]
        assert await appears(inner / "1" / "cancelled")


async def test_async_calls_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ModuleType("both")
    both.are_here = threading.Barrier(2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "both", both)
    code = """
import asyncio
class TritonPythonModel:
    async def execute(self, requests):
        (request,) = requests
        calls = [pb_utils.InferenceRequest("", 0, request.inputs(), ["Y"], "inner") for _ in range(2)]
        answers = await asyncio.gather(*(call.async_exec() for call in calls))
        total = sum(answer.output_tensors()[0].as_numpy() for answer in answers)
        stream = await pb_utils.InferenceRequest("", 0, request.inputs(), ["Y"], "count").async_exec(decoupled=True)
        async for response in stream:
            for tensor in response.output_tensors():
                total += tensor.as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", total)])]
"""
    write_model(tmp_path, "outer", ECHO_CONFIG, code)
    inner = "import both\n" + echo_model(
        "both.are_here.wait(10); return pb_utils.InferenceResponse([pb_utils.Tensor('Y', x + 1)])"
    )
    write_model(tmp_path, "inner", ECHO_CONFIG + "instance_group { count: 2 }", inner)
    write_model(tmp_path, "count", ECHO_CONFIG + DECOUPLED, COUNT)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("outer", floats(3)))) == [(3 + 1) * 2 + 0 + 1 + 2]


async def test_other_models_cannot_be_called_from_initialize(tmp_path: Path) -> None:
    initialize = '    def initialize(self, args):\n        pb_utils.InferenceRequest("", 0, [], [], "inner").exec()\n'
    write_model(tmp_path, "outer", ECHO_CONFIG, CALLER + initialize)
    async with serving(tmp_path) as core:
        assert "other models can only be called from execute" in reason(core, "outer")


async def test_a_models_log_lines_reach_the_servers_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = "pb_utils.Logger.log_warn('seen'); return pb_utils.InferenceResponse([pb_utils.Tensor('Y', x)])"
    write_model(tmp_path, "text", TEXT_CONFIG, echo_model(body))
    async with serving(tmp_path) as core:
        await single(core, request("text", Tensor("X", "BYTES", np.array([b"a"], dtype=object))))
    assert ("llmserve.model.text_0", logging.WARNING, "seen") in caplog.record_tuples


@pytest.mark.parametrize(("package", "extra"), [("transformers", "transformers"), ("torch", "pytorch")])
@pytest.mark.parametrize("where", ["", IN_INITIALIZE], ids=["model.py", "initialize"])
async def test_a_package_that_is_missing_comes_with_an_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str, where: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    write_model(tmp_path, "m", ECHO_CONFIG, f"{where}import {package}")
    async with serving(tmp_path) as core:
        assert f"pip install 'llmserve[{extra}]'" in reason(core, "m")
