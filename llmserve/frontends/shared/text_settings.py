"""The operator's settings for a server's text APIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TextSettings:
    refuses_unknown_fields: bool = False  # and fields without effect; otherwise the answer notes them
    served_names: tuple[str, ...] = ()  # names of the only model, instead of its own
    takes_any_name: bool = False  # the only model answers to every name
    batch_dir: Path | None = None  # directory of files and batches; None: not supported
    stored_responses: int = 1000  # maximum number; 0: none are stored
    template_values: Mapping[str, Any] = field(default_factory=dict)  # for chat templates; requests override them
    forces_usage: bool = False  # reports usage in every chunk of a stream
    names_tokens_by_id: bool = False  # in log probs, unless a request overrides it
    tells_metrics: bool = False  # adds each request's metrics to its answer
    sampling: Mapping[str, float] = field(default_factory=dict)  # defaults, by the names of `Sampling`
    checkpoint_sampling: bool = True  # the checkpoint's sampling is the default of requests
