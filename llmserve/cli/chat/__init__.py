"""`llmserve chat`.

entry.py          the command and its options
talk.py           the loop of questions and answers
session.py        the model, its parameters and the current question
conversation.py   the conversation, and its file
commands.py       /help and the other commands
parameters.py     values by name, typed by the model's own inputs; `guide` and `log_probs`
prompts.py        converts a conversation to what is sent
keyboard.py       reading questions: several lines, history, completion
markdown.py       answers on a terminal, line by line
statistics.py     tokens and speed of an answer, and the model's confidence
"""

from llmserve.cli.chat.entry import command

__all__ = ["command"]
