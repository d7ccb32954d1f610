from __future__ import annotations

from llmserve.scheduler.words import BadWords, StopWords


def test_the_longest_matching_stop_word_counts() -> None:
    words = StopWords([(2, 3), (1, 2, 3), (9,)])
    assert words.num_matched((0, 2, 3)) == 2
    assert words.num_matched((1, 2, 3)) == 3
    assert words.num_matched((5, 9)) == 1
    assert words.num_matched((3, 2)) == 0
    assert words.num_matched(()) == 0
    assert words.single_ids == (9,)


def test_a_begun_stop_word_is_the_longest_that_can_still_come() -> None:
    words = StopWords([(1, 1, 2), (3,)])
    assert words.num_begun((1,)) == 1
    assert words.num_begun((1, 1)) == 2
    assert words.num_begun((1, 1, 1)) == 2  # the first is disproved, the last two are a new beginning
    assert words.num_begun((1, 3)) == 0
    assert words.num_begun(()) == 0


def test_no_words() -> None:
    assert StopWords([]).num_matched((1, 2)) == 0
    assert StopWords([]).num_begun((1, 2)) == 0
    assert StopWords([]).max_length == 0
    assert BadWords([]).banned_after([1, 2]) == set()


def test_only_the_token_that_completes_a_bad_word_is_banned() -> None:
    words = BadWords([(7,), (1, 2, 3), (2, 4), (2, 5)])
    assert words.banned_after([]) == {7}
    assert words.banned_after([1]) == {7}
    assert words.banned_after([2]) == {7, 4, 5}
    assert words.banned_after([1, 2]) == {7, 3, 4, 5}
    assert words.banned_after([1, 2, 0]) == {7}
