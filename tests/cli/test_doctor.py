"""`llmserve doctor` on this machine, on one with fake GPUs, and on machines where things are not there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from llmserve.cli import machine, targets
from llmserve.cli.main import main
from llmserve.engine.machine import cgroups
from llmserve.engine.native import library
from llmserve.engine.runtime import Check
from llmserve.errors import Unsupported
from tests.fakes.gpu_machine import environment, gpu_machine

LLMSERVE = Path(sys.executable).with_name("llmserve")


def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["llmserve", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0, capsys.readouterr().out  # type: ignore[return-value]


def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code, text = doctor(monkeypatch, capsys, "--json")
    return code, json.loads(text)


def unmet(found: dict[str, Any], target: str) -> dict[str, dict[str, str]]:
    return {check["need"]: check for check in found["targets"][target]["checks"] if not check["is_met"]}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def refuse(*arguments: Any, **more: Any) -> NoReturn:
    raise OSError("not on this machine")


@pytest.mark.usefixtures("no_gpu")
def test_the_default_target_works_without_a_gpu_and_the_other_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = report(monkeypatch, capsys)
    assert code == 0
    assert found["default_target"] == "cpu"
    assert found["targets"]["cpu"]["works"]
    assert found["machine"]["cores"]["usable"] >= 1
    assert found["machine"]["GPUs"] == []
    assert "numpy" in found["machine"]["packages"]
    missing = unmet(found, "tensorrt_llm")
    assert "nvidia-smi" in missing["NVIDIA GPU and driver"]["found"]
    advice = missing["TensorRT-LLM"]["advice"]
    assert "pip install 'llmserve[tensorrt]' --extra-index-url https://pypi.nvidia.com" in advice
    assert "Python 3.10 and 3.12 (cp310, cp312)" in advice
    assert all(check["advice"] for need, check in missing.items() if need != "TensorRT")


@pytest.mark.usefixtures("no_gpu")
def test_the_exit_code_is_about_the_target_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = doctor(monkeypatch, capsys, "--target", "tensorrt_llm")
    assert code == 1
    assert "target cpu (the default): works here" in text
    assert "target tensorrt_llm: does not work here" in text
    assert doctor(monkeypatch, capsys, "--target", "tpu")[0] == 2


def test_fake_gpus_and_tensorrt_llm_are_found() -> None:
    done = subprocess.run(
        [LLMSERVE, "doctor", "--json"], env=environment("1.2"), capture_output=True, text=True, check=True, timeout=60
    )
    found = json.loads(done.stdout)
    assert [gpu["name"] for gpu in found["machine"]["GPUs"]] == ["NVIDIA Fake 80GB"] * 2
    checks = {check["need"]: check for check in found["targets"]["tensorrt_llm"]["checks"]}
    assert "1.2.1, engine mode" in checks["TensorRT-LLM"]["found"]
    assert checks["TensorRT"]["is_met"]
    assert checks["NVIDIA GPU and driver"]["advice"] == ""


def test_an_old_gpu_is_told_and_not_refused() -> None:
    with gpu_machine("1.2", FAKE_GPU_CAPABILITY="7.5"):
        (check,) = [check for check in targets.check_targets()["tensorrt_llm"] if "GPU" in check.need]
    assert check.is_met
    assert "compute capability 8.0 and newer" in check.advice


def test_mpi_is_found_where_only_the_dynamic_linker_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("llmserve.engine.tensorrt_llm.needs._in_linker_cache", lambda prefix: "")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere{os.pathsep}{tmp_path}")
    (check,) = [check for check in targets.check_targets()["tensorrt_llm"] if check.need == "MPI"]
    assert not check.is_met
    (tmp_path / "libmpi.so.40").touch()
    (check,) = [check for check in targets.check_targets()["tensorrt_llm"] if check.need == "MPI"]
    assert check.is_met
    assert check.found == str(tmp_path / "libmpi.so.40")


@pytest.mark.usefixtures("no_gpu")
def test_advice_has_a_narrow_terminals_whole_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, text = doctor(monkeypatch, capsys)
    assert "\n    -> use a machine with one, or build with --target cpu" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("stderr", ["NVIDIA-SMI has failed because it couldn't communicate with the driver", ""])
def test_a_driver_that_does_not_answer_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, stderr: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "{stderr}" >&2\nexit 9\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    code, found = report(monkeypatch, capsys)
    assert code == 0
    assert stderr in unmet(found, "tensorrt_llm")["NVIDIA GPU and driver"]["found"]


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_that_says_nothing_about_itself_still_gets_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cgroups, "CGROUP_ROOT", tmp_path / "none")
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "none")
    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)
    code, found = report(monkeypatch, capsys)
    assert code == 1
    assert found["machine"]["memory"] == {"error": "not on this machine"}
    assert found["machine"]["cores"] == {"error": "not on this machine"}
    assert unmet(found, "cpu").keys() == {"memory"}


@pytest.mark.usefixtures("no_gpu")
def test_without_the_kernel_library_the_default_target_does_not_work_and_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def load() -> library.Library:
        return library.Library(tmp_path / "nothing.so")

    monkeypatch.setattr(library, "load_library", load)
    code, found = report(monkeypatch, capsys)
    assert code == 1
    missing = unmet(found, "cpu")
    assert missing.keys() == {"kernel library", "instruction set"}
    assert "pip install" in missing["kernel library"]["advice"]


@pytest.mark.usefixtures("no_gpu")
def test_packages_that_are_missing_are_one_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(targets, "required_packages", lambda: {"numpy": "2.0", "grpcio": "", "jinja2": ""})
    code, found = report(monkeypatch, capsys)
    assert code == 1
    assert unmet(found, "cpu")["llmserve's packages"]["advice"] == "pip install grpcio jinja2"


def test_code_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_metadata(name: str) -> NoReturn:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(machine, "requires", no_metadata)
    (check,) = [check for check in targets.check_targets()["cpu"] if check.need == "llmserve's packages"]
    assert check.advice == "pip install llmserve"


def test_a_port_in_use_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(machine, "PORTS", (port,))
        (fact,) = [fact for fact in machine.machine_facts() if fact.name == "ports"]
    assert fact.data == {str(port): "is taken"}


def test_no_fact_of_ours_is_an_unknown_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(need: str) -> Check:
        raise Unsupported("there is none; get one")

    monkeypatch.setattr(targets, "RUNTIMES", ["npu"])
    monkeypatch.setattr(targets, "COMMON", {"thing": ask})
    assert targets.check_targets() == {"npu": [Check("thing", False, "there is none", "get one")]}
