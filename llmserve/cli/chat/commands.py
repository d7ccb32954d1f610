"""The commands of a chat: lines that begin with a slash. A question that begins with a slash is written with two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmserve.cli.chat.conversation import question_count
from llmserve.cli.chat.keyboard import path_candidates
from llmserve.errors import InvalidArgument, LlmserveError

if TYPE_CHECKING:
    from llmserve.cli.chat.talk import Talk

SLASH = "/"


class Command(NamedTuple):
    argument: str
    help: str
    run: Callable[[Talk, str], None]


class Quit(Exception):
    """Ends the chat."""


def is_command(text: str) -> bool:
    return text.startswith(SLASH) and not text.startswith(2 * SLASH)


def obey(talk: Talk, text: str) -> None:
    """Run the command `text`. Raises `LlmserveError` and `Quit`."""
    name, _, argument = text.removeprefix(SLASH).partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise InvalidArgument(
            f"there is no /{name}: /help lists the commands; begin a question with // if it starts with a slash"
        )
    command.run(talk, argument.strip())


def _help(talk: Talk, argument: str) -> None:
    rows = [(f"/{name} {command.argument}".rstrip(), command.help) for name, command in COMMANDS.items()]
    width = max(len(usage) for usage, _ in rows)
    for usage, text in rows:
        print(f"{usage:<{width}}  {text}")
    print('A line that ends with a backslash continues; """ begins and ends a longer text. Ctrl-C stops an answer.')


def _system(talk: Talk, argument: str) -> None:
    if argument:
        talk.session.conversation.system = "" if argument == "none" else argument
    print(f"system: {talk.session.conversation.system or 'none'}")


def _params(talk: Talk, argument: str) -> None:
    for pair in argument.split():
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidArgument(f"{pair}: expected NAME=VALUE; it may be one of {', '.join(talk.names())}")
        talk.run(talk.session.set(name, value))
    _show_parameters(talk)


def _set(talk: Talk, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        raise InvalidArgument("/set NAME VALUE; without a value, the server's default applies")
    talk.run(talk.session.set(name, value.strip()))
    _show_parameters(talk)


def _show_parameters(talk: Talk) -> None:
    parameters = talk.session.parameters
    words = {name: ("off", "on")[value] if isinstance(value, bool) else value for name, value in parameters.items()}
    print("  ".join(f"{name}={value}" for name, value in words.items()) or "the server's default")


def _model(talk: Talk, argument: str) -> None:
    if argument:
        dropped = talk.run(talk.session.talk_to(argument))
        talk.say(talk.session.prompts.note)
        if dropped:
            talk.say(f"{argument} does not support {', '.join(dropped)}, which is dropped")
    print(f"model: {talk.session.client.model}")
    if not argument and (others := talk.models()):
        print(f"there are: {', '.join(others)}")


def _save(talk: Talk, argument: str) -> None:
    session = talk.session
    session.conversation.save(_path("/save", argument), session.client.model, session.parameters)
    print(f"saved {question_count(session.conversation.messages)} to {argument}")


def _load(talk: Talk, argument: str) -> None:
    talk.load(_path("/load", argument))
    print(f"loaded {question_count(talk.session.conversation.messages)} from {argument}")


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise InvalidArgument(f"{command} FILE")
    return Path(argument).expanduser()


def _clear(talk: Talk, argument: str) -> None:
    talk.session.conversation.messages.clear()
    print("forgotten; the system message and the parameters stay")


def _undo(talk: Talk, argument: str) -> None:
    question = talk.session.conversation.undo()
    print("the conversation is empty" if question is None else f"forgotten: {question}")


def _retry(talk: Talk, argument: str) -> None:
    question = talk.session.taken_back()
    if question is None:
        raise InvalidArgument("nothing has been asked yet")
    talk.answer(question)


def _stats(talk: Talk, argument: str) -> None:
    if argument not in ("", "on", "off"):
        raise InvalidArgument("/stats, /stats on or /stats off")
    if argument:
        talk.shows_statistics = argument == "on"
    else:
        latest = talk.session.latest
        print("no answer yet" if latest is None else latest.speed())


def _quit(talk: Talk, argument: str) -> None:
    raise Quit


COMMANDS = {
    "help": Command("", "this list", _help),
    "system": Command("[TEXT|none]", "the system message", _system),
    "params": Command("[NAME=VALUE ...]", "parameters; NAME= resets one; guide and log_probs are included", _params),
    "set": Command("NAME [VALUE]", "one parameter, whose value may have spaces", _set),
    "model": Command("[NAME]", "the model, or switch to another; the conversation stays", _model),
    "retry": Command("", "ask the last question again", _retry),
    "undo": Command("", "forget the last question and its answer", _undo),
    "clear": Command("", "forget all questions and answers", _clear),
    "save": Command("FILE", "write the conversation as JSON", _save),
    "load": Command("FILE", "read it again, with its parameters", _load),
    "stats": Command("[on|off]", "tokens and speed of the last answer, or of each one", _stats),
    "quit": Command("", "end the chat, as Ctrl-D does", _quit),
}


def candidates(talk: Talk, line: str, word: str) -> Sequence[str]:
    """Completions of the last word of a line, for Tab."""
    command, _, _ = line.partition(" ")
    if not line.strip():
        found = [f"/{name} " for name in COMMANDS]
    elif command in ("/save", "/load"):
        return path_candidates(word)
    elif command in ("/params", "/set"):
        if line.endswith("="):
            return ()
        found = [f"{name}=" if command == "/params" else f"{name} " for name in talk.names()]
    elif command == "/model":
        found = talk.models()
    elif command == "/stats":
        found = ["on", "off"]
    else:
        return ()
    return [one for one in found if one.startswith(word)]


def quietly(names: Callable[[], Sequence[str]]) -> list[str]:
    """Names from a server; empty if it raises an error."""
    try:
        return list(names())
    except LlmserveError:
        return []
