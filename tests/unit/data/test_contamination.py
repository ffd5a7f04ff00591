import random

import pytest

from megatron_bapo.data.contamination import find_overlap, index_evaluation_prompts
from megatron_bapo.records import Prompt


def prompt(text: str, system: str | None = None) -> Prompt:
    messages = ({"role": "system", "content": system},) if system else ()
    return Prompt("x:0", (*messages, {"role": "user", "content": text}), ground_truth="1", data_source="test")


def overlap(training: Prompt, *evaluation: str, n: int = 4):
    places = [(f"eval:{number}", prompt(text)) for number, text in enumerate(evaluation, start=1)]
    return find_overlap(training, index_evaluation_prompts(places, n))


@pytest.mark.parametrize("text", ["What is 1 + 1?", "what is 1+1?", " What\nis  1 + 1 ?", "Ｗhat is １ + 1?"])
def test_the_same_text_is_found_whatever_its_case_spaces_and_width(text):
    assert overlap(prompt(text, system="Be brief."), "5 x 5?", "What is 1 + 1?") == ("exact", "eval:2")


def test_texts_with_different_signs_differ():
    assert overlap(prompt("What is 1 - 1?"), "What is 1 + 1?", n=10) is None


def test_an_ngram_is_found_with_any_punctuation_between_its_words():
    assert overlap(prompt("See: the RED (fox), jumps over it"), "A red fox jumps over a dog") == ("ngram", "eval:1")
    assert overlap(prompt("the red fox walks over a cat"), "A red fox jumps over a dog") is None


def test_chinese_characters_count_as_words():
    assert overlap(prompt("今天有三只猫"), "昨天有三只猫吗") == ("ngram", "eval:1")
    assert overlap(prompt("今天有三只猫"), "昨天有三条狗吗") is None


def test_ngrams_that_many_evaluation_prompts_share_are_ignored():
    end = "Put your answer in a box."
    evaluation = [f"Question number {number} of this list. {end}" for number in range(1, 4)]
    assert overlap(prompt(f"Something else. {end}"), *evaluation) is None
    assert overlap(prompt(f"Something else. {end}"), *evaluation[:2]) == ("ngram", "eval:1")
    assert overlap(prompt(evaluation[1]), *evaluation) == ("exact", "eval:2")


def test_ngrams_match_a_search_in_the_joined_words():
    words = random.Random(0)
    texts = [" ".join(words.choices("abcde", k=words.randint(2, 12))) for _ in range(300)]
    training, evaluation = texts[:280], texts[280:282]

    found = [overlap(prompt(text), *evaluation, n=5) for text in training]

    for text, result in zip(training, found, strict=True):
        runs = [text[start : start + 9] for start in range(0, len(text) - 8, 2)]  # five letters and four spaces
        shared = any(run in other for run in runs for other in evaluation)
        assert (result is not None) == (shared or text in evaluation)
    assert 0 < sum(result is not None for result in found) < len(found)


def test_repeated_evaluation_rows_do_not_hide_a_shared_run_of_words():
    row = "A red fox jumps over a lazy dog"
    assert overlap(prompt("See the red fox jumps over a lake"), *[row] * 30) == ("ngram", "eval:1")
    assert overlap(prompt("See the red fox jumps over a lake"), *[row, f" {row}\n", row.upper()] * 10)
