"""Questions from files, the hub, benchmarks and several sets; what is held out."""

import base64
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError

from config import UserError
from tasks.questions import BENCHMARKS, FLASHRAG, Question, load_questions, same_question, split


def line(number, **more):
    row = {"id": f"test_{number}", "question": f"q{number}?", "golden_answers": [f"a{number}"]}
    return json.dumps(row | more)


def write(path, *lines):
    path.write_bytes("".join(text + "\n" for text in lines).encode())
    return str(path)


def test_both_forms_of_a_line_as_programs_write_them(tmp_path):
    """With a byte order mark, a carriage return and an empty line."""
    path = write(
        tmp_path / "q.jsonl",
        "\ufeff" + line(1, metadata={"x": 1}) + "\r",
        '{"question": "Who?", "answer": "Ada", "id": null, "golden_answers": [], "set": null}',
        " \r",
        '{"id": 7, "question": "Wo\u2028?", "golden_answers": ["a", "b", ""], "set": "own"}',
    )
    assert load_questions(path) == [
        Question("test_1", "q1?", ("a1",), path),
        Question("2", "Who?", ("Ada",), path),
        Question("7", "Wo\u2028?", ("a", "b", ""), "own"),
    ]


def test_merged_sets_may_repeat_an_id_and_each_question_has_one_of_its_own(tmp_path):
    rows = [line(n, id=id) for n, id in enumerate(["a", "a", "1", 1, "a@2", "a"])]
    path = write(tmp_path / "q.jsonl", *rows)
    found = load_questions(path)
    assert [q.id for q in found] == ["a", "a@2", "1", "1@4", "a@2@5", "a@6"]
    assert [q.text for q in found] == [f"q{n}?" for n in range(6)] and found == load_questions(path)


BAD = {
    "[" * 100_000: "not a JSON object",
    line(2, question=" "): '"question"',
    line(2, golden_answers=[3]): "not a list of texts",
    line(2, question="\ud800"): "surrogates not allowed",
}


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[:40])
def test_a_malformed_line_is_named(tmp_path, bad):
    path = write(tmp_path / "q.jsonl", line(1, id=1), bad, line(4))
    with pytest.raises(UserError, match=rf"\A{re.escape(path)}, line 2: .*{BAD[bad]}.*\Z"):
        load_questions(path)


@pytest.mark.parametrize("spec", ["", "pipe", "latin", "one, one", "hub:only/two", "a.tsv"])
def test_a_bad_spec_is_one_sentence(tmp_path, monkeypatch, spec):
    """From a pipe into which nobody writes one would read for ever."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "one", line(1))
    os.mkfifo("pipe")
    Path("a.tsv").write_text('question\tanswer\n"who\tada\nwhen" ?\t1968\n')
    Path("latin").write_bytes(b'{"question": "O\xf9?", "answer": "l\xe0"}')
    with pytest.raises(UserError) as error:
        load_questions(spec)
    assert len(str(error.value)) < 400


def test_a_file_goes_before_a_set_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nq").mkdir()
    for name in ("nq/mine.jsonl", "hle", "browsecomp"):
        write(tmp_path / name, line(1))
        assert len(load_questions(name)) == 1


def test_sets_are_joined_and_a_limit_draws_by_the_seed_from_all_of_them(tmp_path):
    a, b = (write(tmp_path / f"{size}.jsonl", *map(line, range(size))) for size in (100, 30))
    spec = f"{b}, {a}"
    joined = load_questions(spec)
    assert [q.source for q in joined] == [b] * 30 + [a] * 100
    assert (joined[29].id, joined[30].id) == (f"{b}/test_29", f"{a}/test_0")
    some = load_questions(spec, limit=20)
    assert some == load_questions(spec, limit=20) != load_questions(spec, limit=20, seed=1)
    assert len(set(some)) == 20 and {q.source for q in some} == {a, b}
    assert [q for q in joined if q in some] == some
    assert load_questions(spec, limit=1000) == joined


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
        path.write_bytes(found.encode())
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return held


def test_short_names_and_their_splits(hub):
    evaluated = "nq/test triviaqa/test popqa/test hotpotqa/dev 2wikimultihopqa/dev musique/dev"
    for file in f"{evaluated} bamboogle/test nq/train 2wikimultihopqa/train".split():
        hub[f"{FLASHRAG}/{file}.jsonl"] = line(file)
    seven = load_questions("nq,triviaqa,popqa,hotpotqa,2wiki,musique,bamboogle")
    assert [q.id.partition("_")[2] for q in seven] == f"{evaluated} bamboogle/test".split()
    train = load_questions(f"nq/train,hub:{FLASHRAG}/2wikimultihopqa/train.jsonl")
    assert [q.id.rpartition("_")[2] for q in train] == ["nq/train", "2wikimultihopqa/train"]


LONG = "Which café, " + "of all that are named " * 9 + "日本, is it?"  # longer than a key


def secret_row(question, answer, canary):
    """As the authors of BrowseComp describe it: XOR with the repeated hash, then base64."""
    key = hashlib.sha256(canary.encode()).digest() * 100

    def encrypt(text):
        return base64.b64encode(bytes(a ^ b for a, b in zip(text.encode(), key))).decode()

    return {"problem": encrypt(question), "answer": encrypt(answer), "canary": canary}


# The first column of frames has no name, and cells hold quotation marks and line breaks.
PUBLISHED = {
    "frames": (
        "\tPrompt\tAnswer\twikipedia_link_1\twikipedia_link_11+\treasoning_types\twiki_links\r\n"
        "0\tWho?\tAda\thttps://a\t\tNumerical\t['https://a']\r\n"
        '1\t"Which ""first""\nname?"\tJane Ballou\t\t\tTabular\t[]\r\n',
        [("1", "Who?", "Ada"), ("2", 'Which "first"\nname?', "Jane Ballou")],
    ),
    "webwalkerqa": (
        json.dumps({"question": "Wann? 什么时候?", "answer": "2025", "info": {"lang": "zh"}}),
        [("1", "Wann? 什么时候?", "2025")],
    ),
    "hle": (
        '[{"id": "a", "question": "What is drawn?", "answer": "x", "image": "data:image/png,AA"},'
        '{"id": "b", "question": "6 × 7?", "answer": "42", "image": ""}]',
        [("b", "6 × 7?", "42")],
    ),
    "gaia": (
        '[{"task_id": "a", "Question": "Sum?", "Final answer": "3", "file_name": "a.xlsx"},'
        '{"task_id": "b", "Question": "6 × 7?", "Final answer": "42", "file_name": null}]',
        [("b", "6 × 7?", "42")],
    ),
    "browsecomp": (
        json.dumps([secret_row(LONG, "Ada", "a GUID"), secret_row("Who?", "東京", "another")]),
        [("1", LONG, "Ada"), ("2", "Who?", "東京")],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_benchmark_as_it_is_published(hub, monkeypatch, name):
    """Text only; BrowseComp is decrypted in memory. What stands for a table in parquet is JSON."""
    pyarrow = Mock()
    pyarrow.parquet.read_table = lambda path: Mock(to_pylist=lambda: json.loads(path.read_text()))
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", pyarrow.parquet)
    hub[BENCHMARKS[name][0]], asked = PUBLISHED[name]
    found = load_questions(name)
    assert [(q.id, q.text, *q.golden_answers) for q in found] == asked
    assert {q.source for q in found} == {name}


def test_what_the_hub_does_not_give_is_one_sentence(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    hub[BENCHMARKS["hle"][0]] = GatedRepoError("gated", response=Mock())
    hub[BENCHMARKS["gaia"][0]] = "PAR1"
    for spec, says in (
        ("hotpotqa/test", "cannot get .*/hotpotqa/test.jsonl from the hub .404 not found.:"),
        ("hle", "cannot get cais/hle/.*gated.: accept its terms"),
        ("gaia", "gaia is a parquet file: pip install pyarrow"),
    ):
        with pytest.raises(UserError, match=says):
            load_questions(spec)
