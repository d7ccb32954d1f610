"""Requirements of one run of Triton's tests: files, models, and a server with its flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tools.qa.models import Model


@dataclass(frozen=True)
class Group:
    """Test files of one folder that need the same models and the same server."""

    name: str
    folder: str  # in the clone of Triton's server
    files: Sequence[str]  # those that the release has are run
    models: Sequence[Model]
    flags: Sequence[str] = ()
    own_flags: Sequence[str] = ()  # additional flags of llmserve, if Triton's default differs
    environment: Mapping[str, str] = field(default_factory=dict)  # of server and tests
    select: str = ""  # which tests, as in pytest -k; all if empty
    is_fresh: bool = False  # each test needs a newly started server
    repository: str = ""  # path of the models in the tests' folder; empty: outside of it
    log: str = "server.log"  # read by some tests
    known: Mapping[str, str] = field(default_factory=dict)  # test -> why llmserve fails it
