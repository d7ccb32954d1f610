"""What one run of Triton's tests needs: files, models, a server with its flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tools.qa.models import Model


@dataclass(frozen=True)
class Group:
    """Test files of one folder that want the same models and the same server."""

    name: str
    folder: str  # in the clone of server
    files: Sequence[str]  # those of them that the release has are run
    models: Sequence[Model]
    flags: Sequence[str] = ()
    own_flags: Sequence[str] = ()  # that llmserve needs besides, where Triton's default is another
    environment: Mapping[str, str] = field(default_factory=dict)  # of server and tests
    select: str = ""  # which tests, as in pytest -k; all if empty
    is_fresh: bool = False  # each test wants a server that nobody has asked yet
    repository: str = ""  # where in the folder of the tests the models are; outside of it if empty
    log: str = "server.log"  # which some tests read
    known: Mapping[str, str] = field(default_factory=dict)  # test -> why llmserve fails it
