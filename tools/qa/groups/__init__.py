"""Which of Triton's tests are run, on which models, and which of them are known to end otherwise than they want."""

from __future__ import annotations

from collections.abc import Sequence

from tools.qa.group import Group
from tools.qa.groups import backend_python, endpoints, metrics, scheduling

GROUPS: Sequence[Group] = (*endpoints.GROUPS, *backend_python.GROUPS, *scheduling.GROUPS, *metrics.GROUPS)
