"""The servers that the cases are asked of, each started once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.servers import Endpoint, llmserve_server, triton_server

REPOSITORY = Path(__file__).parent / "repository"
TRITON = os.environ.get("COMPAT_TRITON")  # the environment that holds nvidia-pytriton; set by `make compat`


@pytest.fixture(scope="session")
def llmserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with llmserve_server(REPOSITORY, tmp_path_factory.mktemp("log") / "llmserve.txt") as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    if TRITON is None:
        pytest.skip("the real server is asked by `make compat`")
    with triton_server(Path(TRITON).absolute(), REPOSITORY, tmp_path_factory.mktemp("log") / "triton.txt") as endpoint:
        yield endpoint
