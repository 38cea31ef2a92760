"""SLM-MUX: the selection, the search for members, equal samples for the rivals, the command."""

import pytest
from helpers.chat import random_model
from test_almanac import needs_pages

from siblings import slm_mux
from siblings.slm_mux import MuxConfig

GOLDS = ("Lima",)
# What three models say to five questions whose answer is always Lima: (first, second, third sample)
SAID = {
    "sure": ["lima lima lima", "x x x", "lima lima lima", "x y z", "x x x"],
    "wide": ["x x lima", "lima lima x", "x lima lima", "lima lima lima", "x y lima"],
    "shy": ["x y z", "lima lima y", "x y z", "x x y", "lima lima x"],
}


def test_the_most_consistent_model_is_believed():
    """It is, even if more samples differ. Accuracy decides ties; an empty answer is an answer."""
    answers = ("lima lima lima", "x x y", "x x lima", "x x x")
    sure, other, third, stubborn = (slm_mux.vote(samples.split(), GOLDS) for samples in answers)
    assert slm_mux.mux([other, sure, third], [0.9, 0.1, 0.9]) is sure
    assert slm_mux.mux([stubborn, sure], [0.4, 0.6]) is sure
    assert slm_mux.mux([stubborn, sure], [0.6, 0.4]) is stubborn
    assert slm_mux.vote(["y", "x", "x", "y"], GOLDS).answer == "y"
    assert slm_mux.vote(["", "", "lima"], GOLDS) == slm_mux.Vote("", 2 / 3, False)


def test_members_are_searched_for():
    """UnionAcc and Contradiction of SAID are counted by hand; λ decides which members win."""
    votes = {
        name: [slm_mux.vote(samples.split(), GOLDS) for samples in rows]
        for name, rows in SAID.items()
    }
    # Of "sure" the votes 2 and 5 are consistently wrong; "wide" has 2 right and 5 wrong.
    by_hand = {("sure", "wide"): (0.8, 0.2), ("sure", "shy"): (0.8, 0.4), ("wide", "shy"): (0.8, 0)}
    for names, numbers in by_hand.items():
        rows = [votes[name] for name in names]
        assert (slm_mux.union(rows), slm_mux.contradiction(rows)) == pytest.approx(numbers)
    assert slm_mux.search(votes, 2, 0.0) == ("sure", "wide")
    assert slm_mux.search(votes, 2, 1.0) == ("wide", "shy")
    assert slm_mux.search(votes, 1, 0.0) == ("wide",)


def test_rivals_have_equal_samples():
    """Two models, K·k = 4 samples each: who says what is right, of which rival sees which."""
    config = MuxConfig(k=2, members=2, validation=1, test=3)
    drawn = {
        "a": ["lima lima lima lima", "lima x x x", "x y lima lima", "x y x x"],
        "b": ["x x x x", "z z lima lima", "lima lima x x", "lima lima y y"],
    }
    drawn = {name: [samples.split() for samples in rows] for name, rows in drawn.items()}
    table = slm_mux.compare(config, [("?", GOLDS)] * 4, drawn)
    assert table["a"] == {"validation": 1.0, "test": 1 / 3}
    assert table["b"] == {"validation": 0.0, "test": 2 / 3}
    rows = table["λ = 1: a + b"]
    right = {name: text.split()[0] for name, text in rows.items() if "SLM-MUX" in str(text)}
    # In the test "b" is always the surer one and says z, lima, lima. Four samples of "a" say
    # x, lima, x; two of each z, lima, lima.
    assert right == {"SLM-MUX": "66.7%", "vote of a alone": "33.3%", "vote of all": "66.7%"}
    assert rows["some model right"] == 1.0 and rows["contradictions"] == 1 / 3
    assert "+1 −0" in rows["vote of a alone"]


@needs_pages
def test_no_demonstration_names_a_country_that_is_asked_about():
    taught, others = slm_mux.questions(3)
    shown, asked = (
        {messages[-1]["content"].split(" of ", 1)[1] for messages, _ in part}
        for part in (sum(taught.values(), []), others)
    )
    assert shown and not shown & asked
    assert list(taught) == list(slm_mux.NAMES + slm_mux.CODES) and all(taught.values())
    assert len(others) > 300


@needs_pages
def test_the_command_and_its_cache(tmp_path, monkeypatch, capsys):
    """A second run finds the models in the cache."""
    random_model(tmp_path / "start")
    monkeypatch.setattr(slm_mux, "MODELS", {"one": (slm_mux.NAMES, 1), "two": (slm_mux.CODES, 1)})
    line = "--validation 2 --test 3 --k 2  --model".split() + [str(tmp_path / "start")]
    line += ["--cache", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert slm_mux.main(line) == 0
    first = capsys.readouterr().out
    assert "one + two" in first and "warm start: step 1/1" in first
    written = tmp_path / "runs" / "slm_mux" / "seed-0.json"
    first_table = written.read_text()
    assert slm_mux.main(line) == 0
    assert "warm start" not in capsys.readouterr().out and written.read_text() == first_table
    assert slm_mux.main([*line, "--temperature", "0.0005"]) == 2  # before anything is trained
