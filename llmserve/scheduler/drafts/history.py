"""Finds earlier occurrences of the newest tokens in finished answers.

Only answers of the same tenant and adapter are read, which could also share blocks of the cache. The memory is a ring
of a fixed size: the newest answers replace the oldest. Chains of places may lead to replaced tokens, so tokens are
always compared.
"""

from __future__ import annotations

from array import array

from llmserve.scheduler.blocks import hash_block
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED
from llmserve.scheduler.drafts.own_text import GRAM, MAX_MATCHED, NOTHING, Found, best_places, chain
from llmserve.scheduler.sequence import Sequence

NUM_TOKENS = 1 << 18  # size of the ring: 16 bytes per token, and 4 per entry of the hash table
MAX_OF_ANSWER = 2048  # last tokens of an answer that are added, within one step
END = -2  # after each answer; neither a token nor UNSEEN


class History:
    """The finished answers of one engine. Results depend only on the answers and their order."""

    def __init__(self, num_tokens: int = NUM_TOKENS) -> None:
        self._text = array("i", [END]) * num_tokens
        self._owners = array("q", [0]) * num_tokens
        self._before = array("i", [0]) * num_tokens  # for each place, the previous one in its chain; 0: none
        self._newest = array("i", [0]) * num_tokens  # newest place of each chain, by hash
        self._next = 1

    def add(self, sequence: Sequence) -> None:
        """Add a complete answer."""
        text, owner = self._text, owner_of(sequence)
        most = min(MAX_OF_ANSWER, len(text) - 2)
        answer = sequence.token_ids[max(sequence.num_prompt, sequence.num_tokens - most) :]
        if self._next + len(answer) >= len(text):
            self._next = 1
        start, end = self._next, self._next + len(answer)
        text[start:end], text[end] = answer, END
        self._owners[start:end] = array("q", [owner]) * len(answer)
        for place in range(start + GRAM, end):
            key = self._key(owner, text[place - GRAM : place])
            self._before[place], self._newest[key] = self._newest[key], place
        self._next = end + 1

    def find(self, owner: int, token_ids: array[int]) -> Found:
        places = chain(self._newest[self._key(owner, token_ids[-GRAM:])], self._before)
        if not (places := [place for place in places if self._owners[place] == owner]):
            return NOTHING
        most, best = best_places(self._text, places, token_ids[-MAX_MATCHED:])
        followed = [tokens for place in best if (tokens := self._following(place))]
        return Found(most, followed) if most >= GRAM and followed else NOTHING

    def _following(self, place: int) -> list[int]:
        tokens = self._text[place : place + MAX_DRAFTED].tolist()
        return tokens[: tokens.index(END)] if END in tokens else tokens

    def _key(self, owner: int, gram: array[int]) -> int:
        return hash((owner, *gram)) % len(self._newest)


def owner_of(sequence: Sequence) -> int:
    """A number that identifies tenant and adapter."""
    digest = hash_block(sequence.cache_root, tuple(sequence.tenant.name.encode()))
    return int.from_bytes(digest[:7])
