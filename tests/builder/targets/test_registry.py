"""What the targets' own options have to agree about."""

from __future__ import annotations

from llmserve.builder.flag import declared
from llmserve.builder.options import BuildOptions, declared_options
from llmserve.builder.targets.registry import TARGETS


def test_an_option_of_several_targets_has_one_default() -> None:
    for target, room in TARGETS.items():
        for name, declaration in declared(room.options).items():
            assert declared_options()[name].default == declaration.default, f"{target}: {name}"


def test_no_target_has_an_option_that_all_have() -> None:
    common = declared(BuildOptions).keys()
    assert not [name for room in TARGETS.values() for name in declared(room.options) if name in common]
