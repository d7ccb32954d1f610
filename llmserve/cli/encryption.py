"""TLS settings of the ports of `llmserve serve`."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from llmserve.cli.serve_options import ServeOptions

if TYPE_CHECKING:
    from llmserve.wire.tls import TlsFiles


def grpc_tls(options: ServeOptions) -> ssl.SSLContext | None:
    """None: not encrypted. Raises `InvalidArgument`."""
    is_encrypted = options.allow_grpc and (options.grpc_use_ssl or options.grpc_use_ssl_mutual)
    return _context(_grpc_files(options)) if is_encrypted else None


def http_tls(options: ServeOptions) -> ssl.SSLContext | None:
    """None: not encrypted. Raises `InvalidArgument`."""
    is_encrypted = options.allow_http and (options.http_use_ssl or options.http_use_ssl_mutual)
    return _context(_http_files(options)) if is_encrypted else None


def metrics_tls(options: ServeOptions) -> ssl.SSLContext | None:
    """As for the HTTP port, including client certificates. None: not encrypted. Raises `InvalidArgument`."""
    return _context(_http_files(options)) if options.allow_metrics and options.metrics_use_ssl else None


def files_without_effect(options: ServeOptions) -> list[str]:
    """Flags of files that no port uses."""
    uses_http = options.http_use_ssl or options.http_use_ssl_mutual or options.metrics_use_ssl
    idle = [] if options.grpc_use_ssl or options.grpc_use_ssl_mutual else [_grpc_files(options)]
    idle += [] if uses_http else [_http_files(options)]
    return [
        f"--{files.port}-server-{name} (without --{files.port}-use-ssl)"
        for files in idle
        for name, path in (("cert", files.certificate), ("key", files.key))
        if path
    ]


def _grpc_files(options: ServeOptions) -> TlsFiles:
    from llmserve.wire.tls import TlsFiles

    mutual = options.grpc_use_ssl_mutual
    return TlsFiles(options.grpc_server_cert, options.grpc_server_key, options.grpc_root_cert, mutual=mutual)


def _http_files(options: ServeOptions) -> TlsFiles:
    from llmserve.wire.tls import TlsFiles

    certificate, key, root = options.http_server_cert, options.http_server_key, options.http_root_cert
    return TlsFiles(certificate, key, root, mutual=options.http_use_ssl_mutual, port="http")


def _context(files: TlsFiles) -> ssl.SSLContext:
    from llmserve.wire.tls import server_context

    return server_context(files)
