"""Access to a server: the flags that restrict calls, and the warnings at start about unrestricted ones."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llmserve.cli.serve_options import ServeOptions
from llmserve.frontends.shared.restrictions import VARIABLES
from llmserve.serving.settings import ControlMode

if TYPE_CHECKING:
    from llmserve.frontends.shared.api_keys import ApiKeys
    from llmserve.frontends.shared.extension_state import Extensions
    from llmserve.frontends.shared.restrictions import Api, Restrictions

HTTP_VARIABLE, GRPC_VARIABLE, KEY_VARIABLE, ADMIN_VARIABLE = VARIABLES
KEY_VARIABLES = {KEY_VARIABLE: ("environment", False), ADMIN_VARIABLE: ("environment-admin", True)}


def http_restrictions(options: ServeOptions) -> Restrictions:
    """Raises `InvalidArgument`."""
    from llmserve.frontends.shared.restrictions import parse_restrictions

    given = _with_environment(options.http_restricted_api, HTTP_VARIABLE)
    return parse_restrictions(given, "--http-restricted-api", kind="api")


def grpc_restrictions(options: ServeOptions) -> Restrictions:
    """Raises `InvalidArgument`."""
    from llmserve.frontends.shared.restrictions import GRPC_PREFIX, parse_restrictions

    given = _with_environment(options.grpc_restricted_protocol, GRPC_VARIABLE)
    return parse_restrictions(given, "--grpc-restricted-protocol", kind="protocol", prefix=GRPC_PREFIX)


def make_api_keys(options: ServeOptions) -> ApiKeys | None:
    """Keys from the file and the environment. Models' processes do not inherit the latter. Raises `InvalidArgument`."""
    from llmserve.frontends.shared.api_keys import ApiKeys, owner_of_key

    given = {variable: os.environ.pop(variable, "") for variable in KEY_VARIABLES}
    fixed = [
        owner_of_key(name, given[variable], is_admin=is_admin, source=variable)
        for variable, (name, is_admin) in KEY_VARIABLES.items()
        if given[variable]
    ]
    return ApiKeys(options.api_keys, fixed) if fixed or options.api_keys is not None else None


def _with_environment(options: Sequence[str] | None, variable: str) -> list[str]:
    """Restrictions from flags and from the variable; all apply. Models' processes do not inherit the variable."""
    return [*(options or ()), *os.environ.pop(variable, "").split()]


def exposures(options: ServeOptions, extensions: Extensions) -> Iterator[str]:
    """Warnings about what anyone who reaches a port can do there with the server's rights."""
    from llmserve.frontends.shared.restrictions import Api

    if extensions.api_keys is not None:
        return
    http, grpc = extensions.http_restrictions, extensions.grpc_restrictions
    if options.model_control_mode == ControlMode.EXPLICIT:
        for port, flag in _open_ports(options, Api.MODEL_REPOSITORY, http, grpc):
            yield (
                f"anyone who reaches {port} can load models, including files in the request: code that runs with "
                f"this server's rights. Restrict it ({flag}) or listen on a loopback address; see docs/security.md"
            )
    if options.allow_client_shm:
        for port, flag in _open_ports(options, Api.SHARED_MEMORY, http, grpc):
            yield (
                f"anyone who reaches {port} can read and write the shared memory of this server's user. Restrict it "
                f"({flag}) or listen on a loopback address; see docs/security.md"
            )


def _open_ports(options: ServeOptions, api: Api, http: Restrictions, grpc: Restrictions) -> Iterator[tuple[str, str]]:
    """Ports on which other machines can call `api` without restrictions, with the flag that restricts it."""
    if options.allow_http and api not in http.keys and not options.http_use_ssl_mutual:
        host = options.http_address or options.host
        if not is_loopback(host):
            yield f"HTTP on {host}:{options.http_port}", f"--http-restricted-api={api}:HEADER=VALUE"
    if options.allow_grpc and api not in grpc.keys and not options.grpc_use_ssl_mutual:
        host = options.grpc_address or options.host
        if not is_loopback(host):
            yield f"gRPC on {host}:{options.grpc_port}", f"--grpc-restricted-protocol={api}:HEADER=VALUE"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    try:
        found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
