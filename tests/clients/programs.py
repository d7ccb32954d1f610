"""The clients that are programs of their own, and how each is made from its source."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from tritonclient.grpc import model_config_pb2, service_pb2

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LANGUAGES = ("js", "go", "java")
NODE_MODULES = ROOT / ".clients/node_modules"
DEBIAN_GO = "/usr/share/gocode"  # where Debian's packages have Go libraries
DEBIAN_JAVA = Path("/usr/share/java")
JARS = (
    "geronimo-annotation-1.3-spec", "grpc-api", "grpc-context", "grpc-core", "grpc-netty", "grpc-protobuf",
    "grpc-protobuf-lite", "grpc-stub", "guava", "netty-buffer", "netty-codec", "netty-codec-http", "netty-codec-http2",
    "netty-codec-socks", "netty-common", "netty-handler", "netty-handler-proxy", "netty-resolver", "netty-transport",
    "opencensus-api", "perfmark-api", "protobuf",
)  # fmt: skip
PROTOCOL = ("model_config.proto", "grpc_service.proto")


def describe(path: Path) -> Path:
    """The protocol for other languages' compilers."""
    files = FileDescriptorSet()
    for module in (model_config_pb2, service_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    path.write_bytes(files.SerializeToString())
    return path


def need(*tools: str) -> None:
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"there is no {', '.join(missing)}")


def build(language: str, folder: Path) -> list[str]:
    """The command of the client."""
    descriptors = describe(folder / "protocol.bin")
    return {"js": _javascript, "go": _go, "java": _java}[language](folder, descriptors)


def _javascript(folder: Path, descriptors: Path) -> list[str]:
    need("node")
    if not NODE_MODULES.is_dir():
        pytest.skip("there is no grpc-js")
    shutil.copy(HERE / "js/client.js", folder)
    (folder / "node_modules").symlink_to(NODE_MODULES)
    return ["node", str(folder / "client.js"), str(descriptors)]


def _go(folder: Path, descriptors: Path) -> list[str]:
    need("go", "protoc", "protoc-gen-go")
    package = folder / "src/inference"
    package.mkdir(parents=True)
    names = ",".join(f"M{name}=inference" for name in PROTOCOL)
    _run("protoc", f"--descriptor_set_in={descriptors}", f"--go_out=plugins=grpc,{names}:{package}", *PROTOCOL)
    environment = {"GO111MODULE": "off", "GOPATH": f"{folder}:{DEBIAN_GO}", "GOFLAGS": ""}
    _run("go", "build", "-o", str(folder / "client"), str(HERE / "go/client.go"), **environment)
    return [str(folder / "client")]


def _java(folder: Path, descriptors: Path) -> list[str]:
    need("javac", "java", "protoc", "grpc_java_plugin")
    if lacking := [jar for jar in JARS if not (DEBIAN_JAVA / f"{jar}.jar").exists()]:
        pytest.skip(f"there is no {', '.join(lacking)}.jar in {DEBIAN_JAVA}")
    plugin = f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin')}"
    out = [f"--java_out={folder}", f"--grpc-java_out={folder}"]
    _run("protoc", f"--descriptor_set_in={descriptors}", plugin, *out, *PROTOCOL)
    classes = f"{folder}:{':'.join(str(DEBIAN_JAVA / jar) + '.jar' for jar in JARS)}"
    sources = [str(path) for path in folder.glob("inference/*.java")]
    _run("javac", "-nowarn", "-cp", classes, "-d", str(folder), str(HERE / "java/Client.java"), *sources)
    return ["java", "-cp", classes, "Client"]


def _run(*command: str, **environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
