"""A head with few tokens, for an engine that drafts: in a small network, the head is often most of what a step reads.

The engine still reads every token. It never drafts one that its head does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llmserve.builder.calibration.encoder import Encoder
from llmserve.builder.calibration.text import read_calibration
from llmserve.builder.targets.base import Network
from llmserve.errors import RecipeError, Unsupported
from llmserve.models.graph import Program
from llmserve.models.program import Attr
from llmserve.models.spec import ChosenRows, Param


def tokens_of(path: Path, encoder: Encoder) -> tuple[int, ...]:
    """The tokens that occur in a file of texts, and those that end an answer, ascending.

    Raises as `read_calibration` does.
    """
    texts = read_calibration(path, encoder, name="the draft vocabulary", most_tokens=sys.maxsize).texts
    return tuple(sorted({token for ids in (*texts, encoder.end_ids()) for token in ids}))


def with_draft_vocabulary(network: Network, tokens: tuple[int, ...]) -> Network:
    """The network with a head that has only `tokens`."""
    program, params, options = network
    head = program.ops[-1]
    if program.pools:
        raise RecipeError("draft_vocabulary has no effect on a network that generates no tokens; leave it out")
    attrs: Mapping[str, Attr] = {**head.attrs, "tokens": tokens}
    short = replace(head, width=len(tokens), attrs=attrs)
    chosen = [_chosen(param, tokens) if param.name in head.weights else param for param in params]
    return Network(Program((*program.ops[:-1], short), program.cache, program.vocab_size), chosen, options)


def _chosen(param: Param, tokens: tuple[int, ...]) -> Param:
    if param.orders or param.product or param.factors:
        raise Unsupported("draft_vocabulary is not supported for a head whose rows are stored in another order")
    return replace(
        param, shape=(len(tokens), *param.shape[1:]), orders=(ChosenRows(tokens),),
        otherwise=param.otherwise and _chosen(param.otherwise, tokens),
    )  # fmt: skip
