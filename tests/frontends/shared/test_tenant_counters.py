"""Whatever requests come and end, and whatever the key file becomes meanwhile: each counts once, for its name."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from llmserve.core import Tenant
from llmserve.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    LlmserveError,
    RateLimited,
    ResourceExhausted,
)
from llmserve.frontends.shared.api_keys import ApiKeys, owner_of_key
from llmserve.serving.instruments.metrics_settings import MetricsSettings
from llmserve.serving.observe.exposition import ServerCollector, metrics_text
from llmserve.serving.observe.tenant_requests import CountedRequest, counted_request
from llmserve.serving.schedulers.base import Rejected, SequenceError
from llmserve.serving.types import InferResponse
from llmserve.tenant_counters import LIMITS, OUTCOMES, TOKENS_PER_MINUTE

NAMES = ("a", "b", "c", "fixed")
MODELS = ("m", "n")
# what is raised or answered, and what it counts as
ERRORS: tuple[tuple[LlmserveError, str], ...] = (
    (RateLimited("later", limit=TOKENS_PER_MINUTE), "tokens_per_minute"),
    (RateLimited("wait").at("in ensemble 'e'"), "max_answers"),
    (ResourceExhausted("full"), "server"),
    (Rejected("full"), "server"),
    (SequenceError("no sequence"), "failed"),
    (InternalError("broken"), "failed"),
    (DeadlineExceeded("too late"), "cancelled"),
    (Cancelled("stopped"), "cancelled"),
)


def key_of(name: str) -> str:
    return f"{name}-0123456789abcdef"


class Counting(RuleBasedStateMachine):
    @initialize()
    def begin_with_all(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name) / "keys.yaml"
        self.expected: dict[str, Counter[tuple[str, str]]] = {"fixed": Counter()}
        self.open: list[tuple[CountedRequest, Counter[tuple[str, str]], str]] = []
        self.write(set(NAMES[:2]))
        fixed = owner_of_key("fixed", key_of("fixed"), is_admin=False, source="here")
        self.keys = ApiKeys(self.file, [fixed])

    def teardown(self) -> None:
        self.folder.cleanup()

    def write(self, names: set[str]) -> None:
        entries = ", ".join(f"{{name: {name}, key: {key_of(name)}-2}}" for name in sorted(names))
        new = self.file.with_suffix(".new")
        new.write_text(f"keys: [{entries}]")
        os.replace(new, self.file)
        self.expected = {name: self.expected.get(name, Counter()) for name in (*names, "fixed")}

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def the_file_changes(self, names: set[str]) -> None:
        self.write(names)
        self.keys._next_check = 0.0

    @rule(name=st.sampled_from(NAMES), model=st.sampled_from(MODELS))
    def a_request_comes(self, name: str, model: str) -> None:
        header = {"authorization": key_of(name) + ("" if name == "fixed" else "-2")}.get
        tenant = self.keys.tenant(header)
        counted = counted_request(tenant, model)
        if name not in self.expected:  # its key was withdrawn while it came, or there never was one
            assert tenant == Tenant() or tenant.name == name
            return
        assert counted is not None
        expected = self.expected[name]
        expected[model, "in flight"] += 1
        self.open.append((counted, expected, model))

    def ended(self, place: int, how: str) -> CountedRequest:
        counted, expected, model = self.open.pop(place % len(self.open))
        expected[model, "in flight"] -= 1
        expected[model, how] += 1
        return counted

    @precondition(lambda self: self.open)
    @rule(place=st.integers(0, 9), after_error=st.booleans())
    def it_is_answered(self, place: int, after_error: bool) -> None:
        counted = self.ended(place, "failed" if after_error else "succeeded")
        if after_error:
            counted.see(InferResponse("m", "1", error=InternalError("this one, not the others")))
        counted.see(InferResponse("m", "1", final=True))
        counted.end()

    @precondition(lambda self: self.open)
    @rule(place=st.integers(0, 9), error=st.sampled_from(ERRORS), is_raised=st.booleans())
    def it_fails(self, place: int, error: tuple[LlmserveError, str], is_raised: bool) -> None:
        counted = self.ended(place, error[1])
        if is_raised:
            counted.refused(error[0])
        else:
            counted.see(InferResponse("m", "1", error=error[0], final=True))
        counted.end()

    @precondition(lambda self: self.open)
    @rule(place=st.integers(0, 9))
    def the_client_goes_away(self, place: int) -> None:
        self.ended(place, "cancelled").end()

    @precondition(lambda self: self.open)
    @rule(place=st.integers(0, 9))
    def it_does_not_fit(self, place: int) -> None:
        counted = self.ended(place, "nowhere")
        counted.refused(InvalidArgument("no such input"))
        counted.end()

    @invariant()
    def it_is_what_the_page_says(self) -> None:
        registry = CollectorRegistry(auto_describe=False)
        quiet = MetricsSettings(shows_cpu=False, shows_gpu=False)
        registry.register(ServerCollector(lambda: (), quiet, None, tenants=self.keys.counters))
        page = metrics_text(registry).splitlines()
        lines = [line.removeprefix("llmserve_key_") for line in page if line.startswith("llmserve_key_")]
        expected: list[str] = []
        for name, counts in self.expected.items():
            for model in {model for model, _ in counts}:
                of_model = f'key="{name}",model="{model}"'
                expected += [
                    *(f'requests_total{{{of_model},outcome="{how}"}} {counts[model, how]}' for how in OUTCOMES),
                    *(
                        f'refusals_total{{key="{name}",limit="{how}",model="{model}"}} {counts[model, how]}'
                        for how in LIMITS
                    ),
                    f"requests_in_flight{{{of_model}}} {counts[model, 'in flight']}",
                ]
        assert sorted(lines) == sorted(expected)


TestCounting = Counting.TestCase
TestCounting.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
