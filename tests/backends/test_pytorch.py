"""TorchScript and exported programs: how tensors become arguments, batches, strings, failures."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmserve.serving.config.features import has_gpu
from llmserve.serving.core import InferenceCore
from llmserve.serving.types import Tensor
from tests.serving.models import collect, floats, request, serving, single, tensors, values, write_model

AB = tensors("input", A="FP32 [ 2 ]", B="FP32 [ 2 ]")
NUMBERED = tensors("input", INPUT__1="FP32 [ 2 ]", INPUT__0="FP32 [ 2 ]")
OUT = tensors("output", OUTPUT__0="FP32 [ 2 ]", OUTPUT__1="FP32 [ 2 ]")
LIBTORCH = 'platform: "pytorch_libtorch" max_batch_size: 8\n'


class Difference(torch.nn.Module):
    def forward(self, A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: N803
        return A - B, B - A


class ByKey(torch.nn.Module):
    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"DIFF": x["A"] - x["B"], "UNUSED": x["A"]}


class Spell(torch.nn.Module):
    def forward(self, words: list[str]) -> list[str]:
        return [word + "!" for word in words]


class Pick(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor([10.0, 11.0, 12.0]))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table[index]


class Count(torch.nn.Module):
    """Answers with its own buffer, which the next call changes; and works in place.

    TorchScript reads no annotation that says what a buffer is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen += x.add_(1)  # type: ignore[operator]
        return self.seen, x


def script(module: torch.nn.Module) -> Callable[[Path], None]:
    def save(version_dir: Path) -> None:
        compile_script: Any = torch.jit.script
        compile_script(module.eval()).save(str(version_dir / "model.pt"))

    return save


def export(module: torch.nn.Module) -> Callable[[Path], None]:
    def save(version_dir: Path) -> None:
        row = {0: torch.export.Dim.DYNAMIC}
        example = torch.ones(2, 2), torch.ones(2, 2)
        torch.export.save(torch.export.export(module, example, dynamic_shapes=(row, row)), version_dir / "model.pt2")

    return save


def write(repository: Path, name: str, config: str, save: Callable[[Path], None]) -> None:
    save(write_model(repository, name, config) / "1")


def ab(*, a: str = "A", b: str = "B", scale: float = 1) -> tuple[Tensor, Tensor]:
    return (
        Tensor(a, "FP32", np.array([[5, 7]], np.float32) * np.float32(scale)),
        Tensor(b, "FP32", np.array([[1, 2]], np.float32) * np.float32(scale)),
    )


def reason(core: InferenceCore, name: str) -> str:
    (status,) = [status for status in core.repository_index() if status.name == name]
    return status.reason


@pytest.mark.parametrize("kind", [script, export])
async def test_inputs_go_by_name_or_by_number(tmp_path: Path, kind: Any) -> None:
    swapped = tensors("input", B="FP32 [ 2 ]", A="FP32 [ 2 ]")
    write(tmp_path, "named", LIBTORCH + swapped + OUT, kind(Difference()))
    write(tmp_path, "numbered", LIBTORCH + NUMBERED + OUT, kind(Difference()))
    ordered = tensors("input", first="FP32 [ 2 ]", second="FP32 [ 2 ]")
    write(tmp_path, "ordered", LIBTORCH + ordered + OUT, kind(Difference()))
    async with serving(tmp_path) as core:
        for name, given in (
            ("named", ab()),
            ("numbered", ab(a="INPUT__0", b="INPUT__1")),
            ("ordered", ab(a="first", b="second")),
        ):
            answer = await single(core, request(name, *given))
            assert values(answer, "OUTPUT__0") == [[4, 5]], name
            assert values(answer, "OUTPUT__1") == [[-4, -5]], name
        config = core.model_config("named")
        assert (config.backend, config.platform) == ("pytorch", "pytorch_libtorch")


async def test_a_dict_in_and_a_dict_out(tmp_path: Path) -> None:
    write(tmp_path, "keys", LIBTORCH + AB + tensors("output", DIFF="FP32 [ 2 ]"), script(ByKey()))
    write(tmp_path, "lacks", LIBTORCH + AB + tensors("output", NONE="FP32 [ 2 ]"), script(ByKey()))
    async with serving(tmp_path) as core:
        assert values(await single(core, request("keys", *ab())), "DIFF") == [[4, 5]]
        (bad,) = await collect(core, request("lacks", *ab()))
        assert "returned a dict with keys DIFF, UNUSED; it lacks NONE" in str(bad.error)


async def test_requests_are_run_in_one_batch_and_answered_apart(tmp_path: Path) -> None:
    batching = "dynamic_batching { max_queue_delay_microseconds: 100000 preferred_batch_size: 4 }"
    write(tmp_path, "m", LIBTORCH + AB + OUT + batching, script(Difference()))
    async with serving(tmp_path) as core:
        answers = await asyncio.gather(*(single(core, request("m", *ab(scale=i))) for i in range(4)))
        assert [values(answer, "OUTPUT__0") for answer in answers] == [[[4 * i, 5 * i]] for i in range(4)]
        assert core.statistics("m")[0].execution_count == 1


async def test_texts(tmp_path: Path) -> None:
    config = 'backend: "pytorch"\n' + tensors("input", words="STRING [ -1 ]") + tensors("output", Y="STRING [ -1 ]")
    write(tmp_path, "text", config, script(Spell()))
    async with serving(tmp_path) as core:
        given = Tensor("words", "BYTES", np.array([b"a", "ö".encode()], dtype=object))
        assert values(await single(core, request("text", given))) == [b"a!", "ö!".encode()]


async def test_one_bad_request_of_a_batch_spares_the_others(tmp_path: Path) -> None:
    config = LIBTORCH + tensors("input", index="INT64 [ 1 ]") + tensors("output", Y="FP32 [ 1 ]")
    write(tmp_path, "pick", config + "dynamic_batching {}", script(Pick()))
    async with serving(tmp_path) as core:
        asked = [request("pick", Tensor("index", "INT64", np.array([[i]]))) for i in (0, 7, 2)]
        first, bad, last = await asyncio.gather(*(collect(core, one) for one in asked))
    assert (values(first[0]), values(last[0])) == ([[10]], [[12]])
    assert "model 'pick' failed" in str(bad[0].error)


async def test_what_has_been_answered_does_not_change(tmp_path: Path) -> None:
    config = tensors("input", x="FP32 [ 2 ]") + tensors("output", S="FP32 [ 2 ]", X="FP32 [ 2 ]")
    write(tmp_path, "count", 'backend: "pytorch"\n' + config, script(Count()))
    given = floats(0, 1, name="x")
    async with serving(tmp_path) as core:
        first = await single(core, request("count", given))
        await single(core, request("count", given))
    assert given.data.tolist() == [0, 1]
    assert (values(first, "S"), values(first, "X")) == ([1, 2], [1, 2])


async def test_types_that_the_config_does_not_promise_are_errors(tmp_path: Path) -> None:
    write(tmp_path, "m", LIBTORCH + AB + tensors("output", Y="INT32 [ 2 ]"), script(Difference()))
    write(tmp_path, "many", LIBTORCH + AB + tensors("output", Y__7="FP32 [ 2 ]"), script(Difference()))
    async with serving(tmp_path) as core:
        (bad,) = await collect(core, request("m", *ab()))
        assert "returned output 'Y' of type float32, but its config says INT32" in str(bad.error)
        (bad,) = await collect(core, request("many", *ab()))
        assert "the model returned 2 outputs; it lacks Y__7" in str(bad.error)


async def test_parameters(tmp_path: Path) -> None:
    def parameter(key: str, value: str) -> str:
        return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'

    good = parameter("INFERENCE_MODE", "false") + parameter("DISABLE_OPTIMIZED_EXECUTION", "true")
    good += parameter("ENABLE_WEIGHT_SHARING", "true") + parameter("INTRA_OP_THREAD_COUNT", "1")
    write(tmp_path, "good", LIBTORCH + AB + OUT + good + "instance_group { count: 2 }", script(Difference()))
    bad = parameter("INFERENCE_MODE", "perhaps") + parameter("INTER_OP_THREAD_COUNT", "-1")
    write(tmp_path, "bad", LIBTORCH + AB + OUT + bad, script(Difference()))
    async with serving(tmp_path) as core:
        answers = await asyncio.gather(*(single(core, request("good", *ab())) for _ in range(8)))
        assert all(values(answer, "OUTPUT__0") == [[4, 5]] for answer in answers)
        text = reason(core, "bad")
    assert "INFERENCE_MODE must be true or false, got 'perhaps'" in text
    assert "INTER_OP_THREAD_COUNT must be an integer" in text


async def test_bfloat16(tmp_path: Path) -> None:
    config = LIBTORCH + AB.replace("FP32", "BF16") + OUT.replace("FP32", "BF16")
    write(tmp_path, "half", config, script(Difference()))
    async with serving(tmp_path) as core:
        given = [Tensor(tensor.name, "BF16", (tensor.data.view(np.uint32) >> 16).astype(np.uint16)) for tensor in ab()]
        answer = await single(core, request("half", *given))
    (output, _) = answer.outputs
    assert output.datatype == "BF16"
    assert (output.data.astype(np.uint32) << 16).view(np.float32).tolist() == [[4, 5]]


async def test_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    for name, filename in (("script", "model.pt"), ("exported", "model.pt2")):
        write_model(tmp_path, name, LIBTORCH + AB + OUT)
        (tmp_path / name / "1" / filename).write_bytes(b"nothing")
    write_model(tmp_path, "none", LIBTORCH + AB + OUT)
    write(tmp_path, "gpu", LIBTORCH + AB + OUT + "instance_group { kind: KIND_GPU }", script(Difference()))
    async with serving(tmp_path) as core:
        assert "script/1/model.pt cannot be loaded" in reason(core, "script")
        assert "exported/1/model.pt2 cannot be loaded" in reason(core, "exported")
        assert "none/1/model.pt does not exist" in reason(core, "none")
        if not has_gpu():
            assert "has kind KIND_GPU but no GPUs are available" in reason(core, "gpu")


async def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "m", LIBTORCH + AB + OUT, script(Difference()))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "llmserve.backends.pytorch.torch_model", raising=False)
    async with serving(tmp_path) as core:
        assert "pip install 'llmserve[pytorch]'" in reason(core, "m")
