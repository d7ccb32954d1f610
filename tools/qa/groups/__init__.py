"""The tests of Triton that are run, their models, and the results that are known to differ."""

from __future__ import annotations

from collections.abc import Sequence

from tools.qa.group import Group
from tools.qa.groups import backend_python, endpoints, metrics, scheduling

GROUPS: Sequence[Group] = (*endpoints.GROUPS, *backend_python.GROUPS, *scheduling.GROUPS, *metrics.GROUPS)
