"""Questions from files, a loopback hub and a mix; what is held out."""

import base64
import csv
import hashlib
import importlib.util
import io
import json
import os
import re
import sys
import threading
import types
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import answer, serving

from config import UserError
from tasks.questions import (
    BENCHMARKS,
    FLASHRAG,
    Question,
    decrypt,
    draw,
    load_questions,
    overlap,
    read_jsonl,
    shares,
    split,
)


def line(number, **more):
    return json.dumps(
        {
            "id": f"test_{number}",
            "question": f"q{number}?",
            "golden_answers": [f"a{number}"],
            **more,
        }
    )


def write(path, *lines, end="\n"):
    path.write_bytes("".join(text + end for text in lines).encode())
    return str(path)


# -------------------------------------------------------------------------------------------- files


def test_both_forms_of_a_line(tmp_path):
    path = write(
        tmp_path / "q.jsonl",
        line(1, metadata={"x": 1}),
        '{"question": "Who?", "answer": "Ada"}',
        '{"id": 7, "question": "Wo\\u2028?", "golden_answers": ["a", "b", ""]}',
    )
    assert load_questions(path) == [
        Question("test_1", "q1?", ("a1",), path),
        Question("2", "Who?", ("Ada",), path),
        Question("7", "Wo\u2028?", ("a", "b", ""), path),
    ]


def test_bom_crlf_and_blank_last_lines_are_fine(tmp_path):
    path = write(tmp_path / "q.jsonl", "\ufeff" + line(1), line(2), "", " ", end="\r\n")
    assert [q.id for q in load_questions(path)] == ["test_1", "test_2"]
    assert len(load_questions(write(tmp_path / "r.jsonl", line(1), line(2), end="\n"))) == 2
    (tmp_path / "s.jsonl").write_text(line(1))  # no newline at the end
    assert len(load_questions(str(tmp_path / "s.jsonl"))) == 1


@pytest.mark.parametrize(
    "bad, says",
    [
        ("{", "not JSON"),
        ("", "blank"),
        ("[1]", "not a JSON object"),
        ("7", "not a JSON object"),
        ("null", "not a JSON object"),
        ("[" * 100_000, "recursion"),
        ("NaN", "NaN is not JSON"),
        (line(2, metadata=float("nan")), "NaN is not JSON"),
        (line(2, metadata=float("inf")), "Infinity is not JSON"),
        (line(2, question=5), '"question"'),
        (line(2, question=" "), '"question"'),
        ('{"golden_answers": ["a"]}', '"question"'),
        (line(2, golden_answers=[]), "no golden answer"),
        (line(2, golden_answers=["", " "]), "no golden answer"),
        (line(2, golden_answers="a"), "not a list of texts"),
        (line(2, golden_answers=["a", 5]), "not a list of texts"),
        (line(2, golden_answers=None), "not a list of texts"),
        ('{"question": "q"}', "not a list of texts"),
        ('{"question": "q", "answer": ["a"]}', "not a list of texts"),
        (line(2, id=None), '"id"'),
        (line(2, id=True), '"id"'),
        (line(2, id=1.5), '"id"'),
        (line(1), "stands in line 1 already"),
        (line(2, question="\ud800"), "surrogates not allowed"),
        (line(2, set="all"), '"set" is'),
        (line(2, set="a\x1b[2Jb"), '"set" is'),
        (line(2) + line(3), "not JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, bad, says):
    path = write(tmp_path / "q.jsonl", line(1), bad, line(4))
    with pytest.raises(UserError) as error:
        load_questions(path)
    message = str(error.value)
    assert message.startswith(f"{path}: 1 of 3 lines are malformed: line 2: ")
    assert says in message


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(line(1).encode() + b"\n" + b'{"question": "\xff"}\n')
    with pytest.raises(UserError, match="line 2: .*utf-8"):
        load_questions(str(path))


def test_the_first_few_of_many_are_named_and_all_counted(tmp_path):
    lines = [line(n) for n in range(40)]
    lines[0::2] = ["{"] * 20
    path = write(tmp_path / "q.jsonl", *lines)
    with pytest.raises(UserError) as error:
        load_questions(path)
    assert "20 of 40 lines" in str(error.value)
    assert "and 15 more" in str(error.value)
    assert re.findall(r"line (\d+):", str(error.value)) == ["1", "3", "5", "7", "9"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b" "])
def test_an_empty_file_is_refused(tmp_path, content):
    (tmp_path / "q.jsonl").write_bytes(content)
    with pytest.raises(UserError, match="holds no question"):
        load_questions(str(tmp_path / "q.jsonl"))


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "nothere.jsonl",
        ".",
        "hub:only/two",
        "hub:",
        "nq/validation",
        "a.jsonl,,b.jsonl",
        "x:0",
        "nq:1,nq:2",
        "x" * 5000,
        "x\0y",
    ],
)
def test_a_bad_spec_is_one_sentence(spec):
    with pytest.raises(UserError):
        load_questions(spec)


@pytest.mark.parametrize(
    "row",
    [
        {"Prompt": "Who?", "Answer": "Ada", "wiki_links": "[]", "Unnamed: 0": 3},  # FRAMES
        {"Question": "Who?", "Final answer": "Ada", "Level": 1, "file_name": ""},  # GAIA
        {"question": "Who?", "answer": "Ada", "root_url": "https://x", "info": {}},  # WebWalkerQA
        {"problem": "Who?", "answer": "Ada", "canary": "x"},  # BrowseComp
        {"question": "Who?", "ground_truth": "Ada"},
        {"question": "Who?", "answers": ["Ada"]},
        {"question": "Who?", "answer": "Ada", "answers": [{"text": "Bob"}], "Question": "What?"},
        {"question": "Who?", "golden_answers": ["Ada"], "answer": "Bob", "prompt": "What?"},
    ],
)
def test_names_of_benchmarks(tmp_path, row):
    path = write(tmp_path / "q.jsonl", json.dumps(row))
    assert load_questions(path) == [Question("1", "Who?", ("Ada",), path)]


def test_the_ids_of_gaia(tmp_path):
    row = {"task_id": "c61d", "Question": "Who?", "Final answer": "Ada"}
    path = write(tmp_path / "q.jsonl", json.dumps(row))
    assert load_questions(path)[0].id == "c61d"


def test_secret_answers_are_refused(tmp_path):
    """The test split of GAIA says "?" everywhere: no answer could ever be right."""
    path = write(tmp_path / "q.jsonl", json.dumps({"Question": "Who?", "Final answer": "?"}))
    with pytest.raises(UserError, match="there is no golden answer"):
        load_questions(path)


def test_a_json_array(tmp_path):
    rows = [{"question": "Who?", "answer": "Ada"}, {"problem": "What?", "answer": "tea"}]
    path = write(tmp_path / "q.json", json.dumps(rows, indent=1))
    assert [question.text for question in load_questions(path)] == ["Who?", "What?"]
    path = write(tmp_path / "r.json", json.dumps([rows[0], 7]))
    with pytest.raises(UserError, match="1 of 2 entries are malformed: entry 2: not a JSON object"):
        load_questions(path)


def in_time(function):
    """The function's UserError, which must come at once: reading a pipe would wait for ever."""
    found = []

    def work():
        try:
            function()
        except UserError as error:
            found.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    assert found, "no UserError within 5 seconds"
    assert "\n" not in found[0]
    return found[0]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    said = in_time(lambda: load_questions(str(tmp_path / "pipe.jsonl")))
    assert "pipe.jsonl: it is not an ordinary file" in said


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/"])
def test_devices_and_folders_are_refused(name):
    assert "it is not an ordinary file" in in_time(lambda: load_questions(name))


def test_an_unreadable_file_is_one_sentence(tmp_path, monkeypatch):
    path = write(tmp_path / "q.jsonl", line(1))

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "(Permission denied)" in in_time(lambda: load_questions(path))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
def test_other_encodings_are_one_sentence(tmp_path, encoding):
    path = tmp_path / "q.jsonl"
    path.write_bytes('{"question": "Où?", "answer": "là"}\n'.encode(encoding))
    said = in_time(lambda: load_questions(str(path)))
    assert "q.jsonl" in said
    if encoding in ("utf-16", "utf-32"):
        assert "save it as UTF-8" in said


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "[" * 9 + "1" * 10_000])
def test_deep_and_endless_json_is_one_sentence(tmp_path, content):
    path = write(tmp_path / "q.jsonl", content)
    assert "1 of 1 lines are malformed" in in_time(lambda: load_questions(path))


# "?" alone stands for an answer that is kept secret.
said = st.text(min_size=1, max_size=20).filter(lambda text: text.strip() not in ("", "?"))


@given(
    st.lists(st.tuples(said, st.lists(said, min_size=1, max_size=3)), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
)
def test_whatever_json_can_hold_comes_back(rows, ascii_only, end):
    lines = [
        json.dumps({"question": question, "golden_answers": golds}, ensure_ascii=ascii_only)
        for question, golds in rows
    ]
    loaded = read_jsonl(end.join(lines).encode(), "memory")
    assert [(q.text, list(q.golden_answers)) for q in loaded] == rows


# --------------------------------------------------------------------------------- limits and mixes


def files(tmp_path, **sizes):
    """The paths of files with so many questions each."""
    paths = []
    for name, size in sizes.items():
        lines = [line(number) for number in range(size)]
        paths.append(write(tmp_path / f"{name}.jsonl", *lines))
    return paths


def test_a_limit_draws_by_the_seed_and_keeps_the_order(tmp_path):
    (path,) = files(tmp_path, a=100)
    all_ = load_questions(path)
    some = load_questions(path, limit=10)
    assert some == load_questions(path, limit=10) != load_questions(path, limit=10, seed=1)
    assert len(set(some)) == 10
    assert [q for q in all_ if q in some] == some
    assert load_questions(path, limit=1000) == all_
    with pytest.raises(UserError, match="limit"):
        load_questions(path, limit=0)


def test_a_mix_keeps_its_proportions_and_no_question_comes_twice(tmp_path):
    a, b, c = files(tmp_path, a=100, b=30, c=500)
    spec = f"{a}:2,{b}:1.5,{c}"
    mix = load_questions(spec, limit=45)
    assert Counter(q.source for q in mix) == {a: 20, b: 15, c: 10}
    assert len({q.id for q in mix}) == 45
    assert all(q.id.startswith(q.source + "/") for q in mix)
    assert mix == load_questions(spec, limit=45)
    assert mix != load_questions(spec, limit=45, seed=1)
    assert [q.source for q in mix] != sorted(q.source for q in mix)  # shuffled
    # Without a limit the scarcest set decides: 30 / 1.5 * (2 + 1.5 + 1) = 90 questions.
    assert Counter(q.source for q in load_questions(spec)) == {a: 40, b: 30, c: 20}


def test_sets_without_weights_are_joined_whole(tmp_path):
    a, b = files(tmp_path, a=3, b=5)
    joined = load_questions(f"{a}, {b}")
    assert [q.source for q in joined] == [a] * 3 + [b] * 5
    assert len(load_questions(f"{a},{b}", limit=4)) == 4


def test_a_weight_on_one_set_changes_nothing(tmp_path):
    (a,) = files(tmp_path, a=9)
    assert load_questions(f"{a}:3") == load_questions(a)


def test_a_file_whose_name_looks_like_a_mix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a,b:2", line(1))
    assert load_questions("a,b:2")[0].source == "a,b:2"


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=5),
    st.none() | st.integers(1, 200),
)
def test_shares(sets, limit):
    sizes = [size for size, _ in sets]
    weights = [weight for _, weight in sets]
    counts = shares(sizes, [Fraction(weight, 4) for weight in weights], limit)
    total = sum(counts)
    assert total <= (limit or total)
    for count, size, weight in zip(counts, sizes, weights, strict=True):
        assert 0 <= count <= size
        assert abs(count - total * weight / sum(weights)) < 1
    # The total could not have been larger.
    one_more = [(total + 1) * weight / sum(weights) for weight in weights]
    too_small = [share > size + 1e-9 for share, size in zip(one_more, sizes, strict=True)]
    assert total == limit or any(too_small)


# ---------------------------------------------------------------------------------------- held out


def test_a_split_shares_no_question(tmp_path):
    (path,) = files(tmp_path, a=30)
    train, held_out = split(path, "", held_out=6, seed=3)
    assert held_out == load_questions(path, limit=6, seed=3)
    assert train == [q for q in load_questions(path) if q not in held_out]
    assert len(train) == 24
    assert split(path, "", held_out=6, seed=4)[1] != held_out


def test_a_part_of_what_was_held_out_is_drawn_from_it(tmp_path):
    """A second, smaller draw from the file would ask what was trained on."""
    (path,) = files(tmp_path, a=500)
    train, held_out = split(path, "", held_out=100, seed=0)
    assert set(draw(held_out, 50, "0")) < set(held_out)
    assert set(load_questions(path, limit=50, seed=0)) & set(train)


def test_a_question_under_two_ids_is_not_in_both_parts(tmp_path):
    """Every question stands there twice, written a little differently."""
    twins = [line(n) for n in range(20)]
    twins += [line(f"{n}_again", question=f"  Q{n} ") for n in range(20)]
    path = write(tmp_path / "twins.jsonl", *twins)
    train, held_out = split(path, "", held_out=10, seed=0)
    assert not overlap(train, held_out)
    asked = {question.text.strip(" ?").lower() for question in held_out}
    assert len(train) == 40 - 2 * len(asked)


def test_a_held_out_set_of_its_own_is_not_trained_on(tmp_path):
    path, other = files(tmp_path, a=10, b=4)
    train, held_out = split(path, other, held_out=None, seed=0)
    assert [question.text for question in held_out] == ["q0?", "q1?", "q2?", "q3?"]
    assert [question.text for question in train] == [f"q{n}?" for n in range(4, 10)]


def test_overlap_names_the_training_questions():
    train = [Question("1", "Who was  Ada?", ("x",), "a"), Question("2", "Who is Ada?", ("x",), "a")]
    held_out = [Question("9", "who was ada", ("x",), "b")]
    assert overlap(train, held_out) == train[:1]
    assert overlap(train, []) == []


# ------------------------------------------------------------------------------------------ the hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A loopback hub: holds FILES, speaks enough of the protocol for the real hf_hub_download."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    held = {}
    asked = []

    def handle(request):
        asked.append(request.path)
        match = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/main/(.+)", request.path)
        body = None
        if match:
            body = held.get(match.groups())
        if body is None:
            return answer(request, 404, X_Error_Code="EntryNotFound", X_Error_Message="not found")
        if body == "gated":
            return answer(request, 403, X_Error_Code="GatedRepo", X_Error_Message="gated")
        commit = hashlib.sha1(body).hexdigest()
        answer(request, 200, body, ETag=f'"{commit}"', X_Repo_Commit=commit)

    with serving(handle) as url:
        yield types.SimpleNamespace(url=url, held=held, asked=asked)


def test_hub_file(hub):
    hub.held["me/mine", "deep/er/q.jsonl"] = (line(1) + "\n" + line(2)).encode()
    spec = "hub:me/mine/deep/er/q.jsonl"
    assert [q.source for q in load_questions(spec, hub_endpoint=hub.url)] == [spec] * 2
    hub.held["me/mine", "bad.jsonl"] = b"{\n"
    with pytest.raises(
        UserError, match="hub:me/mine/bad.jsonl: 1 of 1 lines are malformed: line 1"
    ):
        load_questions("hub:me/mine/bad.jsonl", hub_endpoint=hub.url)


def test_short_names_and_their_splits(hub):
    for file in (
        "nq/test",
        "nq/train",
        "triviaqa/test",
        "popqa/test",
        "hotpotqa/dev",
        "2wikimultihopqa/dev",
        "2wikimultihopqa/train",
        "musique/dev",
        "bamboogle/test",
    ):
        hub.held[FLASHRAG, f"{file}.jsonl"] = line(file.replace("/", "-")).encode()
    seven = load_questions(
        "nq,triviaqa,popqa,hotpotqa,2wiki,musique,bamboogle", hub_endpoint=hub.url
    )
    assert [q.id for q in seven] == [
        "nq/test_nq-test",
        "triviaqa/test_triviaqa-test",
        "popqa/test_popqa-test",
        "hotpotqa/test_hotpotqa-dev",
        "2wiki/test_2wikimultihopqa-dev",
        "musique/test_musique-dev",
        "bamboogle/test_bamboogle-test",
    ]
    train = load_questions("nq/train:2,2wiki/train:1", hub_endpoint=hub.url)
    with pytest.raises(UserError, match="hotpotqa has no split 'test': choose from dev, train"):
        load_questions("hotpotqa/test", hub_endpoint=hub.url)
    assert {q.source for q in train} <= {"nq/train", "2wiki/train"} and len(
        train
    ) == 1  # 2 : 1 of one question each


def test_hub_failures_are_one_sentence(hub, monkeypatch):
    monkeypatch.setattr(
        "time.sleep", lambda seconds: None
    )  # the hub's client waits 23 s for a dead server
    with pytest.raises(UserError, match="cannot get nothing.jsonl of me/mine from the hub"):
        load_questions("hub:me/mine/nothing.jsonl", hub_endpoint=hub.url)
    hub.held["me/mine", "q.jsonl"] = "gated"
    with pytest.raises(UserError, match="access to me/mine was not granted"):
        load_questions("hub:me/mine/q.jsonl", hub_endpoint=hub.url)
    with pytest.raises(UserError, match="cannot get"):
        load_questions("hub:me/mi..ne/q.jsonl", hub_endpoint=hub.url)
    with pytest.raises(UserError, match="cannot get"):
        load_questions("hub:me/mine/q.jsonl", hub_endpoint="http://127.0.0.1:9")


# --------------------------------------------------------------------------------- benchmarks


@pytest.fixture
def parquet(monkeypatch):
    """rows -> a parquet file's bytes.

    By pyarrow where it is installed, else for a stand-in that reads the rows from JSON.
    """
    if importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet

        def write_parquet(rows):
            buffer = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
            return buffer.getvalue()

        return write_parquet

    class ParquetFile:
        def __init__(self, file):
            self.rows = json.loads(file.read())
            self.schema_arrow = types.SimpleNamespace(names=list(self.rows[0]))

        def read(self, columns):
            rows = [{name: row.get(name) for name in columns} for row in self.rows]
            return types.SimpleNamespace(to_pylist=lambda: rows)

    module = types.ModuleType("pyarrow.parquet")
    module.ParquetFile = ParquetFile
    package = types.ModuleType("pyarrow")
    package.parquet = module
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    return lambda rows: json.dumps(rows).encode()


def encrypted(text, canary):
    """As the authors of BrowseComp describe it: XOR with the repeated hash, then base64."""
    key = hashlib.sha256(canary.encode()).digest() * 100
    raw = bytes(a ^ b for a, b in zip(text.encode(), key))
    return base64.b64encode(raw).decode()


def secret_row(question, answer, canary):
    row = {"problem": encrypted(question, canary), "answer": encrypted(answer, canary)}
    return {**row, "problem_topic": "Art", "canary": canary}


HLE = [
    {"id": "a", "question": "What is drawn?", "answer": "x", "image": "data:image/png;base64,AAAA"},
    {"id": "b", "question": "What is 6 × 7?", "answer": "42", "image": "", "rationale": "r"},
    {"id": "c", "question": "Who?", "answer": "Ada", "image": None},
]
GAIA = [
    {"task_id": "a", "Question": "Sum?", "Level": "1", "Final answer": "3", "file_name": "a.xlsx"},
    {"task_id": "b", "Question": "Who?", "Level": "2", "Final answer": "Ada", "file_name": ""},
    {"task_id": "c", "Question": "Why?", "Level": "3", "Final answer": "tea", "file_name": None},
]
# The first column has no name, and cells hold quotation marks and line breaks.
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


def test_hle_and_gaia_are_text_only(hub, parquet):
    hub.held["cais/hle", "data/test-00000-of-00001.parquet"] = parquet(HLE)
    assert load_questions("hle", hub_endpoint=hub.url) == [
        Question("b", "What is 6 × 7?", ("42",), "hle"),
        Question("c", "Who?", ("Ada",), "hle"),
    ]
    hub.held["gaia-benchmark/GAIA", "2023/validation/metadata.parquet"] = parquet(GAIA)
    assert load_questions("gaia", hub_endpoint=hub.url) == [
        Question("b", "Who?", ("Ada",), "gaia"),
        Question("c", "Why?", ("tea",), "gaia"),
    ]
    hub.held["cais/hle", "data/test-00000-of-00001.parquet"] = b"not parquet at all"
    with pytest.raises(UserError, match="hle is not a parquet file"):
        load_questions("hle", hub_endpoint=hub.url)


def test_frames_and_webwalkerqa(hub):
    hub.held["google/frames-benchmark", "test.tsv"] = FRAMES.encode()
    assert load_questions("frames", hub_endpoint=hub.url) == [
        Question("1", "Who?", ("Ada",), "frames"),
        Question("2", 'Which "first"\nname?', ("Jane Ballou",), "frames"),
    ]
    row = json.dumps(WEBWALKERQA).encode()
    hub.held["callanwu/WebWalkerQA", "data/main-00000-of-00001.jsonl"] = row
    (question,) = load_questions("webwalkerqa", hub_endpoint=hub.url)
    assert (question.text, question.golden_answers) == ("Wann? 什么时候?", ("2025",))
    mixed = load_questions("frames,webwalkerqa", hub_endpoint=hub.url)
    assert [question.id for question in mixed] == ["frames/1", "frames/2", "webwalkerqa/1"]


LONG = "Which café, " + "of all that are named " * 9 + "日本, is it?"  # longer than a key


def test_browsecomp_is_decrypted_in_memory(hub, parquet, tmp_path):
    rows = [secret_row(LONG, "Ada", "a canary GUID"), secret_row("Who?", "東京", "another")]
    asked = [(LONG, ("Ada",)), ("Who?", ("東京",))]
    hub.held["smolagents/browse_comp", "data/test-00000-of-00001.parquet"] = parquet(rows)
    found = load_questions("browsecomp", hub_endpoint=hub.url)
    assert [(question.text, question.golden_answers) for question in found] == asked
    # The file that its authors publish
    path = tmp_path / "browse_comp_test_set.csv"
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    found = load_questions(str(path))
    assert [(question.text, question.golden_answers) for question in found] == asked


def test_the_key_of_browsecomp():
    """Worked out by hand: sha256("x") begins with 2d 71, which is 0x48 ^ "e" and 0x18 ^ "i"."""
    secret = base64.b64encode(bytes([0x2D ^ ord("h"), 0x71 ^ ord("i")])).decode()
    assert decrypt(secret, "x") == "hi"


@pytest.mark.parametrize(
    "row",
    [
        {**secret_row(LONG, "Ada", "one"), "canary": "two"},
        {**secret_row(LONG, "Ada", "one"), "answer": "Ada Baker"},
    ],
)
def test_what_its_canary_does_not_decrypt_is_refused(tmp_path, row):
    path = write(tmp_path / "q.jsonl", json.dumps(row))
    with pytest.raises(UserError, match="line 1: its canary does not decrypt it$"):
        load_questions(path)


def test_tables_of_ones_own(tmp_path, parquet):
    (tmp_path / "q.csv").write_bytes("\ufeffid,question,answer\n7,Who?,Ada\n".encode())
    path = str(tmp_path / "q.csv")
    assert load_questions(path) == [Question("7", "Who?", ("Ada",), path)]
    rows = [{"question": "Who?", "golden_answers": ["Ada", "Bob"], "image": "kept: it is no mark"}]
    (tmp_path / "q.parquet").write_bytes(parquet(rows))
    path = str(tmp_path / "q.parquet")
    assert load_questions(path) == [Question("1", "Who?", ("Ada", "Bob"), path)]


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "holds no question"),
        (b"question,answer\n", "holds no question"),
        (b"question,answer\nWho?\n", 'row 1: .* no text "answer"'),
        (b"question,answer\nWho?,Ada,more\n,\n", "1 of 2 rows .*row 2: .question. is missing"),
        (b"q\xff,answer\n", "not a table in UTF-8"),
        (b"question,answer\nWho?," + b"x" * 200_000, "not a table in UTF-8 .field larger"),
    ],
)
def test_a_bad_table_is_one_sentence(tmp_path, content, says):
    (tmp_path / "q.csv").write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        load_questions(str(tmp_path / "q.csv"))
    assert "\n" not in str(error.value)


def test_parquet_without_access_or_pyarrow(hub, monkeypatch):
    for name, (repository, file) in BENCHMARKS.items():
        hub.held[repository, file] = "gated"
        with pytest.raises(UserError, match=f"access to {repository} was not granted: accept its"):
            load_questions(name, hub_endpoint=hub.url)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    hub.held["cais/hle", "data/test-00000-of-00001.parquet"] = b"PAR1"
    with pytest.raises(UserError, match="hle is a parquet file: pip install pyarrow"):
        load_questions("hle", hub_endpoint=hub.url)
