"""SLM-MUX: the selection, the search for members, equal samples for the rivals, the command."""

import importlib.util
import itertools

import pytest
import torch
from mutants import load_mutant
from test_chat import QWEN25, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from siblings import slm_mux
from siblings.slm_mux import MuxConfig

GOLDS = ("Lima",)
# What three models say to five questions whose answer is always Lima: (first, second, third sample)
SAID = {
    "sure": ["lima lima lima", "x x x", "lima lima lima", "x y z", "x x x"],
    "wide": ["x x lima", "lima lima x", "x lima lima", "lima lima lima", "x y lima"],
    "shy": ["x y z", "lima lima y", "x y z", "x x y", "lima lima x"],
}
needs_countries = pytest.mark.skipif(
    importlib.util.find_spec("countryinfo") is None,
    reason="countryinfo is not installed: see requirements-real.txt",
)


def votes_of(module):
    return {
        name: [module.vote(samples.split(), GOLDS) for samples in rows]
        for name, rows in SAID.items()
    }


def selects(module) -> bool:
    """The surest model is believed, though more samples say otherwise; accuracy decides ties."""
    sure, other = module.vote(["lima"] * 3, GOLDS), module.vote(["x", "x", "y"], GOLDS)
    third = module.vote(["x", "x", "lima"], GOLDS)
    stubborn = module.vote(["x"] * 3, GOLDS)
    cases = [
        module.mux([other, sure, third], [0.9, 0.1, 0.9]) is sure,
        module.mux([stubborn, sure], [0.4, 0.6]) is sure,
        module.mux([stubborn, sure], [0.6, 0.4]) is stubborn,
        # A single sample is always consistent, so the most accurate model answers everything.
        module.mux([module.vote([x], GOLDS) for x in ("x", "lima", "y")], [0.2, 0.5, 0.3]).right,
        module.vote(["y", "x", "x", "y"], GOLDS).answer == "y",
        module.vote(["", "", "lima"], GOLDS) == module.Vote("", 2 / 3, False),
    ]
    return all(cases)


def measures(module) -> bool:
    """UnionAcc and Contradiction, counted by hand on SAID; the search is a loop over all pairs."""
    said = votes_of(module)

    def numbers(*names):
        rows = [said[name] for name in names]
        return module.union(rows), module.contradiction(rows)

    # Of "sure" the votes 2 and 5 are consistently wrong; "wide" has 2 right and 5 wrong.
    by_hand = {("sure", "wide"): (0.8, 0.2), ("sure", "shy"): (0.8, 0.4), ("wide", "shy"): (0.8, 0)}
    if any(numbers(*names) != pytest.approx(told) for names, told in by_hand.items()):
        return False
    for penalty, members in itertools.product((0.0, 1.0), (1, 2, 3)):
        best = None
        for names in itertools.combinations(said, members):
            union, contradiction = numbers(*names)
            value = union - penalty * contradiction
            if best is None or value > best[0]:
                best = value, names
        if module.search(said, members, penalty) != best[1]:
            return False
    return (module.search(said, 2, 0.0), module.search(said, 2, 1.0)) == (
        ("sure", "wide"),
        ("wide", "shy"),
    )


def test_the_most_consistent_model_is_believed():
    assert selects(slm_mux)


def test_members_are_searched_for():
    assert measures(slm_mux)


@pytest.mark.parametrize(
    "stands, becomes",
    [
        ("key=lambda i: (votes[i].share, accuracies[i])", "key=lambda i: votes[i].share"),
        ("(votes[i].share, accuracies[i])", "(accuracies[i], votes[i].share)"),
        ("one.share == 1 and not one.right", "one.share == 1"),
        ("one.share == 1 and not one.right", "not one.right"),
        ("sum(map(min, stubborn, saved))", "sum(stubborn)"),
        ("union(rows[names]) - penalty", "union(rows[names]) + penalty"),
        (
            "sum(any(one.right for one in votes) for votes",
            "sum(all(v.right for v in votes) for votes",
        ),
        ("Vote(answer, count / len(samples)", "Vote(answer, 1 / len(set(samples))"),
    ],
)
def test_mutants_are_noticed(stands, becomes, tmp_path):
    mutant = load_mutant("siblings/slm_mux.py", stands, becomes, tmp_path)
    assert not (selects(mutant) and measures(mutant))


def equal_samples(module) -> bool:
    """Two models, K·k = 4 samples each: who says what is right, of which rival sees which."""
    config = MuxConfig(k=2, members=2, validation=1, test=3)
    asked = [("?", GOLDS)] * 4
    drawn = {
        "a": ["lima lima lima lima", "lima x x x", "x y lima lima", "x y x x"],
        "b": ["x x x x", "z z lima lima", "lima lima x x", "lima lima y y"],
    }
    drawn = {name: [samples.split() for samples in rows] for name, rows in drawn.items()}
    told = module.compare(config, asked, drawn)
    rows = told["λ = 1: a + b"]
    right = {name: text.split()[0] for name, text in rows.items() if "SLM-MUX" in str(text)}
    # In the test "b" is always the surer one and says z, lima, lima. Four samples of "a" say
    # x, lima, x; two of each z, lima, lima.
    return (
        told["a"] == {"validation": 1.0, "test": 1 / 3}
        and told["b"] == {"validation": 0.0, "test": 2 / 3}
        and right == {"SLM-MUX": "66.7%", "vote of a alone": "33.3%", "vote of all": "66.7%"}
        and rows["some model right"] == 1.0
        and rows["contradictions"] == 1 / 3
        and "+1 −0" in rows["vote of a alone"]
    )


@pytest.mark.parametrize(
    "stands, becomes",
    [
        ("", ""),
        ("alone = voted(drawn[best])", "alone = voted(first[best])"),
        ("alone = voted(drawn[best])[config.validation :]", "alone = voted(drawn[best])"),
        ("(first[name] for name in names)", "(first[name] for name in [best])"),
        ("votes[: config.validation]", "votes[config.validation :]"),
    ],
)
def test_rivals_have_equal_samples(stands, becomes, tmp_path):
    module = load_mutant("siblings/slm_mux.py", stands, becomes, tmp_path) if stands else slm_mux
    assert equal_samples(module) is not bool(stands)


@needs_countries
def test_no_demonstration_names_a_country_that_is_asked_about():
    taught, others = slm_mux.questions(3)
    shown = [question for part in taught.values() for question in part]
    countries = [
        {messages[-1]["content"].split(" of ", 1)[1] for messages, _ in part}
        for part in (shown, others)
    ]
    assert countries[0] and not countries[0] & countries[1]
    assert list(taught) == list(slm_mux.NAMES + slm_mux.CODES) and all(taught.values())
    assert len(others) > 300


@needs_countries
def test_the_command(tmp_path, monkeypatch, capsys):
    """On a random chat model of 400 words; a second run finds the models in the cache."""
    words = tokenizer(QWEN25, eos="<|im_end|>")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape, **heads))
    tiny.save_pretrained(tmp_path / "start")
    words.save_pretrained(tmp_path / "start")
    monkeypatch.setattr(slm_mux, "MODELS", {"one": (slm_mux.NAMES, 1), "two": (slm_mux.CODES, 1)})
    line = "--validation 2 --test 3 --k 2  --model".split() + [str(tmp_path / "start")]
    line += ["--cache", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert slm_mux.main(line) == 0
    first = capsys.readouterr().out
    assert "one + two" in first and "warm start: step 1/1" in first
    written = tmp_path / "runs" / "slm_mux" / "seed-0.json"
    told = written.read_text()
    assert slm_mux.main(line) == 0
    assert "warm start" not in capsys.readouterr().out and written.read_text() == told
    for bad in ("--members 3", "--temperature 0", "--temperature nan", "--validation 9000"):
        assert slm_mux.main([*line, *bad.split()]) == 2
    assert capsys.readouterr().err.count("mars: ") == 4
