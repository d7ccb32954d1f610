"""Other front ends on the HTTP port, next to Triton's paths. The caller that starts the server mounts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from llmserve.frontends.http.admission import Refuse, guard_of, in_tritons_words
from llmserve.frontends.http.routes import Guard
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.restrictions import API_OF_PATH
from llmserve.frontends.shared.server_core import Core
from llmserve.wire.http1.connection import Handler


@dataclass(frozen=True, slots=True)
class Mount:
    paths: Sequence[tuple[str, str]]  # method, path
    handler: Handler
    is_public: bool = False  # static files: their paths are in no API group, so they are never restricted
    prefixes: tuple[str, ...] = ()  # of paths where `refuse` also answers unknown ones, and every request has an id
    refuse: Refuse = in_tritons_words
    canonical: Callable[[str], str] = str  # maps an unknown path to the path that it means

    def guard(self, path: str, extensions: Extensions) -> Guard | None:
        if self.is_public:
            return None
        return guard_of(API_OF_PATH[path], extensions.http_restrictions, extensions.api_keys, self.refuse)


MakeMount: TypeAlias = Callable[[Core, Extensions, int], Mount]  # the last argument: maximum bytes of a body
