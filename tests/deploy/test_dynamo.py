"""deploy/dynamo: its pods against Kubernetes' schemas, and their programs, started with the operator's variables."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.deploy.test_helm import TOOLS, VERSIONS, validated
from tests.e2e.conftest import ROOT
from tools.cluster.local import ENVIRONMENT, LOCAL, free_port, is_there

# What the operator's API nvidia.com/v1alpha1 knows of a service; it drops other names without an error.
FIELDS = {
    "annotations", "autoscaling", "checkpoint", "componentType", "dynamoNamespace", "envFromSecret", "envs",
    "eppConfig", "extraPodMetadata", "extraPodSpec", "globalDynamoNamespace", "ingress", "labels", "livenessProbe",
    "modelRef", "multinode", "readinessProbe", "replicas", "resources", "scalingAdapter", "serviceName",
    "sharedMemory", "subComponentType", "volumeMounts",
}  # fmt: skip
TYPES = {"frontend", "worker", "prefill", "decode", "planner", "epp"}  # decide what the operator adds to a container
NAMESPACE, SUFFIX = "prod-llmserve", "3fa2c1d0"  # NAMESPACE-NAME of the deployment, and what each generation adds
HOSTS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST", "DYN_HTTP_HOST")
READY_S = 60


def services() -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "deploy/dynamo/llmserve.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("nvidia.com/v1alpha1", "DynamoGraphDeployment")
    assert set(document["spec"]) == {"services"}
    found = document["spec"]["services"]
    assert isinstance(found, dict)
    return found


def pods() -> list[dict[str, Any]]:
    """As the operator makes them: its own name for the container, and the resources that the service asks for."""
    made = []
    for name, service in services().items():
        spec = dict(service["extraPodSpec"])
        container = {"name": "main", **spec.pop("mainContainer"), "resources": service["resources"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.lower()}}
        made.append({**pod, "spec": {**spec, "containers": [container]}})
    return made


def test_services_have_fields_that_the_operator_knows() -> None:
    found = services()
    assert {name: set(service) - FIELDS for name, service in found.items()} == {name: set() for name in found}
    assert {service["componentType"] for service in found.values()} == {"frontend", "worker"} <= TYPES


@pytest.mark.skipif(not (TOOLS.parent / ".created").is_file(), reason="no schemas: make .venv-kube/.created")
@pytest.mark.parametrize("version", VERSIONS)
def test_pods_are_as_kubernetes_schemas_say(version: str, tmp_path: Path) -> None:
    made = pods()
    code, said = validated(made, tmp_path / "pods.yaml", version)
    assert code == 0, said
    made[1]["spec"]["terminationGracePeriod"] = made[1]["spec"].pop("terminationGracePeriodSeconds")
    code, said = validated(made, tmp_path / "pods.yaml", version)
    assert code != 0, "a wrong field is not found"
    assert "terminationGracePeriod" in said


@contextmanager
def pod(name: str, folder: Path, engine: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """The program of a pod. Its records are in a folder instead of in Kubernetes, and it listens on loopback only."""
    (spec,) = (each["spec"] for each in pods() if each["metadata"]["name"] == name)
    (container,) = spec["containers"]
    mount = container.get("volumeMounts", [{"mountPath": "/engines"}])[0]["mountPath"]
    arguments = [str(engine) if given.startswith(f"{mount}/") else given for given in container["args"]]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [ENVIRONMENT / "bin" / container["command"][0], *container["command"][1:], *arguments],
            env={**os.environ, **dict.fromkeys(HOSTS, LOCAL), "DYN_DISCOVERY_BACKEND": "file",
                 "DYN_FILE_KV": str(folder / "records"), **environment},
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while not answers(url):
        ended = process.poll() is not None or time.monotonic() > deadline
        assert not ended, log.read_text(errors="replace")[-3000:]
        time.sleep(0.1)


@pytest.mark.skipif(not is_there(), reason="there is no .venv-cluster: make cluster-env")
def test_what_pods_run_finds_each_other_answers_the_operators_probes_and_ends_in_time(
    engine: Path, tmp_path: Path
) -> None:
    (grace,) = (each["spec"].get("terminationGracePeriodSeconds", 0) for each in pods()[1:])
    http, system = free_port(), free_port(below=2**15)
    frontend = {"DYN_HTTP_PORT": str(http), "DYN_NAMESPACE": NAMESPACE, "DYN_NAMESPACE_PREFIX": NAMESPACE}
    worker = {
        "DYN_NAMESPACE": NAMESPACE, "DYN_NAMESPACE_WORKER_SUFFIX": SUFFIX, "DYN_SYSTEM_PORT": str(system),
        "DYN_SYSTEM_ENABLED": "true", "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
        "DYN_HEALTH_CHECK_ENABLED": "false", "DYN_COMPONENT": "worker",
    }  # fmt: skip
    (tmp_path / "records").mkdir()
    with (
        pod("frontend", tmp_path, engine, **frontend) as front,
        pod("worker", tmp_path, engine, **worker) as work,
    ):
        for path in ("/live", "/health"):
            wait_for(f"http://{LOCAL}:{system}{path}", work, tmp_path / "worker.log")
            wait_for(f"http://{LOCAL}:{http}{path}", front, tmp_path / "frontend.log")
        client = openai.OpenAI(base_url=f"http://{LOCAL}:{http}/v1", api_key="none", max_retries=0)
        deadline = time.monotonic() + READY_S
        while not (models := [model.id for model in client.models.list()]):
            assert time.monotonic() < deadline, (tmp_path / "frontend.log").read_text(errors="replace")[-3000:]
            time.sleep(0.1)
        assert models == ["chat"]
        answer = client.completions.create(model="chat", prompt="Summarize:\nThe key", max_tokens=8, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        (record,) = (tmp_path / "records").glob("v1/mdc/*")
        assert record.name.startswith(f"{NAMESPACE}-{SUFFIX}".replace("-", "%2D")), record.name
        # The front end's pod has no engine: what it reads of the model comes from the worker.
        assert f"http://{LOCAL}:{system}/v1/metadata/" in record.read_text()
        work.send_signal(signal.SIGTERM)
        assert work.wait(grace) == 0
