"""Questions from files, the hub, benchmarks and a mix; what is held out."""

import base64
import hashlib
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError
from hypothesis import given
from hypothesis import strategies as st

from config import UserError
from tasks.questions import (
    BENCHMARKS,
    FLASHRAG,
    Question,
    decrypt,
    load_questions,
    mix,
    same_question,
    split,
)


def line(number, **more):
    row = {"id": f"test_{number}", "question": f"q{number}?", "golden_answers": [f"a{number}"]}
    return json.dumps(row | more)


def write(path, *lines, end="\n"):
    path.write_bytes("".join(text + end for text in lines).encode())
    return str(path)


# -------------------------------------------------------------------------------------------- files


def test_both_forms_of_a_line(tmp_path):
    path = write(
        tmp_path / "q.jsonl",
        line(1, metadata={"x": 1}),
        '{"question": "Who?", "answer": "Ada", "id": null, "golden_answers": null, "set": null}',
        '{"id": 7, "question": "Wo\\u2028?", "golden_answers": ["a", "b", ""], "set": "own"}',
    )
    assert load_questions(path) == [
        Question("test_1", "q1?", ("a1",), path),
        Question("2", "Who?", ("Ada",), path),
        Question("7", "Wo\u2028?", ("a", "b", ""), "own"),
    ]


@pytest.mark.parametrize("before, after", [("\ufeff", "\n"), ("", ""), ("\r\n \r\n", "\r\n\n\t\n")])
def test_a_file_of_one_question_as_programs_write_it(tmp_path, before, after):
    path = write(tmp_path / "q.jsonl", before + line(1) + after, end="")
    assert load_questions(path) == [Question("test_1", "q1?", ("a1",), path)]


BAD = {
    "[" * 100_000: "not JSON",
    "NaN": "not a JSON object",
    line(2, question=" "): '"question"',
    line(2, golden_answers=["", " "]): "no golden answer",
    line(2, golden_answers=["a", 5]): "not a list of texts",
    '{"question": "q"}': "not a list of texts",
    line(2, id="1"): "an earlier line has the id '1'",  # the number 1 and the text are the same id
    line(2, question="\ud800"): "surrogates not allowed",
    line(2, set="a\x1b[31m\nb"): '"set" is',
}


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[:40])
def test_a_malformed_line_is_named(tmp_path, bad):
    path = write(tmp_path / "q.jsonl", line(1, id=1), bad, line(4))
    with pytest.raises(UserError, match=re.escape(BAD[bad])) as error:
        load_questions(path)
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "spec",
    ["", ".", "pipe", "empty", "latin", "one:0.0", "one:" + "9" * 400, "one:1,one:2"]
    + ["x" * 5000, "x\0y", "hub:", "hub:only/two", "hub:me/mi..ne/q.jsonl"],
)
def test_a_bad_spec_is_one_sentence(tmp_path, monkeypatch, spec):
    """From a pipe into which nobody writes one would read for ever."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "one", line(1))
    os.mkfifo("pipe")
    Path("empty").write_text("\n\n")
    Path("latin").write_bytes(b'{"question": "O\xf9?", "answer": "l\xe0"}')
    with pytest.raises(UserError) as error:
        load_questions(spec)
    assert len(str(error.value)) < 400


# --------------------------------------------------------------------------------- limits and mixes


def file_of(path, size):
    return write(path, *map(line, range(size)))


def test_a_limit_draws_by_the_seed_and_keeps_the_order(tmp_path):
    path = file_of(tmp_path / "a.jsonl", 100)
    all_ = load_questions(path)
    some = load_questions(path, limit=10)
    assert some == load_questions(path, limit=10) != load_questions(path, limit=10, seed=1)
    assert len(set(some)) == 10
    assert [q for q in all_ if q in some] == some
    assert load_questions(path, limit=1000) == all_ == load_questions(f"{path}:3")


def test_a_mix_keeps_its_proportions_and_no_question_comes_twice(tmp_path):
    a, b, c = (file_of(tmp_path / f"{size}.jsonl", size) for size in (100, 30, 500))
    spec = f"{a}:2,{b}:1.5,{c}"
    mixed = load_questions(spec, limit=45)
    assert Counter(q.source for q in mixed) == {a: 20, b: 15, c: 10}
    assert all(q.id.startswith(q.source + "/") for q in mixed)
    assert mixed == load_questions(spec, limit=45)
    assert {*mixed} != {*load_questions(spec, limit=45, seed=1)}
    assert [q.source for q in mixed] != sorted(q.source for q in mixed)  # shuffled
    # Without a limit the scarcest set decides: 30 / 1.5 * (2 + 1.5 + 1) = 90 questions.
    assert Counter(q.source for q in load_questions(spec)) == {a: 40, b: 30, c: 20}
    # Without weights they are joined whole.
    assert [q.source for q in load_questions(f"{b}, {a}")] == [b] * 30 + [a] * 100


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=5),
    st.none() | st.integers(1, 200),
)
def test_shares_of_a_mix(sets, limit):
    names = [f"set{number}" for number in range(len(sets))]
    sizes = dict(zip(names, (size for size, _ in sets)))
    weights = {name: weight / 10 for name, (_, weight) in zip(names, sets)}
    made = {n: [Question(f"{n}/{i}", "q", ("a",), n) for i in range(sizes[n])] for n in names}
    mixed = mix(made, weights, limit, seed=0)
    assert len(set(mixed)) == len(mixed) <= (limit or 10**9)
    # Each share is right to one question more, and as many less as were cut.
    density = min(size / weights[name] for name, size in sizes.items())
    if limit:
        density = min(density, limit / sum(weights.values()))
    assert len(mixed) >= density * sum(weights.values()) - 1e-3
    counts = Counter(question.source for question in mixed)
    for name in names:
        assert density * weights[name] - len(sets) < counts[name] < density * weights[name] + 1


# ---------------------------------------------------------------------------------------- held out


def test_no_question_is_in_both_parts(tmp_path):
    """Every question stands there twice, under two ids and written a little differently."""
    twins = [line(n) for n in range(20)]
    twins += [line(f"{n}_again", question=f"  Q{n} ") for n in range(20)]
    path = write(tmp_path / "twins.jsonl", *twins)
    train, held_out = split(path, "", held_out=10, seed=0)
    assert held_out == load_questions(path, limit=10) != split(path, "", held_out=10, seed=1)[1]
    asked = {question.text.strip(" ?").lower() for question in held_out}
    assert not asked & {question.text.strip(" ?").lower() for question in train}
    assert len(train) == 40 - 2 * len(asked)
    other = write(tmp_path / "other.jsonl", *map(line, range(4)))
    train, held_out = split(path, other, held_out=None, seed=0)
    assert [question.text for question in held_out] == ["q0?", "q1?", "q2?", "q3?"]
    assert len(train) == 32
    assert same_question(" Ｗho\nwas  it?!") == same_question("who was it.")


# ------------------------------------------------------------------------------------------ the hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """{OWNER/REPO/path: what stands there, text or an exception} in place of the hub."""
    held = {}

    def download(repo, filename, *, repo_type):
        assert repo_type == "dataset"
        found = held.get(f"{repo}/{filename}", EntryNotFoundError("404\nnot found"))
        if isinstance(found, Exception):
            raise found
        path = tmp_path / repo.replace("/", "-") / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found if isinstance(found, bytes) else found.encode())
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return held


def test_short_names_and_their_splits(hub):
    evaluated = "nq/test triviaqa/test popqa/test hotpotqa/dev 2wikimultihopqa/dev musique/dev"
    for file in f"{evaluated} bamboogle/test nq/train 2wikimultihopqa/train".split():
        hub[f"{FLASHRAG}/{file}.jsonl"] = line(file)
    seven = load_questions("nq,triviaqa,popqa,hotpotqa,2wiki,musique,bamboogle")
    assert [q.id.split("/", 1)[1] for q in seven] == [
        f"test_{file}" for file in f"{evaluated} bamboogle/test".split()
    ]
    train = load_questions(f"nq/train,hub:{FLASHRAG}/2wikimultihopqa/train.jsonl")
    assert [q.id.rpartition("_")[2] for q in train] == ["nq/train", "2wikimultihopqa/train"]


# --------------------------------------------------------------------------------- benchmarks

LONG = "Which café, " + "of all that are named " * 9 + "日本, is it?"  # longer than a key


def encrypted(text, canary):
    """As the authors of BrowseComp describe it: XOR with the repeated hash, then base64."""
    key = hashlib.sha256(canary.encode()).digest() * 100
    return base64.b64encode(bytes(a ^ b for a, b in zip(text.encode(), key))).decode()


def secret_row(question, answer, canary):
    row = {"problem": encrypted(question, canary), "answer": encrypted(answer, canary)}
    return {**row, "problem_topic": "Art", "canary": canary}


# The first column of FRAMES has no name, and cells hold quotation marks and line breaks.
FRAMES = (
    "\tPrompt\tAnswer\twikipedia_link_1\twikipedia_link_11+\treasoning_types\twiki_links\r\n"
    "0\tWho?\tAda\thttps://a\t\tNumerical\t['https://a']\r\n"
    '1\t"Which ""first""\nname?"\tJane Ballou\t\t\tTabular\t[]\r\n'
)
WEBWALKERQA = {
    "question": "Wann? 什么时候?",
    "answer": "2025",
    "root_url": "https://2025.aclweb.org/",
    "info": {"hop": "multi-source", "lang": "zh", "golden_path": ["root->a"]},
}
PARQUET = {
    "hle": [
        {"id": "a", "question": "What is drawn?", "answer": "x", "image": "data:image/png,AA"},
        {"id": "b", "question": "6 × 7?", "answer": "42", "image": ""},
    ],
    "gaia": [
        {"task_id": "a", "Question": "Sum?", "Final answer": "3", "file_name": "a.xlsx"},
        {"task_id": "b", "Question": "6 × 7?", "Final answer": "42", "file_name": None},
    ],
    "browsecomp": [secret_row(LONG, "Ada", "a GUID"), secret_row("Who?", "東京", "another")],
}
ASKED = {
    "hle": [("b", "6 × 7?", "42")],
    "gaia": [("b", "6 × 7?", "42")],
    "browsecomp": [("1", LONG, "Ada"), ("2", "Who?", "東京")],
}


def test_frames_and_webwalkerqa(hub):
    hub["google/frames-benchmark/test.tsv"] = FRAMES
    assert load_questions("frames") == [
        Question("1", "Who?", ("Ada",), "frames"),
        Question("2", 'Which "first"\nname?', ("Jane Ballou",), "frames"),
    ]
    hub["callanwu/WebWalkerQA/data/main-00000-of-00001.jsonl"] = json.dumps(WEBWALKERQA)
    *mixed, question = load_questions("frames,webwalkerqa")
    assert [question.id for question in mixed] == ["frames/1", "frames/2"]
    assert question == Question("webwalkerqa/1", "Wann? 什么时候?", ("2025",), "webwalkerqa")


@pytest.mark.parametrize("name", PARQUET)
def test_benchmarks_in_parquet(hub, name, tmp_path):
    """Text only; BrowseComp is decrypted in memory."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(PARQUET[name]), tmp_path / "table")
    hub[BENCHMARKS[name][0]] = (tmp_path / "table").read_bytes()
    found = load_questions(name)
    assert [(q.id, q.text, *q.golden_answers) for q in found] == ASKED[name]


REFUSED = {
    "hub:me/mine/bad.jsonl": ("me/mine/bad.jsonl", "{", "hub:me/mine/bad.jsonl, line 1: not JSON"),
    "hub:me/mine/q.jsonl": ("another", "", "cannot get me/mine/q.jsonl from the hub .404.:"),
    "hotpotqa/test": ("another", "", "cannot get .*/hotpotqa/test.jsonl from the hub .404.:"),
    "frames": (BENCHMARKS["frames"][0], b"q\xff\tAnswer\n", "questions in frames cannot be read"),
    "hle": (
        BENCHMARKS["hle"][0],
        GatedRepoError("gated", response=Mock()),
        "cannot get cais/hle/.*gated.: accept its terms",
    ),
    "gaia": (BENCHMARKS["gaia"][0], b"PAR1", "gaia is a parquet file: pip install pyarrow"),
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_the_hub_does_not_give_is_one_sentence(hub, monkeypatch, spec):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    file, content, says = REFUSED[spec]
    hub[file] = content
    with pytest.raises(UserError, match=says):
        load_questions(spec)


def test_the_key_of_browsecomp():
    """Worked out by hand: sha256("x") begins with 2d 71, which is 0x48 ^ "e" and 0x18 ^ "i"."""
    secret = base64.b64encode(bytes([0x2D ^ ord("h"), 0x71 ^ ord("i")])).decode()
    assert decrypt(secret, "x") == "hi"
    for text, canary in ((encrypted(LONG, "one"), "two"), ("Ada Baker", "one")):
        with pytest.raises(ValueError):
            decrypt(text, canary)
