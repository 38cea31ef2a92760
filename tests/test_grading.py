"""Exact match: on pairs, and beside the usual normalisation."""

import itertools
import re
import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.grading import exact_match, normalise


def standard(text):
    """The normalisation of the SQuAD and FlashRAG scripts, written down again."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


SAME = [
    ("**42**", "42"),
    ("COVID-19", "covid19"),
    ("1,234.5", "1234.5"),
    ("−5", "-5"),
    ("2010-2012", "2010–2012"),
    ("1e+5", "1E5"),
    ("+$5", "$5"),
    ("Zu\u0308rich\u200b。", "Zürich"),
    ("“Ada’s”", '"Ada\'s"'),
    (r"$\boxed{\text{Ada}}$", "Ada"),
    (r"10^{-6}", "10^-6"),
]
DIFFERENT = [
    ("the", "a"),
    ("1,00", "100"),
    ("9/11", "911"),
    ("10^-6", "10^6"),
    ("(-₹.5)", "₹.5"),
    ("10²", "102"),
    ("10⁻⁵", "10⁵"),
    ("5½", "51/2"),
]


@pytest.mark.parametrize("answer, gold", SAME)
def test_right_answers(answer, gold):
    assert exact_match(answer, ["more", gold]) and exact_match(gold, [answer])


@pytest.mark.parametrize("answer, gold", DIFFERENT)
def test_wrong_answers(answer, gold):
    assert not exact_match(answer, [gold]) and not exact_match(gold, [answer])
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


SIGNS = ["", "-", "+", "−"]
MANTISSAS = ["5", "35", "3.5", "3.", ".5"]
EXPONENTS = ["", "e5", "E-5", "e−5", "e+5", "e35"]


@pytest.mark.parametrize("money", ["", "$", "£"])
def test_no_number_earns_the_reward_of_another(money):
    values = {}  # what a text becomes -> the value of its number
    for sign, mantissa, exponent in itertools.product(SIGNS, MANTISSAS, EXPONENTS):
        value = float(f"{sign}{mantissa}{exponent}".replace("−", "-"))
        text = normalise(f"{sign}{money}{mantissa}{exponent}")
        assert values.setdefault(text, value) == value


@given(st.text("0123456789.,:/-+^' ax", max_size=14), st.text("0123456789.,-− ax", max_size=14))
def test_two_answers_that_match_also_match_by_the_usual_normalisation(answer, gold):
    """Ours is only stricter, apart from the dashes of Unicode. An answer matches itself."""
    if exact_match(answer, [gold]):
        assert standard(answer.replace("−", "-")) == standard(gold.replace("−", "-"))
    assert exact_match(answer, [answer]) == bool(normalise(answer))
