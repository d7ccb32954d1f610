"""Chat templates under llama.cpp's names, for checkpoints without one.

They do not write a begin token; the tokenizer does, if configured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

USUAL = {"system": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class _Turns:
    """ROLE is replaced by the role's word."""

    opening: str
    end: str
    roles: Mapping[str, str] = field(default_factory=lambda: USUAL)
    trims: bool = False  # white space around contents

    def source(self) -> str:
        """The template in Jinja."""
        opening = self.opening.replace("ROLE", "{{ roles[message.role] }}")
        answer = self.opening.replace("ROLE", self.roles["assistant"])
        content = "message.content" + " | trim" * self.trims
        return (
            f"{{% set roles = {dict(self.roles)!r} %}}{{% for message in messages %}}"
            "{% if message.role not in roles %}"
            "{{ raise_exception('this chat template has no role ' + message.role) }}{% endif %}"
            f"{opening}{{{{ {content} }}}}{{{{ {self.end!r} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {answer!r} }}}}{{% endif %}}"
        )


TURNS: Mapping[str, _Turns] = {
    "chatml": _Turns("<|im_start|>ROLE\n", "<|im_end|>\n"),
    "command-r": _Turns(
        "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
        {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT"}, trims=True,
    ),
    "gemma": _Turns("<start_of_turn>ROLE\n", "<end_of_turn>\n", {"user": "user", "assistant": "model"}, trims=True),
    "llama3": _Turns("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>", trims=True),
    "phi3": _Turns("<|ROLE|>\n", "<|end|>\n"),
    "phi4": _Turns("<|im_start|>ROLE<|im_sep|>", "<|im_end|>"),
    "zephyr": _Turns("<|ROLE|>\n", "<|endoftext|>\n"),
}  # fmt: skip
NAMES = tuple(TURNS)


def named_template(name: str) -> str | None:
    found = TURNS.get(name)
    return None if found is None else found.source()
