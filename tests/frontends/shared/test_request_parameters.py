"""Parameters of requests, whatever protocol they come by."""

from __future__ import annotations

from typing import NoReturn

import pytest

from llmserve.errors import InvalidArgument
from llmserve.frontends.shared.request_parameters import MAX_PARAMETERS, sort_parameters


def never(name: str, expected: str) -> NoReturn:
    raise AssertionError(name)


def test_there_is_a_limit_to_their_number() -> None:
    most = {str(number): 1 for number in range(MAX_PARAMETERS)}
    assert sort_parameters(most, never).custom == most
    with pytest.raises(InvalidArgument, match="the request has 1025 parameters, more than 1024"):
        sort_parameters({**most, "one": 1}, never)
