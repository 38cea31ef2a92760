"""Exact match on pairs, beside the usual normalisation; F1."""

import re
import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.grading import exact_match, grader, normalise
from tasks.questions import Question


def standard(text):
    """The normalisation of the SQuAD and FlashRAG scripts, written down again."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


SAME = [
    ("A", "a"),
    ("**42**", "42"),
    ("COVID-19", "covid19"),
    ("+7", "7"),
    ("1,000", "1000"),
    ("1,234.5", "1234.5"),
    ("−5", "-5"),
    ("2010-2012", "2010–2012"),
    ("1e+5", "1E5"),
    ("+$5", "$5"),
    ("Zu\u0308rich\u200b。", "Zürich"),
    ("“Ada’s”", '"Ada\'s"'),
    ("４２", "42"),
    (r"$\boxed{\text{Ada}}$", "Ada"),
    (r"10^{-6}", "10^-6"),
]
DIFFERENT = [
    ("", "..."),
    ("Paris or London", "Paris"),
    ("five", "5"),
    ("the", "a"),
    ("3.5", "35"),
    ("-5", "5"),
    ("(-5)", "5"),
    (".5", "5"),
    ("-.5", ".5"),
    ("1,00", "100"),
    ("9/11", "911"),
    ("10^-6", "10^6"),
    ("1e-5", "1e5"),
    ("2.E−3", "2.E3"),
    ("-$5", "$5"),
    ("(-₹.5)", "₹.5"),
    ("10²", "102"),
    ("10⁻⁵", "10⁵"),
    ("5½", "51/2"),
]


@pytest.mark.parametrize("said, gold", SAME)
def test_right_answers(said, gold):
    assert exact_match(said, ["more", gold]) and exact_match(gold, [said])


@pytest.mark.parametrize("said, gold", DIFFERENT)
def test_wrong_answers(said, gold):
    assert not exact_match(said, [gold]) and not exact_match(gold, [said])
    assert not exact_match("x", []) and not exact_match(None, [gold])


@given(st.text(st.characters(codec="ascii", exclude_categories=["Nd"]), max_size=30))
def test_in_ascii_without_numbers_it_is_the_usual_normalisation(text):
    assert normalise(text) == standard(text) or not standard(text)


@given(st.text(max_size=30))
def test_composed_decomposed_and_wide_forms_are_one_answer(text):
    for form in ("NFC", "NFD"):
        assert normalise(unicodedata.normalize(form, text)) == normalise(text)
    ascii = "".join(c for c in text if "!" <= c <= "~")
    assert normalise("".join(chr(ord(c) + 0xFEE0) for c in ascii)) == normalise(ascii)


signs = st.sampled_from(["", "-", "+", "−"])
mantissas = st.sampled_from(["5", "35", "3.5", "3.", ".5"])
exponents = st.sampled_from(["", "e5", "E-5", "e−5", "e+5", "e35"])
numbers = st.tuples(signs, mantissas, exponents)


@given(numbers, numbers, st.sampled_from(["", "$", "£"]))
def test_no_number_earns_the_reward_of_another(said, gold, money):
    if exact_match(said[0] + money + "".join(said[1:]), [gold[0] + money + "".join(gold[1:])]):
        one, other = (float("".join(number).replace("−", "-")) for number in (said, gold))
        assert one == other


@given(st.text("0123456789.,:/-+^' ax", max_size=14), st.text("0123456789.,-− ax", max_size=14))
def test_what_ours_calls_the_same_the_usual_one_does_too(said, gold):
    """But for the dashes of Unicode, ours is only stricter; what is left of it is right."""
    if exact_match(said, [gold]):
        assert standard(said.replace("−", "-")) == standard(gold.replace("−", "-"))
    assert exact_match(said, [said]) == bool(normalise(said))


def test_the_grader_of_exact_match():
    question = Question("1", "What is 6 × 7?", ("42", "forty-two"), "test")
    grade = grader("em")
    assert [grade(question, said) for said in ("42.", "Forty-two.", "41")] == [1.0, 1.0, 0.0]
