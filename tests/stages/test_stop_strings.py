from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmserve.stages.stop_strings import find_stop, num_held

WORDS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def test_the_stop_string_that_is_complete_first_cuts() -> None:
    assert find_stop("say abc", ["abc", "b"]) == 5  # "b" is complete while "abc" still lacks its end
    assert find_stop("say abc", ["bc", "abc"]) == 4
    assert find_stop("say", ["abc"]) is None


def test_only_what_may_become_a_stop_string_is_held() -> None:
    assert num_held("one <", ["<end>"]) == 1
    assert num_held("one <en", ["<end>", "n!"]) == 3
    assert num_held("one <x", ["<end>"]) == 0
    assert num_held("anything", []) == 0


@given(text=st.text("ab", max_size=12), stops=WORDS)
def test_the_cut_is_the_one_that_reading_character_by_character_gives(text: str, stops: list[str]) -> None:
    expected = None
    for end in range(1, len(text) + 1):
        ending = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            expected = min(ending)
            break
    assert find_stop(text, stops) == expected


@given(text=st.text("ab", max_size=8), more=st.text("ab", max_size=4), stops=WORDS)
def test_a_later_cut_never_reaches_into_text_that_was_let_go(text: str, more: str, stops: list[str]) -> None:
    if find_stop(text, stops) is None and (cut := find_stop(text + more, stops)) is not None:
        assert cut >= len(text) - num_held(text, stops)
