"""Certificates for a listening socket, read and checked at start: TLS 1.2 and later, HTTP/2 by ALPN.

`--grpc-use-ssl` shows clients the server's certificate; `--grpc-use-ssl-mutual` asks for theirs, too.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from llmserve.errors import InvalidArgument, raise_problems

CERTIFICATE, KEY = "CERTIFICATE", "PRIVATE KEY"  # what stands on the first line of PEM
HANDSHAKE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files, by tritonserver's flags; "": not given. `root` signs the clients' certificates."""

    certificate: str
    key: str
    root: str
    mutual: bool

    def problems(self) -> list[str]:
        found = [
            _problem("--grpc-server-cert", self.certificate, CERTIFICATE),
            _problem("--grpc-server-key", self.key, KEY),
        ]
        if self.mutual:
            found.append(_problem("--grpc-root-cert", self.root, CERTIFICATE))
        return [problem for problem in found if problem]


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Raises `InvalidArgument` with everything that is wrong with the files."""
    flag = "--grpc-use-ssl-mutual" if files.mutual else "--grpc-use-ssl"
    raise_problems(InvalidArgument, f"{flag}: connections cannot be encrypted", files.problems())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    pair = f"--grpc-server-cert {files.certificate} and --grpc-server-key {files.key}"
    try:
        context.load_cert_chain(files.certificate, files.key, password=_refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidArgument(f"{pair}: the key is not that of the certificate") from error
        raise InvalidArgument(f"{pair}: {error.reason or error}") from error
    if files.mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(files.root)
        except ssl.SSLError as error:
            raise InvalidArgument(f"--grpc-root-cert {files.root}: {error.reason or error}") from error
    return context


def _problem(flag: str, path: str, kind: str) -> str:
    if not path:
        return f"{flag} is missing"
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        return f"{flag} {path}: {error.strerror}"
    return "" if f"{kind}-----" in text else f"{flag} {path}: holds no {kind.lower()} in PEM"


def _refuse_password() -> NoReturn:
    raise InvalidArgument("--grpc-server-key is encrypted; give a key without a password")
