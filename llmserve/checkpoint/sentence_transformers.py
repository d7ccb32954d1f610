"""How a folder produces embeddings, from sentence-transformers' files: modules.json, and one file per module."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError, raise_problems
from llmserve.models.bert import TASK, is_sigmoid, read_scores
from llmserve.models.config import ConfigReader
from llmserve.models.spec import Pooling

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
TEXT_FILE = "sentence_bert_config.json"
TRANSFORMER, POOLING, NORMALIZE = "Transformer", "Pooling", "Normalize"
ANSWERS = "LogitScore"  # two answers of a language model
KNOWN = ([TRANSFORMER, POOLING], [TRANSFORMER, POOLING, NORMALIZE], [TRANSFORMER, ANSWERS])
ANSWER_KEYS = ("true_token_id", "false_token_id")
MODES = {"cls": "first", "lasttoken": "last", "mean": "mean", "max": "max"}
FLAGS = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "lasttoken": "lasttoken"}  # in older files
FLAG = "pooling_mode_"


def read_pooling(checkpoint: Checkpoint, usual: Pooling | None) -> Pooling | None:
    """`usual` if the folder has no such files. Raises one CheckpointError listing every problem."""
    if usual is None and str(next(iter(checkpoint.config.get("architectures") or ()), "")).endswith(TASK):
        reader = ConfigReader(checkpoint.config)
        usual = read_scores(reader, "last")
        reader.finish()
    if usual is not None and usual.scores:
        return _read_scores(checkpoint, usual)
    if checkpoint.text_file(MODULES_FILE) is None:
        return usual
    modules = _read(checkpoint, MODULES_FILE)
    problems: list[str] = []
    places = _places(modules, problems)
    if not problems and ANSWERS in places:
        answers = _answers(checkpoint, places[ANSWERS], problems)
        raise_problems(CheckpointError, f"{MODULES_FILE} of {checkpoint.path}", problems)
        return _read_scores(checkpoint, Pooling("last", scores=True, sigmoid=True, answers=answers))
    mode = _mode(checkpoint, places.get(POOLING, ""), problems) if not problems else ""
    text = _read(checkpoint, TEXT_FILE)
    if isinstance(text, dict) and text.get("do_lower_case"):
        problems.append(f"do_lower_case of {TEXT_FILE} is not supported: the tokenizer does this itself")
    raise_problems(CheckpointError, f"{MODULES_FILE} of {checkpoint.path}", problems)
    return Pooling(MODES[mode], normalize=NORMALIZE in places)


def prompt_notes(checkpoint: Checkpoint) -> list[str]:
    """Of a default prompt. An engine does not add it: a request cannot say which prompt its texts need, if any."""
    found = _read(checkpoint, SETTINGS_FILE)
    settings = found if isinstance(found, dict) else {}
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    prompt = prompts.get(name) if isinstance(name, str) and isinstance(prompts, dict) else None
    if not prompt:
        return []
    return [
        f"sentence-transformers adds the prompt {prompt!r} to each text by default (default_prompt_name in "
        f"{SETTINGS_FILE}); the engine embeds texts unchanged, so add it in the client"
    ]


def _read_scores(checkpoint: Checkpoint, usual: Pooling) -> Pooling:
    """A cross-encoder's network pools its own output; newer versions have a file for the conversion of scores."""
    settings, problems = _read(checkpoint, SETTINGS_FILE), list[str]()
    if not isinstance(settings, dict) or not settings.get("activation_fn"):
        return usual
    sigmoid = is_sigmoid(settings["activation_fn"], problems)
    raise_problems(CheckpointError, f"{SETTINGS_FILE} of {checkpoint.path}", problems)
    return replace(usual, sigmoid=sigmoid)


def _places(modules: Any, problems: list[str]) -> dict[str, str]:
    """Folders of the modules by kind."""
    found: dict[str, str] = {}
    for module in modules if isinstance(modules, list) else [None]:
        kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str) or Path(path).name != path:
            problems.append("it must be a list of modules, each with a type and the name of a folder as its path")
            return {}
        found[kind.rpartition(".")[2]] = path
    kinds = list(found)
    if kinds not in KNOWN or len(modules) != len(kinds):
        problems.append(f"modules {', '.join(kinds)} are not supported; supported: {'; '.join(map(', '.join, KNOWN))}")
    return found


def _mode(checkpoint: Checkpoint, folder: str, problems: list[str]) -> str:
    name = f"{folder}/config.json"
    config = _read(checkpoint, name)
    if not isinstance(config, dict):
        problems.append(f"{name} is missing, or is not an object")
        return ""
    flags = [key.removeprefix(FLAG) for key, value in config.items() if key.startswith(FLAG) and value is True]
    named = config.get("pooling_mode", [FLAGS.get(flag, flag) for flag in flags])
    modes = [named] if isinstance(named, str) else named
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in MODES:
        problems.append(f"{name} pools with {named!r}; supported: one of {', '.join(MODES)}")
        return ""
    return str(modes[0])


def _answers(checkpoint: Checkpoint, folder: str, problems: list[str]) -> tuple[int, ...]:
    config, name = _read(checkpoint, f"{folder}/config.json"), f"{folder}/config.json"
    vocab_size = checkpoint.config.get("vocab_size")
    given = [config.get(key) for key in ANSWER_KEYS] if isinstance(config, dict) else []
    ids = tuple(each for each in given if type(each) is int and type(vocab_size) is int and 0 <= each < vocab_size)
    if len(ids) != len(ANSWER_KEYS):
        problems.append(f"{name} must have {' and '.join(ANSWER_KEYS)}, ids of tokens in the vocabulary")
        return ()
    return ids


def _read(checkpoint: Checkpoint, name: str) -> Any:
    content = checkpoint.text_file(name)
    try:
        return None if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint.path / name} is not valid JSON: {error}") from error
