"""The servers that the cases are asked of, each started when it is first asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.compat.cases import control
from tools.servers import Endpoint, llmserve_server, triton_server

REPOSITORY = Path(__file__).parent / "repository"
TRITON = os.environ.get("COMPAT_TRITON")  # the environment that holds nvidia-pytriton; set by `make compat`
GetServer = Callable[[str], Endpoint]  # by the name of a group of cases


def setup_of(group: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """The repository that the group's server has, and the flags."""
    if group != "control":
        return REPOSITORY, ()
    return shutil.copytree(REPOSITORY, folder / "repository"), control.FLAGS


@pytest.fixture(scope="session")
def llmserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetServer]:
    with ExitStack() as running:

        @cache
        def get(is_control: bool) -> Endpoint:
            folder = tmp_path_factory.mktemp("llmserve")
            repository, flags = setup_of("control" if is_control else "", folder)
            return running.enter_context(llmserve_server(repository, folder / "log.txt", *flags))

        yield lambda group: get(group == "control")


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetServer]:
    if TRITON is None:
        pytest.skip("the real server is asked by `make compat`")
    installed = Path(TRITON).absolute()
    with ExitStack() as running:

        @cache
        def get(is_control: bool) -> Endpoint:
            folder = tmp_path_factory.mktemp("triton")
            repository, flags = setup_of("control" if is_control else "", folder)
            return running.enter_context(triton_server(installed, repository, folder / "log.txt", *flags))

        yield lambda group: get(group == "control")
