"""The files of a model for Dynamo's front end: files of the engine directory under Hugging Face's names.

The front end converts texts to prompts and answers to texts, with only these files. It treats workers with different
folders as different models. The engine's digest is in config.json, so two engines or tokenizers never share a name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from tokenizers import Tokenizer

from llmserve import __version__
from llmserve.cluster.role_template import role_template
from llmserve.cluster.tokenizer_json import converted
from llmserve.engine.directory.artifact import HF_CONFIG_FILE, EngineDirectory, hash_file
from llmserve.errors import AlreadyExists, NotFound
from llmserve.stages.files import PROCESSOR_FILE, TextFiles

DIGEST = "llmserve_engine_digest"
DIGEST_CHARS = 16
FORM = 2  # version of the folder's content; it is part of the folder's name
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
MADE_OF = (HF_CONFIG_FILE, "tokenizer.json", "tokenizer.model", PROCESSOR_FILE)
TEMPLATE = "chat_template.jinja"
COPIED = ("generation_config.json", "special_tokens_map.json", "tokenizer_config.json", TEMPLATE)
# To the front end, models with and without chat differ even if they have the same name, so all have a template.
NO_TEMPLATE = "{{ raise_exception('this checkpoint has no chat template: ask /v1/completions') }}"


def model_folder(directory: EngineDirectory) -> Path:
    """Create the folder if it does not exist. Workers on one machine share it; a front end also compares its path.

    Raises NotFound (no tokenizer), AlreadyExists (something else in its place), and the errors of `converted`.
    """
    root = folder_root()
    with suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & OTHERS_MAY_WRITE:
        raise AlreadyExists(f"{root} belongs to other users too, so its content is not trusted; remove it")
    place = root / f"{_identity(directory)[:DIGEST_CHARS]}-{__version__}"
    if not place.is_dir():
        with TemporaryDirectory(dir=root) as made:
            _write(directory, Path(made))
            with suppress(OSError):  # another worker was faster
                Path(made).rename(place)
                Path(made).mkdir()  # for the cleanup of the block
    return place


def _identity(directory: EngineDirectory) -> str:
    """Digest of the engine and of the folder's sources: the same weights may have another tokenizer or template."""
    digest = hashlib.sha256(f"{FORM} {directory.manifest.engine_digest}".encode())
    for name in (*COPIED, *MADE_OF):
        if (directory.path / name).is_file():
            digest.update(f"\0{name}\0{hash_file(directory.path / name)}".encode())
    return digest.hexdigest()


def folder_root() -> Path:
    """The parent of all folders, with the same path on every machine for the same user."""
    return Path(gettempdir()) / f"llmserve-models-{os.getuid()}"


def _write(directory: EngineDirectory, folder: Path) -> None:
    for name in COPIED:
        if (directory.path / name).is_file():
            shutil.copyfile(directory.path / name, folder / name)
    _write_tokenizer(directory.path, folder / "tokenizer.json")
    if not _has_chat_template(folder):
        made = Tokenizer.from_file(str(folder / "tokenizer.json"))
        of_processor = TextFiles.read(directory.path).chat_template
        (folder / TEMPLATE).write_text(of_processor or role_template(directory.path, made) or NO_TEMPLATE)
    config = json.loads((directory.path / HF_CONFIG_FILE).read_text())
    config[DIGEST] = directory.manifest.engine_digest
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def _has_chat_template(folder: Path) -> bool:
    if (folder / TEMPLATE).is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("chat_template"))


def _write_tokenizer(engine: Path, target: Path) -> None:
    if (engine / "tokenizer.json").is_file():
        shutil.copyfile(engine / "tokenizer.json", target)
    elif (engine / "tokenizer.model").is_file():
        converted(engine).save(str(target))
    else:
        raise NotFound(f"{engine} has neither tokenizer.json nor tokenizer.model; copy them from the checkpoint")
