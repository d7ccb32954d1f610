"""Role tokens as a chat template: for every conversation, the ids that our own form gives."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from llmserve.cluster.role_template import role_template
from llmserve.cluster.tokenizer_json import converted
from llmserve.errors import InvalidArgument
from llmserve.stages.chat import Message, require_chat_format
from llmserve.stages.chat_template import ChatTemplate
from llmserve.stages.files import TextFiles
from llmserve.stages.tokenizer import load_tokenizer
from tests.checkpoints import make_checkpoint
from tests.e2e.conftest import CHECKPOINT

TEXTS = ("Hello", "", " two  spaces\n", "你好，世界 \t", "{{ x }} {% y %}")
CONVERSATIONS = [
    [Message(role, text) for role, text in zip(roles, texts, strict=False)]
    for roles in (
        ("user",), ("system", "user"), ("user", "assistant"), ("user", "user"), ("assistant", "user"),
        ("system", "user", "assistant", "user"),
    )
    for texts in itertools.islice(itertools.permutations(TEXTS), 0, None, 17)
]  # fmt: skip


def rendered(template: str, messages: list[Message]) -> str:
    files = TextFiles.read(CHECKPOINT)
    listed = [{"role": message.role, "content": message.content} for message in messages]
    return ChatTemplate(template, files.special_tokens).render(listed, {})


def test_it_gives_the_ids_of_our_own_form() -> None:
    made = converted(CHECKPOINT)
    template = role_template(CHECKPOINT, made)
    assert template is not None
    own = require_chat_format(load_tokenizer(CHECKPOINT), TextFiles.read(CHECKPOINT))
    for messages in CONVERSATIONS:
        found = made.encode(rendered(template, messages), add_special_tokens=False).ids
        assert found == own.encode(messages).ids


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (("system",), "there is no user message"),
        (("user", "system"), "knows user and assistant, and system in the first message only"),
        (("user", "tool"), "knows user and assistant"),
    ],
)
def test_what_our_own_form_refuses_is_refused(roles: tuple[str, ...], words: str) -> None:
    template = role_template(CHECKPOINT, converted(CHECKPOINT))
    assert template is not None
    with pytest.raises(InvalidArgument, match=words):
        rendered(template, [Message(role, "x") for role in roles])


def test_a_checkpoint_without_roles_has_none(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "llama")
    assert role_template(checkpoint, converted(checkpoint)) is None


def test_a_tokenizer_that_does_not_tell_roles_gets_none() -> None:
    made = converted(CHECKPOINT)
    made.normalizer = None  # another tokenizer.json than the checkpoint's
    assert role_template(CHECKPOINT, made) is None
