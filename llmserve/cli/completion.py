"""`llmserve completion bash|zsh|fish`: prints a script for the shell, made from the commands' own options.

The script is self-contained. typer's completion would start this program at every Tab, for most of a second.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

PROGRAM = "llmserve"
LISTED = re.compile(r"[\w.-]+(?: \| [\w.-]+)+")  # values in help texts, such as float16 | float32


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@dataclass(frozen=True, slots=True)
class Flag:
    names: Sequence[str]  # with their dashes
    help: str
    takes_value: bool
    choices: Sequence[str]  # of the value; empty: any value
    is_path: bool


@dataclass(frozen=True, slots=True)
class Description:
    """One command."""

    name: str
    help: str  # one line
    flags: Sequence[Flag]
    choices: Sequence[str]  # of its argument
    takes_files: bool


def command(
    ctx: typer.Context,
    shell: Annotated[Shell, typer.Argument(help="Your shell.", show_default=False)],
) -> None:
    """Print a shell's completion script. bash: eval "$(llmserve completion bash)" in ~/.bashrc."""
    root: Any = ctx.find_root().command
    typer.echo(SCRIPTS[shell]([_described(name, one) for name, one in root.commands.items()]), nl=False)


def _described(name: str, one: Any) -> Description:
    types = get_type_hints(inspect.unwrap(one.callback))
    options = [each for each in one.params if each.param_type_name == "option"]
    arguments = [each for each in one.params if each.param_type_name == "argument"]
    flags = [_flag(option, _bare(types[option.name])) for option in options]
    flags.append(Flag(("--help",), "Show all flags and exit.", takes_value=False, choices=(), is_path=False))
    choices = [choice for argument in arguments for choice in _choices(argument, _bare(types[argument.name]))]
    takes_files = any(_bare(types[argument.name]) is Path for argument in arguments)
    return Description(name, _one_line(one.get_short_help_str(limit=150)), flags, choices, takes_files)


def _flag(option: Any, kind: Any) -> Flag:
    return Flag(
        (*option.opts, *option.secondary_opts),
        _one_line(option.help or ""),
        takes_value=not option.is_flag,
        choices=_choices(option, kind),
        is_path=kind is Path,
    )


def _bare(kind: Any) -> Any:
    """The type without None; for a list, the type of its items."""
    inner = [each for each in get_args(kind) if each is not type(None)]
    return _bare(inner[0]) if inner else kind


def _choices(parameter: Any, kind: Any) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(choice.value) for choice in kind]
    found = LISTED.search(parameter.help or "")
    return found[0].split(" | ") if found else []


def _one_line(text: str) -> str:
    return " ".join(text.split())


def bash_script(commands: Sequence[Description]) -> str:
    """Completes a flag, the value after a flag, or a file if the command takes any."""
    names = " ".join(one.name for one in commands)
    lines = [
        f"# bash completion for {PROGRAM}",
        f"_{PROGRAM}() {{",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command= flags= place",
        "    # bash takes --flag=value for three words",
        "    [[ $word == = ]] && word=",
        "    [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}",
        "    COMPREPLY=()",
        "    for ((place = 1; place < COMP_CWORD; place++)); do",
        "        [[ ${COMP_WORDS[place]} == -* ]] || { command=${COMP_WORDS[place]}; break; }",
        "    done",
        '    case "$command $before" in',
    ]
    for one in commands:
        lines += _bash_values(one)
    lines += ["    esac", "    case $command in"]
    lines.append(f'        "") COMPREPLY=($(compgen -W "{names} --help --version" -- "$word")); return ;;')
    for one in commands:
        flags = " ".join(name for flag in one.flags for name in flag.names)
        lines.append(f'        {one.name}) flags="{flags}" ;;')
    lines += ["    esac", '    [[ $word == -* ]] && COMPREPLY=($(compgen -W "$flags" -- "$word")) && return']
    with_files = "|".join(one.name for one in commands if one.takes_files)
    lines += ["    case $command in", f"        {with_files}) {BASH_FILES} ;;"]
    for one in commands:
        if one.choices:
            lines.append(f'        {one.name}) COMPREPLY+=($(compgen -W "{" ".join(one.choices)}" -- "$word")) ;;')
    return "\n".join([*lines, "    esac", "}", f"complete -F _{PROGRAM} {PROGRAM}", ""])


BASH_FILES = 'compopt -o filenames; COMPREPLY=($(compgen -f -- "$word"))'


def _bash_values(one: Description) -> list[str]:
    """Cases for the values of flags."""
    lines = []
    for flag in one.flags:
        if not flag.takes_value:
            continue
        where = "|".join(f'"{one.name} {name}"' for name in flag.names)
        if flag.is_path:
            work = BASH_FILES
        elif flag.choices:
            work = f'COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$word"))'
        else:
            work = ":"
        lines.append(f"        {where}) {work}; return ;;")
    return lines


def zsh_script(commands: Sequence[Description]) -> str:
    lines = [
        f"#compdef {PROGRAM}",
        f"_{PROGRAM}() {{",
        "    local context state state_descr line",
        "    typeset -A opt_args",
        "    local -a commands=(",
        *(f"        {shlex.quote(f'{one.name}:{one.help}')}" for one in commands),
        "    )",
        "    _arguments -C '(- *)--help[Show what there is and exit.]' '(- *)--version[Print the version.]' \\",
        "        '1: :->command' '*:: :->arguments'",
        "    case $state in",
        f"        command) _describe -t commands '{PROGRAM} command' commands ;;",
        "        arguments)",
        "            case $line[1] in",
    ]
    for one in commands:
        words = " ".join(shlex.quote(_zsh_flag(name, flag)) for flag in one.flags for name in flag.names)
        rest = "'*:file:_files'" if one.takes_files else ""
        if one.choices:
            rest = f"'1:what:({' '.join(one.choices)})' {rest}"
        lines.append(f"                {one.name}) _arguments {words} {rest} ;;")
    tail = ["            esac ;;", "    esac", "}"]
    return "\n".join(
        [
            *lines,
            *tail,
            f'if [[ $funcstack[1] == _{PROGRAM} ]]; then _{PROGRAM} "$@"',
            f"else compdef _{PROGRAM} {PROGRAM}; fi",
            "",
        ]
    )


def _zsh_flag(name: str, flag: Flag) -> str:
    text = "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in flag.help)
    if not flag.takes_value:
        return f"{name}[{text}]"
    values = "_files" if flag.is_path else f"({' '.join(flag.choices)})" if flag.choices else " "
    return f"*{name}=[{text}]:value:{values}"


def fish_script(commands: Sequence[Description]) -> str:
    begin = f"complete -c {PROGRAM}"
    lines = [
        f"{begin} -f",
        f"{begin} -n __fish_use_subcommand -l version -d 'Print the version.'",
        *(f"{begin} -n __fish_use_subcommand -a {one.name} -d {shlex.quote(one.help)}" for one in commands),
    ]
    for one in commands:
        when = f'{begin} -n "__fish_seen_subcommand_from {one.name}"'
        for flag in one.flags:
            for name in flag.names:
                kind = "-l" if name.startswith("--") else "-s"
                values = f" -a {shlex.quote(' '.join(flag.choices))}" if flag.choices else ""
                needs = (" -r -F" if flag.is_path else f" -x{values}") if flag.takes_value else ""
                lines.append(f"{when} {kind} {name.lstrip('-')}{needs} -d {shlex.quote(flag.help)}")
        if one.takes_files:
            lines.append(f"{when} -F")
        if one.choices:
            lines.append(f"{when} -a {shlex.quote(' '.join(one.choices))}")
    return "\n".join([*lines, ""])


SCRIPTS: dict[Shell, Callable[[Sequence[Description]], str]] = {
    Shell.BASH: bash_script,
    Shell.ZSH: zsh_script,
    Shell.FISH: fish_script,
}
