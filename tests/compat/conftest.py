"""The servers that the cases are asked of, each started when it is first asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.compat.cases import control, restricted
from tools.servers import Endpoint, llmserve_server, triton_server

REPOSITORY = Path(__file__).parent / "repository"
ALLOWED = "--allow-client-shm=true"  # which Triton always does in the release that is compared
TRITON = os.environ.get("COMPAT_TRITON")  # the environment that holds nvidia-pytriton; set by `make compat`
FLAGS = {"control": control.FLAGS, "restricted": restricted.FLAGS}  # of groups that have a server of their own
GetServer = Callable[[str], Endpoint]  # by the name of a group of cases


def setup_of(group: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """The repository that the group's server has, and the flags."""
    if group == "control":
        return shutil.copytree(REPOSITORY, folder / "repository"), FLAGS[group]
    return REPOSITORY, FLAGS.get(group, ())


@pytest.fixture(scope="session")
def llmserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetServer]:
    with ExitStack() as running:

        @cache
        def get(group: str) -> Endpoint:
            folder = tmp_path_factory.mktemp("llmserve")
            repository, flags = setup_of(group, folder)
            return running.enter_context(llmserve_server(repository, folder / "log.txt", ALLOWED, *flags))

        yield lambda group: get(group if group in FLAGS else "")


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetServer]:
    if TRITON is None:
        pytest.skip("the real server is asked by `make compat`")
    installed = Path(TRITON).absolute()
    with ExitStack() as running:

        @cache
        def get(group: str) -> Endpoint:
            folder = tmp_path_factory.mktemp("triton")
            repository, flags = setup_of(group, folder)
            return running.enter_context(triton_server(installed, repository, folder / "log.txt", *flags))

        yield lambda group: get(group if group in FLAGS else "")
