"""A chat template for checkpoints that mark roles by token ids, which Dynamo's front end does not support.

It is `RoleIdFormat` of `stages/chat.py` as Jinja. It spells out the role's token, which tokenizer.json converts back to
its id. The front end rejects a conversation that is too long, instead of truncating it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as JsonTokenizer

from llmserve.stages.chat import Message, RoleIdFormat, chat_format
from llmserve.stages.chat_template import ChatTemplate
from llmserve.stages.files import TextFiles
from llmserve.stages.tokenizer import load_tokenizer

TEMPLATE = """\
{%- if tools %}{{ raise_exception('this checkpoint has no chat template that could read tools') }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- if loop.last %}{{ raise_exception('there is no user message') }}{% endif -%}
{%- elif message.role == 'user' %}{{ USER }}
{%- elif message.role == 'assistant' %}{{ ASSISTANT }}
{%- else -%}
{{- raise_exception('this checkpoint knows user and assistant, and system in the first message only') -}}
{%- endif -%}
{{- message.content or '' -}}
{%- endfor -%}
{%- if messages[-1].role != 'assistant' %}{{ ASSISTANT }}{% endif -%}
"""
TRIED: Sequence[Sequence[Message]] = (
    (Message("user", "Hello"),),
    (
        Message("system", "Be brief. "),
        Message("user", " two  spaces\n"),
        Message("assistant", "a"),
        Message("user", ""),
    ),
)


def role_template(path: Path, made: JsonTokenizer) -> str | None:
    """The template for a front end with the tokenizer `made`. None if the checkpoint does not mark roles by ids, or
    if `made` encodes the roles differently."""
    files = TextFiles.read(path)
    own = chat_format(load_tokenizer(path), files)
    if not isinstance(own, RoleIdFormat):
        return None
    user, assistant = made.id_to_token(own.user_id), made.id_to_token(own.assistant_id)
    if user is None or assistant is None:
        return None
    template = TEMPLATE.replace("USER", repr(user)).replace("ASSISTANT", repr(assistant))
    rendered = ChatTemplate(template, files.special_tokens)
    for messages in TRIED:
        text = rendered.render([{"role": one.role, "content": one.content} for one in messages], {})
        if made.encode(text, add_special_tokens=False).ids != own.encode(messages).ids:
            return None
    return template
