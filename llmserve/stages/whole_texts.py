"""The preprocess step for embeddings and scores: converts a text, or a pair of texts, to token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import InvalidArgument, Unsupported, raise_problems
from llmserve.stages.bpe_tokenizer import JsonTokenizer
from llmserve.stages.files import TextFiles
from llmserve.stages.text import is_unicode, text_from_bytes
from llmserve.stages.token_lengths import check_length
from llmserve.stages.tokenizer import Tokenizer, tokenizer_of

QUERY, SECOND_QUERY, PROMPT_IDS = "QUERY", "SECOND_QUERY", "PROMPT_IDS"


@dataclass(frozen=True, slots=True)
class WholeTexts:
    """Stateless: it can process any number of requests at once."""

    tokenizer: Tokenizer
    max_seq_len: int | None  # the engine's, if known
    pair_template: str = ""  # for pairs, with {query} and {document}; empty: the tokenizer joins them

    @classmethod
    def open(cls, path: Path) -> Self:
        files = TextFiles.read(path)
        return cls(tokenizer_of(files), files.max_seq_len, files.pair_template)

    def ids(self, text: str, second: str | None) -> tuple[list[int], int]:
        """With the tokenizer's special tokens; and where the tokens of the second text begin, or 0."""
        for each in (text, second or ""):
            if not is_unicode(each):
                raise InvalidArgument("the text has lone surrogates (half a UTF-16 character), which UTF-8 forbids")
            check_length(each, self.tokenizer, self.max_seq_len)
        if second is None:
            return self.tokenizer.encode(text, add_special_tokens=True), 0
        if self.pair_template:
            given = {"{query}": text, "{document}": second}
            whole = re.sub(r"\{query\}|\{document\}", lambda found: given[found[0]], self.pair_template)
            return self.tokenizer.encode(whole), 0
        if not isinstance(self.tokenizer, JsonTokenizer):
            raise Unsupported("pairs of texts require a tokenizer.json, but the engine directory has none")
        return self.tokenizer.encode_pair(text, second)


def whole_text_arrays(stage: WholeTexts, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """QUERY, optionally with SECOND_QUERY, or PROMPT_IDS -> INPUT_ID and SECOND_SEGMENT. Batches of one."""
    given = {name: array for name, array in inputs.items() if array.size}
    rules = [
        (all(len(array) == 1 for array in given.values()), "its batch size must be 1"),
        ((QUERY in given) != (PROMPT_IDS in given), "give either text (text_input) or prompt_ids"),
        (SECOND_QUERY not in given or QUERY in given, "second_text requires text_input"),
    ]
    raise_problems(InvalidArgument, "the text cannot be used", [problem for holds, problem in rules if not holds])
    if PROMPT_IDS in given:
        ids, second_segment = given[PROMPT_IDS].reshape(-1).tolist(), 0
    else:
        texts = [text_from_bytes(given[name].item(0), name) for name in (QUERY, SECOND_QUERY) if name in given]
        ids, second_segment = stage.ids(texts[0], texts[1] if len(texts) > 1 else None)
    return {"INPUT_ID": np.array([ids], np.int32), "SECOND_SEGMENT": np.array([[second_segment]], np.int32)}
