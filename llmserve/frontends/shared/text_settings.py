"""How the text APIs of one server answer, as its operator has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TextSettings:
    refuses_unknown_fields: bool = False  # and those without effect: they are noted in the answer otherwise
    served_names: tuple[str, ...] = ()  # of the only model, in place of its own
    takes_any_name: bool = False  # for the only model
    batch_dir: Path | None = None  # of files and batches; None: there are none
    stored_responses: int = 1000  # most of them; 0: none
    template_values: Mapping[str, Any] = field(default_factory=dict)  # of chat templates, unless a request says others
    forces_usage: bool = False  # in every chunk of a stream
    names_tokens_by_id: bool = False  # in log probs, unless a request says otherwise
    tells_metrics: bool = False  # of each request, beside its answer
    sampling: Mapping[str, float] = field(default_factory=dict)  # defaults, by the names of `Sampling`
    checkpoint_sampling: bool = True  # requests get the checkpoint's sampling where they do not say theirs
