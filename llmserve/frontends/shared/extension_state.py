"""State that a server's front ends share besides the core. Clients can read and set it over either protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from llmserve.core import EVERYBODY, Tenant
from llmserve.frontends.shared.api_keys import ApiKeys, HeaderOf
from llmserve.frontends.shared.cross_origin import CrossOrigin
from llmserve.frontends.shared.forwarded_headers import ForwardedHeaders
from llmserve.frontends.shared.log_settings import LogControl
from llmserve.frontends.shared.restrictions import Restrictions
from llmserve.frontends.shared.shared_memory import SharedMemory
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.frontends.shared.tracer import Tracer
from llmserve.tenant_counters import TenantCounters
from llmserve.wire.request_memory import RequestMemory


@dataclass(frozen=True, slots=True)
class Extensions:
    """Created once per server, before its front ends."""

    memory: SharedMemory = field(default_factory=SharedMemory)
    tracer: Tracer = field(default_factory=Tracer)
    logs: LogControl = field(default_factory=LogControl)
    http_headers: ForwardedHeaders = field(default_factory=ForwardedHeaders)
    grpc_headers: ForwardedHeaders = field(default_factory=ForwardedHeaders)
    http_restrictions: Restrictions = field(default_factory=Restrictions)
    grpc_restrictions: Restrictions = field(default_factory=Restrictions)
    api_keys: ApiKeys | None = None  # None: no key is required
    root_path: str = ""  # optional prefix of every HTTP path, for example behind a proxy
    cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    requests: RequestMemory = field(default_factory=RequestMemory)
    background: set[asyncio.Task[None]] = field(default_factory=set)  # work that no client waits for
    closing: ExitStack = field(default_factory=ExitStack)
    text: TextSettings = field(default_factory=TextSettings)
    grpc_compression: int = 0  # zlib's level for answers to inference; 0: no compression

    def tenant(self, header: HeaderOf) -> Tenant:
        """The tenant of a request with these headers; names are in lower case."""
        return EVERYBODY if self.api_keys is None else self.api_keys.tenant(header)

    def tenant_counters(self) -> Mapping[str, TenantCounters]:
        """Counters by the names of current API keys; anonymous requests are not counted."""
        return {} if self.api_keys is None else self.api_keys.counters()

    def close(self) -> None:
        """Call this after the front ends have stopped."""
        for task in [*self.background]:
            task.cancel()
        self.closing.close()
        self.memory.close()
        self.tracer.close()
        self.requests.close()
