"""Drafters: one file each, one protocol.

drafter.py     the protocol, and the list of drafters
acceptance.py  how many tokens of a draft are worth their rows
lookup.py      what followed earlier occurrences of the newest tokens
own_text.py    occurrences in prompt and answer
history.py     occurrences in earlier answers
grammar.py     tokens that a guide forces
client.py      the client's predicted output
model.py       a smaller network
"""
