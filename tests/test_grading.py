"""Exact match on pairs, beside the usual normalisation; F1."""

import re
import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.grading import exact_match, f1, grader, normalise
from tasks.questions import Question
from toy.language import vocabulary


def standard(text):
    """The normalisation of the SQuAD and FlashRAG scripts, written down again."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


SAME = [
    ("The Beatles!", "beatles"),
    ("U.S.A.", "usa"),
    ("Beatles, The", "The Beatles"),
    ("A", "a"),
    ("the the", "The The"),
    ("**42**", "42"),
    ("- Paris", "Paris"),
    ("AC/DC", "ACDC"),
    ("COVID-19", "covid19"),
    ("7-Eleven", "7Eleven"),
    ("$5", "5"),
    ("+7", "7"),
    ("Lennon - McCartney", "Lennon McCartney"),
    ("1,000", "1000"),
    ("1,234.5", "1234.5"),
    ("−5", "-5"),
    ("-5 °C", "−5 °c"),
    ("2010-2012", "2010–2012"),
    ("Jean‑Paul", "Jean-Paul"),
]
DIFFERENT = [
    ("Paris or London", "Paris"),
    ("five", "5"),
    ("", ""),
    ("", "..."),
    ("...", "..."),
    ("the", "a"),
    ("A", "B"),
    ("3.5", "35"),
    ("-5", "5"),
    ("−5", "5"),
    ("(-5)", "5"),
    (".5", "5"),
    ("-.5", ".5"),
    ("1,00", "100"),
    ("1.0.0", "100"),
    ("007", "7"),
    ("0:50", "0.5"),
    ("192.168.1.11", "192.168.11.1"),
    ("10-5", "105"),
    ("9/11", "911"),
    ("10^-6", "10^6"),
    ("5'11", "511"),
]


@pytest.mark.parametrize("said, gold", SAME)
def test_right_answers(said, gold):
    for one, other in ((said, gold), (gold, said)):
        assert exact_match(one, [other])
        assert exact_match(one, ["more", other])
        assert f1(one, [other]) == 1.0


@pytest.mark.parametrize("said, gold", DIFFERENT)
def test_wrong_answers(said, gold):
    assert not exact_match(said, [gold])
    assert not exact_match(gold, [said])
    assert f1(said, [gold]) < 1.0
    assert not exact_match("x", []) and not exact_match(None, [gold])


def test_each_repair_is_needed():
    """The usual normalisation is wrong on these pairs, and not on all of the others."""
    wrong = [pair for pair in DIFFERENT if standard(pair[0]) == standard(pair[1])]
    missed = [pair for pair in SAME if standard(pair[0]) != standard(pair[1])]
    assert len(wrong) > 12 and ("-5", "5") in wrong and ("...", "...") in wrong
    assert missed == [("−5", "-5"), ("-5 °C", "−5 °c"), *SAME[-2:]]


# --------------------------------------------------------------------------------------- laws


@given(st.text(max_size=30))
def test_without_numbers_it_is_the_usual_normalisation(text):
    text = re.sub(r"[\d−‐-―]", "", text)
    usual = standard(unicodedata.normalize("NFC", text))
    assert normalise(text) == usual or not usual


@given(st.text(max_size=30) | st.sampled_from(["à la carte", "São Tomé", "İzmir", "Ångström"]))
def test_how_letters_are_stored_makes_no_difference(text):
    """Alone, "à" in two characters would lose its letter, which is an article."""
    for form in ("NFC", "NFD"):
        assert normalise(unicodedata.normalize(form, text)) == normalise(text)


@given(st.text("0123456789.,:/-+^' ax", max_size=14), st.text("0123456789.,-− ax", max_size=14))
def test_what_ours_calls_the_same_the_usual_one_does_too(said, gold):
    """But for the dashes of Unicode, ours is only stricter."""
    if exact_match(said, [gold]):
        assert standard(said.replace("−", "-")) == standard(gold.replace("−", "-"))


def test_questions_of_the_toy_are_graded_as_by_the_usual_normalisation():
    words = [word for word in vocabulary() if word.isalnum()]
    for answer in words + [f"{first} {second}" for first, second in zip(words, words[1:])]:
        assert normalise(answer) == standard(answer) or not standard(answer)


@given(st.text(max_size=30), st.lists(st.text(max_size=30), max_size=3))
def test_laws_of_the_graders(said, golds):
    assert 0.0 <= f1(said, golds) <= 1.0
    if exact_match(said, golds):
        assert f1(said, golds) == 1.0
        assert normalise(said)
    assert exact_match(said, [said]) == bool(normalise(said))
    assert not exact_match(None, golds) and not f1(None, golds)


# ------------------------------------------------------------------------------------ F1


def test_f1_counts_words_as_a_multiset():
    assert f1("the red red house", ["red house"]) == pytest.approx(2 * 2 / 5)
    assert f1("red red", ["red red red house"]) == pytest.approx(2 * 2 / 6)
    assert f1("red house", ["blue", "red car"]) == pytest.approx(0.5)
    assert f1("5", ["6"]) == 0.0


@pytest.mark.parametrize(
    "said, gold",
    [("no", "no one"), ("no one", "no"), ("Yes, he was", "yes"), ("noanswer", "noanswer given")],
)
def test_f1_gives_nothing_for_half_a_yes(said, gold):
    assert f1(said, [gold]) == 0.0
    assert f1(said, [gold, said]) == 1.0


def test_the_grader_of_exact_match():
    question = Question("1", "What is 6 × 7?", ("42", "forty-two"), "test")
    grade = grader("em")
    assert grade(question, "42.") == 1.0
    assert grade(question, "Forty-two.") == 1.0
    assert grade(question, "41") == 0.0
