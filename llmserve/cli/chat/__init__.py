"""`llmserve chat`.

entry.py          the command, its options, and the loop of question and answer
session.py        whom is talked to, with which parameters, and what is asked
conversation.py   what has been said, on disk, too
commands.py       /help and the others
parameters.py     values by name, typed by the model's own inputs; `guide` and `log_probs`
prompts.py        what is sent for a conversation
keyboard.py       reading questions: several lines, history, completion
markdown.py       answers on a terminal, line by line
statistics.py     tokens and speed, how sure the model was
"""

from llmserve.cli.chat.entry import command

__all__ = ["command"]
