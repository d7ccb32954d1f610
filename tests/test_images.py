"""The container images as text: what they copy is there, and what they call exists. They are not built here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from llmserve.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "build/docker").glob("*.Dockerfile"))
INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER", "WORKDIR",
}  # fmt: skip


def instructions(file: Path) -> list[tuple[str, str]]:
    lines = re.sub(r"\\\n\s*", "", file.read_text()).splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_is_made_of_instructions_over_a_base_that_can_be_chosen(file: Path) -> None:
    found = instructions(file)
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "ARG"
    base = found[0][1].partition("=")[0]
    assert [text.split()[0] for name, text in found if name == "FROM"] == [f"${{{base}}}"] * 2


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_an_image_copies_is_there_and_not_ignored(file: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    for name, text in instructions(file):
        if name == "COPY":
            *sources, _ = text.split()
            assert all((ROOT / source).exists() and f"!{source}" in ignored for source in sources), text


def test_a_wheel_needs_nothing_that_the_images_leave_out() -> None:
    """Each path that the build files name outside of the copied ones would be missing."""
    build = re.sub(r"if\(LLMSERVE_TESTS\).*?endif\(\)", "", (ROOT / "CMakeLists.txt").read_text(), flags=re.DOTALL)
    folders = " ".join(re.findall(r"install\(DIRECTORY ([^()]+?) DESTINATION", build)).split()
    named = {*re.findall(r"add_subdirectory\(([\w.-]+)", build), *folders, "README.md"}  # pyproject's readme
    assert "pipelines" in named
    for file in FILES:
        copied = {source for name, text in instructions(file) if name == "COPY" for source in text.split()[:-1]}
        assert named <= copied, file


@pytest.mark.parametrize("file", [file for file in FILES if file.stem != "triton"], ids=lambda file: file.stem)
def test_what_an_image_starts_is_a_command_of_ours(file: Path) -> None:
    found = dict(instructions(file))
    assert json.loads(found["ENTRYPOINT"]) == ["llmserve"]
    command, *arguments = json.loads(found["CMD"])
    commands: Any = typer.main.get_command(app)
    known = {flag for parameter in commands.commands[command].params for flag in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("-")} <= known


def test_the_page_names_every_image_and_claims_no_build() -> None:
    page = (ROOT / "docs/images.md").read_text()
    assert [file.name for file in FILES if file.name not in page] == []
    assert "**Not built yet:**" in page
