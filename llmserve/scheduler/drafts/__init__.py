"""Drafters, one file each, behind one protocol.

drafter.py     the protocol, and which drafters there are
acceptance.py  how many tokens of a draft are worth their rows
lookup.py      what followed the newest tokens where they stood before
own_text.py    these places in prompt and answer
history.py     and in earlier answers
grammar.py     what a guide leaves no choice of
client.py      what the client thinks that the answer will be
model.py       what a smaller network says
"""
