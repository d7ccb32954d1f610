"""The workers that a server uses: `--cluster NAMESPACE.NAME`, and how to find and reach them. Does not need Dynamo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmserve.errors import InvalidArgument, raise_problems

PLANES: Mapping[str, tuple[str, ...]] = {  # the first is the default
    "discovery": ("file", "mem", "etcd", "kubernetes"),
    "request_plane": ("tcp", "nats"),
    "event_plane": ("zmq", "nats"),
}
EXAMPLE = "--cluster dynamo.demo, or dynamo.demo,discovery=etcd"


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    namespace: str
    component: str
    discovery: str = PLANES["discovery"][0]
    request_plane: str = PLANES["request_plane"][0]
    event_plane: str = PLANES["event_plane"][0]

    @property
    def name(self) -> str:
        return f"{self.namespace}.{self.component}"


def parse_address(text: str) -> ClusterAddress:
    """Parse `NAMESPACE.NAME[,KEY=VALUE]...`. Raises `InvalidArgument` with all problems."""
    place, *settings = text.split(",")
    namespace, dot, component = place.partition(".")
    problems = []
    if not (namespace and dot and component) or "." in component:
        problems.append(f"{place or 'nothing'} is not NAMESPACE.NAME, such as {EXAMPLE}")
    given: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in PLANES:
            problems.append(f"{setting} is not known; use {', '.join(f'{name}=...' for name in PLANES)}")
        elif value not in PLANES[key]:
            problems.append(f"{setting} is not known; use {', '.join(PLANES[key])}")
        given[key] = value
    raise_problems(InvalidArgument, f"--cluster {text}", problems)
    return ClusterAddress(namespace, component, **given)
