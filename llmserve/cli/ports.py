"""Checks of the ports that a server listens on."""

from __future__ import annotations

from llmserve.cli.serve_options import ServeOptions
from llmserve.errors import InvalidArgument


def check_ports(options: ServeOptions) -> None:
    """Raises `InvalidArgument` if two services have the same port."""
    http_host = options.http_address or options.host
    listeners = (
        ("--http-port", options.allow_http, http_host, options.http_port),
        ("--grpc-port", options.allow_grpc, options.grpc_address or options.host, options.grpc_port),
        ("--metrics-port", options.allow_metrics, options.metrics_address or http_host, options.metrics_port),
    )
    users: dict[tuple[str, int], str] = {}
    for flag, is_allowed, host, port in listeners:
        if is_allowed and port and (other := users.setdefault((host, port), flag)) != flag:
            raise InvalidArgument(f"{other} and {flag} are both {port}; give each its own port")
