"""Headers and metadata of requests that go on to the model as request parameters."""

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
    """Those whose name contains a match, whatever its case unless the pattern begins with (?-i); none without one."""

    pattern: re.Pattern[str] | None = None
    secret: Set[str] = frozenset()  # in lower case: these stay here, whatever the pattern

    @classmethod
    def matching(cls, pattern: str, flag: str, secret: Set[str] = frozenset()) -> ForwardedHeaders:
        """Raises `InvalidArgument`, naming the flag, when `pattern` is no regular expression."""
        # RE2, which Triton has, takes flags away from all that follows; Python wants to be told where that ends
        scoped = FLAGS_AT_START.sub(r"(?\1:\2)", pattern) if FLAGS_AT_START.fullmatch(pattern) else pattern
        try:
            return cls(re.compile(scoped, re.IGNORECASE) if scoped else None, secret)
        except re.error as error:
            raise InvalidArgument(f"{flag} {pattern}: not a regular expression: {error}") from error

    def chosen(self, headers: Callable[[], Iterable[tuple[str, str | bytes]]]) -> dict[str, str]:
        """By name; the last of several wins. Without a pattern, `headers` is not asked."""
        if self.pattern is None:
            return {}
        return {
            name: value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
            for name, value in headers()
            if self.pattern.search(name) and name.lower() not in self.secret
        }


def accompanied(request: InferRequest, trace: Trace | None, headers: dict[str, str], tenant: Tenant) -> InferRequest:
    """The request with its trace, with headers as parameters, which go before the client's own, and whom it is for."""
    if trace is None and not headers and tenant is EVERYBODY:
        return request
    return replace(request, trace=trace, parameters={**request.parameters, **headers}, tenant=tenant)
