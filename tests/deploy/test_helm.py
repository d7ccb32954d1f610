"""deploy/helm: rendered by Helm, checked against Kubernetes' schemas, and what its pods run, run here."""

from __future__ import annotations

import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml

from tests.e2e.conftest import ROOT, llmserve, start_server

CHART = ROOT / "deploy/helm/llmserve"
TOOLS = ROOT / ".venv-kube/bin"
VERSIONS = ("1.29", "1.37")  # the oldest that the chart takes, and the newest that is known
ENGINE = ("engine.volumeClaim=engines", "engine.path=chat")
STORE = ("engine.repository=s3://bucket/models", "engine.credentialsSecret=s3")
EVERYTHING = (
    *ENGINE, "apiKeys.secret=keys", "autoscaling.enabled=true", "networkPolicy.enabled=true",
    "serviceMonitor.enabled=true",
    "networkPolicy.from[0].namespaceSelector.matchLabels.team=chat", "serviceMonitor.labels.release=prometheus",
    "inferencePool.enabled=true", "inferencePool.endpointPicker=picker", "server.extraArgs={--threads=2}",
    "server.env[0].name=LANG", "server.env[0].value=C.UTF-8", "imagePullSecrets[0].name=registry",
    "nodeSelector.disk=fast", "podAnnotations.engine=v2", "service.annotations.cost=chat", "tls.secret=certificate",
)  # fmt: skip
CUSTOM = {"ServiceMonitor": "monitoring.coreos.com/v1", "InferencePool": "inference.networking.k8s.io/v1"}

pytestmark = pytest.mark.skipif(not (TOOLS.parent / ".created").is_file(), reason="no Helm: make .venv-kube/.created")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOLS / "helm", *arguments], capture_output=True, text=True, timeout=60)


def rendered(*values: str, more: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    flags = [flag for value in values for flag in ("--set", value)]
    done = helm("template", "chat", str(CHART), *flags, *more)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def only(resources: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = [each for each in resources if each["kind"] == kind]
    assert len(found) == 1
    return found[0]


def container_of(resources: list[dict[str, Any]]) -> dict[str, Any]:
    (container,) = only(resources, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    done = helm("lint", str(CHART), "--strict", "--set", ",".join(ENGINE))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("values", "more"),
    [(ENGINE, ()), (STORE, ()), (EVERYTHING, ()), (ENGINE, ("-f", str(CHART / "values-gpu.yaml")))],
    ids=["volume", "store", "everything", "gpu"],
)
def test_what_kubernetes_knows_is_as_its_schemas_say(
    values: tuple[str, ...], more: tuple[str, ...], version: str, tmp_path: Path
) -> None:
    resources = [each for each in rendered(*values, more=more) if each["kind"] not in CUSTOM]
    assert len(resources) >= 4
    code, said = validated(resources, tmp_path / "all.yaml", version)
    assert code == 0, said
    assert said.count("passed") == len(resources), said
    container_of(resources)["livenessProbe"]["periodInSeconds"] = 5
    code, said = validated(resources, tmp_path / "all.yaml", version)
    assert code != 0, "what is wrong is not found"
    assert "periodInSeconds" in said


def validated(resources: list[dict[str, Any]], path: Path, version: str) -> tuple[int, str]:
    path.write_text(yaml.safe_dump_all(resources))
    command = [str(TOOLS / "kubernetes-validate"), "--strict", "--kubernetes-version", version, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_every_part_is_there_when_it_is_asked_for() -> None:
    resources = rendered(*EVERYTHING)
    assert sorted(each["kind"] for each in resources) == [
        "Deployment", "HorizontalPodAutoscaler", "InferencePool", "NetworkPolicy", "PodDisruptionBudget", "Service",
        "Service", "ServiceMonitor",
    ]  # fmt: skip
    for kind, version in CUSTOM.items():  # no schema of these is at hand
        assert only(resources, kind)["apiVersion"] == version
    pool = only(resources, "InferencePool")["spec"]
    assert pool["endpointPickerRef"] == {"name": "picker", "port": {"number": 9002}}
    assert pool["targetPorts"] == [{"number": 8000}]
    labels = only(resources, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for selector in (
        pool["selector"]["matchLabels"], only(resources, "ServiceMonitor")["spec"]["selector"]["matchLabels"],
        only(resources, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        *(each["spec"]["selector"] for each in resources if each["kind"] == "Service"),
    ):  # fmt: skip
        assert selector.items() <= labels.items()
    assert "replicas" not in only(resources, "Deployment")["spec"], "the autoscaler's"
    job = only(resources, "ServiceMonitor")["spec"]["jobLabel"]
    assert {each["metadata"]["labels"][job] for each in resources if each["kind"] == "Service"} == {"llmserve"}
    assert 'up{job="llmserve"}' in (ROOT / "deploy/prometheus/alerts.yml").read_text()


def test_names_are_short_enough_for_kubernetes() -> None:
    release = "r" * 53  # the longest that Helm takes
    done = helm("template", release, str(CHART), *(flag for value in ENGINE for flag in ("--set", value)))
    names = [document["metadata"]["name"] for document in yaml.safe_load_all(done.stdout) if document]
    assert max(map(len, names)) == 63


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ((), ["engine: give volumeClaim and path, or repository"]),
        ((*ENGINE, *STORE), ["engine: give volumeClaim and path, or repository, not both"]),
        (("engine.volumeClaim=engines",), ["engine.path: which directory of the volume claim is the engine?"]),
        ((*STORE, "engine.path=x"), ["engine.path belongs to a volume claim"]),
        (
            ("engine.volumeClaim=engines", "engine.path=/chat", "inferencePool.enabled=true",
             "autoscaling.enabled=true", "autoscaling.minReplicas=9"),
            ["engine.path is relative to the volume", "inferencePool.endpointPicker: the name", "more than maxRep"],
        ),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_all_at_once(values: tuple[str, ...], problems: list[str]) -> None:
    done = helm("template", "chat", str(CHART), *(flag for value in values for flag in ("--set", value)))
    assert done.returncode != 0
    assert all(problem in done.stderr for problem in problems), done.stderr


@pytest.mark.parametrize("scheme", ["HTTPS", "HTTP"])
def test_what_a_pod_runs_serves_answers_its_probes_and_ends_in_time(scheme: str, engine: Path, tmp_path: Path) -> None:
    plain = () if scheme == "HTTPS" else ("tls.secret=",)
    resources = rendered(*EVERYTHING, *plain, "server.shutdownDelaySeconds=1", "server.exitTimeoutSeconds=4")
    container = container_of(resources)
    command, *arguments = container["args"]
    assert command == "serve"
    places = {"/engines/chat": str(engine), "/secrets": str(tmp_path), "/tls/": f"{tmp_path}/"}
    here = [argument for argument in arguments if not argument.startswith("--host=")]
    for place, found in places.items():
        here = [argument.replace(place, found) for argument in here]
    made = llmserve("api-key", "team")
    assert made.returncode == 0
    (tmp_path / "api-keys.yaml").write_text("keys:\n" + made.stdout.partition("\n")[2])
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "tls.key")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    server = start_server(*here)
    try:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = container[probe]["httpGet"]
            assert (get["port"], get.get("scheme", "HTTP")) == ("http", scheme)
            url = server.http.replace("http", scheme.lower()) + get["path"]
            assert httpx.get(url, verify=trusting).status_code == 200
        metrics = httpx.get(server.metrics).text
        for each in only(resources, "HorizontalPodAutoscaler")["spec"]["metrics"]:
            metric = each["pods"]["metric"]
            ((label, value),) = metric["selector"]["matchLabels"].items()
            assert any(
                line.startswith(metric["name"]) and f'{label}="{value}"' in line for line in metrics.splitlines()
            ), metric
    finally:
        server.process.send_signal(signal.SIGTERM)
    grace = only(resources, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert server.process.wait(grace) == 0


def test_the_adapters_rules_name_what_is_scaled_by() -> None:
    (rule,) = yaml.safe_load((ROOT / "deploy/kubernetes/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    for each in only(rendered(*EVERYTHING), "HorizontalPodAutoscaler")["spec"]["metrics"]:
        assert each["pods"]["metric"]["name"] in rule["seriesQuery"]
