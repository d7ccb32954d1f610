"""Certificates for a listening socket, read and checked at start. TLS 1.2 and later; ALPN selects the protocol.

With `--grpc-use-ssl` or `--http-use-ssl` the server presents its certificate; `-mutual` also requires the client's.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from llmserve.errors import InvalidArgument, raise_problems

CERTIFICATE, KEY = "CERTIFICATE", "PRIVATE KEY"  # in the first line of a PEM file
PROTOCOLS = {"grpc": "h2", "http": "http/1.1"}  # their ALPN names
HANDSHAKE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files given by tritonserver's flags; "": not given. `root` signs the clients' certificates."""

    certificate: str
    key: str
    root: str
    mutual: bool
    port: str = "grpc"  # the port that the flags are for

    @property
    def flag(self) -> str:
        return f"--{self.port}-use-ssl-mutual" if self.mutual else f"--{self.port}-use-ssl"

    def problems(self) -> list[str]:
        found = [
            _problem(f"--{self.port}-server-cert", self.certificate, CERTIFICATE),
            _problem(f"--{self.port}-server-key", self.key, KEY),
        ]
        if self.mutual:
            found.append(_problem(f"--{self.port}-root-cert", self.root, CERTIFICATE))
        return [problem for problem in found if problem]


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """The TLS context of a server. Raises `InvalidArgument` with the problems of the files."""
    raise_problems(InvalidArgument, f"{files.flag}: TLS is not configured correctly", files.problems())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([PROTOCOLS[files.port]])
    pair = f"--{files.port}-server-cert {files.certificate} and --{files.port}-server-key {files.key}"

    def refuse_password() -> NoReturn:
        raise InvalidArgument(f"--{files.port}-server-key is encrypted; give a key without a password")

    try:
        context.load_cert_chain(files.certificate, files.key, password=refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidArgument(f"{pair}: the key does not match the certificate") from error
        raise InvalidArgument(f"{pair}: {error.reason or error}") from error
    if files.mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(files.root)
        except ssl.SSLError as error:
            raise InvalidArgument(f"--{files.port}-root-cert {files.root}: {error.reason or error}") from error
    return context


def _problem(flag: str, path: str, kind: str) -> str:
    if not path:
        return f"{flag} is missing"
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        return f"{flag} {path}: {error.strerror}"
    return "" if f"{kind}-----" in text else f"{flag} {path}: contains no {kind.lower()} in PEM"
