"""Forwards headers and metadata of requests to the model as request parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace

from llmserve.core import EVERYBODY, Tenant
from llmserve.errors import InvalidArgument
from llmserve.serving.instruments.trace import Trace
from llmserve.serving.types import InferRequest

FLAGS_AT_START = re.compile(r"\(\?([a-z]*-[a-z]+)\)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ForwardedHeaders:
    """Selects headers whose name contains a match; none without a pattern. Ignores case unless it begins with (?-i)."""

    pattern: re.Pattern[str] | None = None
    secret: Set[str] = frozenset()  # names in lower case that are never forwarded

    @classmethod
    def matching(cls, pattern: str, flag: str, secret: Set[str] = frozenset()) -> ForwardedHeaders:
        """Raises `InvalidArgument`, naming the flag, if `pattern` is not a regular expression."""
        # RE2, which Triton uses, removes flags for the rest of the pattern; Python requires an explicit scope
        scoped = FLAGS_AT_START.sub(r"(?\1:\2)", pattern) if FLAGS_AT_START.fullmatch(pattern) else pattern
        try:
            return cls(re.compile(scoped, re.IGNORECASE) if scoped else None, secret)
        except re.error as error:
            raise InvalidArgument(f"{flag} {pattern}: not a regular expression: {error}") from error

    def chosen(self, headers: Callable[[], Iterable[tuple[str, str | bytes]]]) -> dict[str, str]:
        """The selected headers by name; the last of several wins. Without a pattern, `headers` is not called."""
        if self.pattern is None:
            return {}
        return {
            name: value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
            for name, value in headers()
            if self.pattern.search(name) and name.lower() not in self.secret
        }


def accompanied(request: InferRequest, trace: Trace | None, headers: dict[str, str], tenant: Tenant) -> InferRequest:
    """The request with its trace and tenant, and with headers as parameters, which override the client's own."""
    if trace is None and not headers and tenant is EVERYBODY:
        return request
    return replace(request, trace=trace, parameters={**request.parameters, **headers}, tenant=tenant)
