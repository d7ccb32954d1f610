"""The peers' own virtual environment, `.venv-bench`. Packages that cannot be installed are left out, with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

# The choice of torch affects gigabytes of downloads, so other packages may not change it.
TORCH = "torch==2.13.0"
STATUS_FILE = "installed.json"
INSTALL_TIMEOUT_S = 3600
REASON_LINES = 3
SOURCES = Path(__file__).with_name("peers")  # sources that are compiled into peers

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Group:
    """Requirements that are installed together. The `tools.benchmark.peers` modules in `modules` need them."""

    name: str
    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()  # installed without dependencies, after the others
    environment: Callable[[], dict[str, str]] = dict  # variables for pip

    @property
    def key(self) -> str:
        """Identifies the requirements: if it differs, the group is installed again."""
        return " ".join((*self.requirements, *self.without_dependencies, *map(str, self.environment().items())))


def native() -> dict[str, str]:
    """Compiles llama.cpp for this processor."""
    languages = [f"-DCMAKE_{language}_FLAGS='-include {SOURCES / 'tiles.h'}'" for language in ("C", "CXX")]
    return {"CMAKE_ARGS": " ".join(["-DGGML_NATIVE=ON", *languages])}


def from_source() -> dict[str, str]:
    """Compiles ik_llama.cpp, because its wheel is for processors without AVX-512."""
    arguments = f"{native()['CMAKE_ARGS']} -DCMAKE_PROJECT_INCLUDE={SOURCES / 'ik_llama.cmake'}"
    return {"CMAKE_ARGS": arguments, "PIP_NO_BINARY": "ik-llama-cpp-python"}


ALL = ("openvino_genai", "llama_cpp", "ik_llama_cpp", "torch_eager")
GROUPS = (
    Group("base", ("numpy", "safetensors", "matplotlib"), ALL),
    Group("torch", (TORCH,), ("torch_eager", "openvino_genai")),
    Group("transformers", ("transformers>=4.51,<5.6", "accelerate"), ("torch_eager", "openvino_genai")),
    Group("openvino", ("openvino-genai", "openvino", "openvino-tokenizers"), ("openvino_genai",)),
    # optimum-intel also requires torchvision, but only for images
    Group("export", ("nncf>=3.3", "optimum~=2.3.0", "setuptools", "requests"), ("openvino_genai",), ("optimum-intel",)),
    Group("gguf", ("gguf",), ("llama_cpp", "ik_llama_cpp")),
    Group("llama.cpp", ("llama-cpp-python",), ("llama_cpp", "ik_llama_cpp"), (), native),
    Group("ik_llama.cpp", ("ik-llama-cpp-python",), ("ik_llama_cpp",), (), from_source),
)


def groups_of(modules: Iterable[str]) -> tuple[Group, ...]:
    """Groups that these modules need, and those for the losses' reference. Compiling others takes half an hour."""
    needed = {"torch_eager", *modules}
    return tuple(group for group in GROUPS if not needed.isdisjoint(group.modules))


class Environment:
    def __init__(self, folder: Path, say: Say) -> None:
        self.python = folder / "bin" / "python"
        self._folder = folder
        self._say = say

    def install(self, groups: tuple[Group, ...] = GROUPS) -> dict[str, str]:
        """Makes the environment and installs what is missing. Returns module -> reason for modules that cannot run."""
        self._folder.mkdir(exist_ok=True)
        if not self.python.exists():
            self._say(f"creating {self._folder.name}")
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(self._folder)], check=True)
        (self._folder / "constraints.txt").write_text(f"{TORCH}\n")
        installed: dict[str, str] = self._read_status()
        reasons: dict[str, str] = {}
        for group in groups:
            if installed.get(group.name) == group.key:
                continue
            if reason := self._install(group):
                self._say(f"{group.name} could not be installed: {reason}")
                reasons.update(dict.fromkeys(group.modules, f"{group.name} could not be installed: {reason}"))
            else:
                installed[group.name] = group.key
                (self._folder / STATUS_FILE).write_text(json.dumps(installed, indent=2))
        return reasons

    def _read_status(self) -> dict[str, str]:
        path = self._folder / STATUS_FILE
        return json.loads(path.read_text()) if path.exists() else {}

    def _install(self, group: Group) -> str:
        """Returns why it failed, or an empty string."""
        self._say(f"installing {', '.join((*group.requirements, *group.without_dependencies))}")
        constraints = str(self._folder / "constraints.txt")
        reason = self._pip("--constraint", constraints, *group.requirements, environment=group.environment())
        if group.without_dependencies and not reason:
            reason = self._pip("--no-deps", *group.without_dependencies, environment=group.environment())
        return reason

    def _pip(self, *arguments: str, environment: dict[str, str]) -> str:
        command = ["nice", str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        try:
            done = subprocess.run(
                [*command, "install", *arguments],
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"pip took longer than {INSTALL_TIMEOUT_S} s"
        return last_lines(done.stderr) if done.returncode else ""


def last_lines(text: str) -> str:
    """Returns the end of a program's error output, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-REASON_LINES:])[:500] or "no message"
