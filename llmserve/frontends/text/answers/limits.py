"""The remaining limits of an API key, as headers of an answer: OpenAI's names, and Anthropic's on its paths.

`requests` are concurrent answers, `tokens` are tokens per minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from llmserve.errors import LlmserveError
from llmserve.frontends.http.admission import header_of
from llmserve.frontends.http.error_answers import RETRY_AFTER_S
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.request_context import current_request
from llmserve.frontends.shared.server_core import Core
from llmserve.wire.http1.request import NO_HEADERS, Request

ANTHROPIC_PATHS = "/v1/messages"
Limit: TypeAlias = tuple[str, int, int, float]  # kind, limit, remaining, seconds until all are back


def limit_headers(core: Core, extensions: Extensions, request: Request) -> Mapping[str, str]:
    """The headers for the key and the model of `request`; empty if the key has no limits."""
    context = current_request()
    if context is None or not context.model:
        return NO_HEADERS
    tenant = extensions.tenant(header_of(request))
    if not (tenant.max_answers or tenant.tokens_per_minute):
        return NO_HEADERS
    try:
        left = core.allowance(context.model, tenant)
    except LlmserveError:  # the model was just unloaded
        return NO_HEADERS
    if left is None:
        return NO_HEADERS
    limits: list[Limit] = []
    if tenant.max_answers:
        back_s = RETRY_AFTER_S if left.num_answers < tenant.max_answers else 0  # an estimate: when another answer ends
        limits.append(("requests", tenant.max_answers, left.num_answers, back_s))
    if tenant.tokens_per_minute:
        limits.append(("tokens", tenant.tokens_per_minute, left.num_tokens, left.tokens_back_s))
    named = _anthropics if request.path.startswith(ANTHROPIC_PATHS) else _openais
    return {name: value for limit in limits for name, value in named(limit).items()}


def _openais(limit: Limit) -> dict[str, str]:
    kind, most, left, back_s = limit
    minutes, seconds = divmod(round(back_s, 3), 60)
    lasting = f"{minutes:.0f}m{seconds:g}s" if minutes else f"{seconds:g}s"
    return {
        f"x-ratelimit-limit-{kind}": str(most),
        f"x-ratelimit-remaining-{kind}": str(left),
        f"x-ratelimit-reset-{kind}": lasting,
    }


def _anthropics(limit: Limit) -> dict[str, str]:
    kind, most, left, back_s = limit
    moment = (datetime.now(UTC) + timedelta(seconds=back_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    prefix = f"anthropic-ratelimit-{kind}"
    return {f"{prefix}-limit": str(most), f"{prefix}-remaining": str(left), f"{prefix}-reset": moment}
