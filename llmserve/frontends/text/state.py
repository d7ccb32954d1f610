"""The state that all endpoints share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from fastapi import Request

from llmserve.core import SAMPLING_DEFAULTS, Tenant
from llmserve.errors import InvalidArgument
from llmserve.frontends.http.admission import header_of
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.answers.generation import Caller, Sampling, Usage
from llmserve.frontends.text.answers.log_probs import TokenTexts
from llmserve.frontends.text.requests.ensembles import Ensemble, Ensembles, Values
from llmserve.frontends.text.requests.fields import Sampled
from llmserve.frontends.text.requests.messages import Conversations
from llmserve.frontends.text.requests.notes import current_notes, note
from llmserve.frontends.text.requests.validation import given_tenant, wire_request

LIMIT_WITHOUT_END = 1024  # tokens
END = "end_id"
DRAFT = "draft_input_ids"
OF_PROMPTS = ("text_input", "messages", "prompt_ids", "add_special_tokens", "chat_template_kwargs", "tools")  # inputs


@dataclass(frozen=True, slots=True)
class ApiState:
    """The state of one server's text APIs."""

    ensembles: Ensembles
    extensions: Extensions
    conversations: Conversations
    token_texts: TokenTexts
    embedders: Ensembles  # ensembles that make vectors
    created: int = field(default_factory=lambda: int(time.time()))  # time that models report

    @property
    def settings(self) -> TextSettings:
        return self.extensions.text

    def listed(self) -> list[str]:
        """The names that clients see: of models, of their adapters, and of models that make vectors."""
        return [*self.ensembles.listed(), *self.ensembles.adapters(), *self.embedders.listed()]

    async def sampling(self, ensemble: Ensemble, asked: Sampling) -> Sampling:
        """Fill unset fields from the operator's defaults, then from the checkpoint's. Without an end token, answers get
        a limit."""
        asked = asked.with_defaults(self.settings.sampling)
        if self.settings.checkpoint_sampling:
            asked = asked.with_defaults(self.ensembles.core.facts(ensemble.name).get(SAMPLING_DEFAULTS, {}))
        if self.settings.tells_metrics:
            asked = replace(asked, wants_metrics=True)
        if asked.max_tokens is None and not asked.more.get(END) and not await self.ensembles.has_end(ensemble):
            warning = f"this model has no end token: without max_tokens, answers end after {LIMIT_WITHOUT_END}"
            return replace(asked, max_tokens=LIMIT_WITHOUT_END, warning=warning)
        return asked

    async def cut_prompt(self, ensemble: Ensemble, prompt: Values, body: Sampled) -> Values:
        """The part of `prompt` that the request selects: ids that a router already made, or only some tokens."""
        given = None if body.kv_transfer_params is None else body.kv_transfer_params.prompt_token_ids
        most = body.truncate_prompt_tokens
        if given is None and most is None:
            return prompt
        ids = await self.ensembles.prompt_ids(ensemble, prompt) if given is None else given
        if most is not None:
            ids = ids[:most] if body.truncation_side == "right" else ids[-most:]
        return {**{name: each for name, each in prompt.items() if name not in OF_PROMPTS}, "prompt_ids": ids}

    async def drafts(self, ensemble: Ensemble, text: str) -> Values:
        """The tokens of the answer that a client predicts. Answers do not depend on them, so an unusable prediction is
        ignored with a note."""
        if not text:
            return {}
        problem = f"the ensemble has no input {DRAFT}"
        if DRAFT in ensemble.inputs:
            try:
                return {DRAFT: await self.ensembles.text_ids(ensemble, text)}
            except InvalidArgument as error:
                problem = f"its text cannot be used as a draft ({error})"
        if not note(f"prediction: {problem}"):
            raise Refused(f"prediction cannot be used: {problem}", "prediction")
        return {}

    def owner(self, request: Request) -> str:
        """The name of the request's API key."""
        return self._tenant(request).name

    def _tenant(self, request: Request) -> Tenant:
        return given_tenant(request) or self.extensions.tenant(header_of(wire_request(request)))

    def caller(self, request: Request) -> Caller:
        tenant = self._tenant(request)
        return Caller(self.ensembles.core, self.extensions, wire_request(request), tenant, current_notes())

    async def counted(self, ensemble: Ensemble, usage: Usage | None, thought: str | None) -> Usage | None:
        """`usage` with the number of tokens in `thought`, which is None if the model does not think."""
        if usage is None or thought is None:
            return usage
        num_tokens = await self.ensembles.num_tokens(ensemble, thought)
        return replace(usage, reasoning=min(num_tokens, usage.completion))
