"""Bytes to text, files to documents, documents to passages."""

import contextlib
import html
import os
import re
import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import needs_lxml, needs_pypdf

from config import UserError
from tools import Document, documents, reader

# Characters --------------------------------------------------------------------------------------


def test_text_is_decoded_by_its_mark_or_as_utf_8_or_else_as_windows_1252():
    for raw in (*("café".encode(code) for code in ("utf-8", "utf-8-sig", "utf-16")), b"caf\xe9"):
        assert reader.read(raw, "text") == "café"
    with pytest.raises(reader.NotText, match="binary"):
        reader.read(b"\0\1" * 99, "text")


DECLARED = [
    b'<meta charset="us-ascii">caf\xe9',  # what browsers take it for
    b'<?xml version="1.0" encoding="iso-8859-1"?><html>caf\xe9',
    "<meta charset=no-such>café".encode(),
    "<meta charset=utf-16>café".encode(),  # in ASCII it cannot say so
    "<meta charset=iso-2022-kr>café".encode(),  # which Python does not have
]


@needs_lxml
@pytest.mark.parametrize("page", DECLARED)
def test_html_is_decoded_as_it_declares(page):
    assert reader.html_to_text(page) == "café"


@needs_lxml
def test_html_that_declares_nothing_is_decoded_as_text_is():
    assert reader.html_to_text(b"<p>caf\xe9") == "café"
    with pytest.raises(reader.NotText, match="binary"):
        reader.html_to_text(b"\0\1" * 99)


# HTML --------------------------------------------------------------------------------------------


def table(*rows):
    return f"<table>{''.join(f'<tr>{row}' for row in rows)}</table>"


POWER = "<msup><mn>10</mn><mn>28</mn></msup>"
SOURCE = '<annotation encoding="application/x-tex">10^{28}</annotation>'
FACTS = [
    # blocks
    ("<title>A &amp; B</title><h1>Born <b>19</b>68</h1>In\n P", "A & B\n## Born 1968\nIn P"),
    ("<ul><li>one<li>two<br/>caf&eacute;&nbsp;bar &amp;lt;</ul>", "one\ntwo\ncafé bar &lt;"),
    ("x<pre>\ndef f():\n\treturn 1\n\n    pass</pre>y", "x\ndef f():\n\treturn 1\n\n    pass\ny"),
    # tables
    (table("<!-- x --><td>Year</td><?php x ?><td>2001</td>"), "Year | 2001"),
    (table("<th>Year<th>n", "<td>2001<td>5"), "Year | n\n2001 | 5"),
    (table("<td>a<td></td><td>c", "<td><td>5"), "a | | c\n| 5"),
    (table("<td><p>a</p><td><p>b</p>"), "a | b"),
    (table(f"<td>{'<p>x</p>' * 40}"), "\n".join("x" * 40)),
    # raised, lowered and struck
    ("6.6×10<sup>28</sup> years", "6.6×10^28 years"),
    ("e<sup>a+b</sup>", "e^(a+b)"),
    ("1101<sub>2</sub>, H<sub>2</sub>O, x<sub>i</sub>", "1101_2, H2O, x_i"),
    ("log<sub>10</sub>5, 2<sup>n</sup>k", "log_(10)5, 2^(n)k"),
    ("in 1897<sup><a>[2]</a></sup> on the 19<sup>th</sup>", "in 1897[2] on the 19th"),
    ("<del>1901</del><ins>1902</ins>", "~~1901~~1902"),
    # formulas: as MathML with its source, drawn once more for the eye; the source as a picture's
    (f"<math><semantics>{POWER}{SOURCE}</semantics></math> m", "10^{28} m"),
    (f'<math alttext="10^28">{POWER}</math><i class="katex-html">10</i>', "10^28"),
    (f"<i style='display: none'><math>{POWER}</math></i><img alt='10^28'>", "[image: 10^28]"),
    (f"<math>{POWER}</math>", "10 28"),
    # what looks like decoration and holds the page
    ("<title>T</title><nav>all <p>is here</nav>", "T\nall\nis here"),
    ("<blockquote>Words<footer>Ada, 1926</footer></blockquote>", "Words\nAda, 1926"),
    ("<frameset><noframes>text</noframes></frameset>", "text"),
    ("<body style='display:none'>text", "text"),
    ("<p aria-hidden=true>text</p>", "text"),
    # what a reader would not see
    ("<p>good<p hidden>evil</p>end", "good\nend"),
    ("<p>good<p style='a: b; DISPLAY : none'>evil <b hidden>evil</b></p>end", "good\nend"),
    ("<p>good<template><p>evil</p></template> end", "good end"),
    ("<p>good<table hidden><tr><td>evil</table>end", "good\nend"),
]


@needs_lxml
@pytest.mark.parametrize("page, text", FACTS)
def test_facts_survive_and_what_nobody_would_see_is_dropped(page, text):
    assert reader.html_to_text(page.encode()) == text


MARKS = """<p>|</div>|<a href='x>y'>|<b x=1>|<!-- no -->|<script>no</script>|<br>|<?no?>|</ no>|
<style>no</style>|<i title="<no>">|<h2>|<section>|<td>|<table>|<tr>|<li>"""
marks = st.sampled_from(MARKS.split("|"))
texts = st.text("abc<&>é 1\n\"'=", min_size=1).map(html.escape)


@needs_lxml
@given(st.lists(st.tuples(marks, texts), max_size=20))
def test_no_text_is_lost_and_no_markup_shown(parts):
    shown = reader.html_to_text("".join(mark + text for mark, text in parts).encode())
    expected = "".join(html.unescape(text) for _, text in parts)
    shown = re.sub("[|]", "", shown.replace("### ", ""))
    assert "".join(shown.split()) == "".join(expected.split())


DEEP = ["<div>", "<table>", "<td><table>", "<sup>x", "<math><msup><mn>1"]
LONG = ["<!--", "<a |", "<script>", "&#", "<td>x", "<img alt=x>"]


@needs_lxml
@pytest.mark.parametrize("unit", DEEP + LONG)
def test_hostile_html_does_not_grow(unit):
    raw = (unit * (300_000 // len(unit))).encode() + b"end"
    with contextlib.suppress(reader.NotText):
        assert len(reader.read(raw, "html")) < 3_000_000


@needs_lxml
def test_a_text_without_end_is_cut():
    text = reader.read(("é" * (reader.MOST_CHARACTERS + 1)).encode(), "html")
    assert text == "é" * reader.MOST_CHARACTERS + "\n" + reader.CUT


@needs_lxml
def test_html_that_keeps_the_parser_busy_is_given_up(monkeypatch):
    """By its processor time, which a busy machine does not change."""
    monkeypatch.setitem(reader.SECONDS, "html", 1)
    attributes = " ".join(f"a{i}=1" for i in range(200_000))  # quadratic in the library
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(reader.NotText, match="too large"):
        reader.read(f"<a {attributes}>x".encode(), "html")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime < before + 4


def test_the_reader_of_hostile_pages_has_little_memory():
    """Its own limits are looked at from outside, while it waits for the page."""
    command = [sys.executable, reader.__file__, "html", "5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        while resource.prlimit(child.pid, resource.RLIMIT_CPU)[0] != 5:
            assert child.poll() is None
        while resource.prlimit(child.pid, resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY:
            assert child.poll() is None
        assert resource.prlimit(child.pid, resource.RLIMIT_AS)[0] == reader.MEMORY
        child.kill()


# PDF ---------------------------------------------------------------------------------------------


def make_pdf(*texts):
    """A PDF with one text a page, written by hand."""
    kids = " ".join(f"{3 + 2 * i} 0 R" for i in range(len(texts)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(texts)} >>",
    ]
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    for i, text in enumerate(texts):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {4 + 2 * i} 0 R "
            f"/Resources << /Font << /F1 {font} >> >> >>"
        )
        stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET"
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    out = "%PDF-1.4\n"
    rows = "0000000000 65535 f \n"
    for number, content in enumerate(objects, 1):
        rows += f"{len(out):010} 00000 n \n"
        out += f"{number} 0 obj\n{content}\nendobj\n"
    count = len(objects) + 1
    trailer = f"trailer << /Size {count} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF"
    return f"{out}xref\n0 {count}\n{rows}{trailer}".encode()


@needs_pypdf
def test_a_pdf_is_read_page_by_page_and_a_damaged_one_is_no_text():
    raw = make_pdf("born in 1968", "in Paris")
    assert reader.read(raw, "pdf") == "born in 1968\fin Paris"
    for damaged in (raw[:50], b""):
        with pytest.raises(reader.NotText, match="PDF that is damaged"):
            reader.read(damaged, "pdf")


# Files -------------------------------------------------------------------------------------------


def texts_of(path):
    return {document.id: document.text for document in documents.read_documents(path)}


@needs_lxml
def test_what_cannot_be_read_is_listed_and_does_not_refuse_the_folder(
    tmp_path, capsys, monkeypatch
):
    """A huge file takes no room on the disk, as it is all hole, and is never taken into memory."""
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "closed.md").write_text("closed")
    (tmp_path / "secret.md").write_text("secret")
    (folder / "a.md").write_text("# A\nplain")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "b.html").write_text("<title>T</title><p>born in 19<b>68</b>")
    (folder / "binary.md").write_bytes(b"\x00\x01" * 50)
    (folder / ".hidden.md").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "a.md").write_text("hidden")
    (folder / "x.docx").write_bytes(b"PK")
    (folder / "y.png").write_bytes(b"PNG")
    (folder / "huge.txt").touch()
    os.truncate(folder / "huge.txt", documents.LARGEST_FILE + 1)
    (folder / "out.md").symlink_to(tmp_path / "secret.md")
    (folder / "in.md").symlink_to(folder / "a.md")
    (folder / "loop").symlink_to(folder)
    (folder / "circle.txt").symlink_to("circle.txt")
    os.mkfifo(folder / "pipe.md")
    real_read = documents.Path.read_bytes

    def read_bytes(path):
        assert path.name != "huge.txt"
        if path.name == "closed.md":
            raise PermissionError(13, "Permission denied", str(path))
        return real_read(path)

    monkeypatch.setattr(documents.Path, "read_bytes", read_bytes)
    read = texts_of(folder)
    plain = "# A\nplain"
    assert read == {"in.md": plain, "a.md": plain, "b.html": "T\nborn in 1968", "latin.txt": "café"}
    told = dict(re.findall(r"\((.*)\): (.*)", capsys.readouterr().err))
    words = {"binary.md": "binary", "closed.md": "Permission", "huge.txt": "64 MiB"}
    words |= {"out.md": "link", "circle.txt, pipe.md": "no file", "x.docx, y.png": "kind"}
    assert told.keys() == words.keys()
    assert all(word in told[files] for files, word in words.items())
    with pytest.raises(UserError, match="huge.txt cannot be read: more than 64 MiB"):
        texts_of(folder / "huge.txt")


def test_without_the_library_files_are_skipped_with_what_to_install(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.md").write_text("fine")
    (tmp_path / "b.html").write_text("<p>x")
    monkeypatch.setattr(reader.importlib.util, "find_spec", lambda name: None)
    assert texts_of(tmp_path) == {"a.md": "fine"}
    assert "b.html): HTML is read by lxml, which is not installed" in capsys.readouterr().err
    with pytest.raises(UserError, match="requirements-documents.txt"):
        texts_of(tmp_path / "b.html")


def test_titles_are_one_line_without_control_characters():
    made = documents.make_document("1", "A\n# B (https://b.test)\u202e\x1b]0;x\x07", "u\nv", "t\n")
    assert made == Document("1", "A # B (https://b.test) ]0;x", "u v", "t\n")


# Passages ----------------------------------------------------------------------------------------


def numbered(count):
    return " ".join(f"w{i}" for i in range(count))


def test_a_document_that_fits_stays_as_it_is():
    whole = Document("a.md", "a", "a.md", numbered(200))
    assert documents.passages(whole) == [whole]
    long = Document("a.md", "a", "a.md", numbered(201))
    assert documents.passages(long, 0) == [long]
    assert len(documents.passages(long)) == 2


@given(st.integers(0, 700), st.integers(1, 60), st.integers(0, 70))
def test_passages_cover_every_word_and_overlap(count, words, overlap):
    whole = Document("a", "a", "", numbered(count))
    parts = [part.text.split() for part in documents.passages(whole, words, overlap)]
    shared = min(overlap, words // 2)
    joined = parts[0] + [word for part in parts[1:] for word in part[shared:]]
    assert joined == whole.text.split()
    assert all(len(part) <= words for part in parts)
    for part, following in zip(parts, parts[1:], strict=False):
        assert part[len(part) - shared :] == following[:shared]


def test_passages_know_their_file_lines_and_heading():
    lines = ["intro", "", "# Fruit #", *[numbered(10)] * 10, "Prices", "======"]
    lines += [*[numbered(10)] * 10, "```", "# a comment", "```", *[numbered(10)] * 10]
    whole = Document("deep/b.md", "b", "deep/b.md", "\n".join(lines))
    parts = documents.passages(whole, words=50, overlap=10)
    assert parts[0].title == "b" and parts[0].url == "deep/b.md, lines 1-8"
    assert parts[1].title == "b › Fruit" and parts[-1].title == "b › Prices"
    text = whole.text.split("\n")
    for part in parts:
        first, last = part.url.removeprefix("deep/b.md, lines ").split("-")
        between = "\n".join(text[int(first) - 1 : int(last)])
        assert part.text in between
    assert [part.id for part in parts] == [f"deep/b.md#{i:04}" for i in range(1, len(parts) + 1)]


def test_passages_of_a_pdf_know_their_page_and_those_of_the_web_keep_their_url():
    text = f"{numbered(30)}\f{numbered(30)}"
    web = "https://x.test/"
    for url, places in (("p.pdf", ["p.pdf, page 1", "p.pdf, page 2"]), (web, [web, web])):
        parts = documents.passages(Document("p", "p", url, text), words=30, overlap=0)
        assert [part.url for part in parts] == places


def test_text_without_spaces_is_cut_by_its_characters_and_code_keeps_its_indentation():
    for text in ("東京" * 300, "สวัสดี" * 100):
        parts = documents.passages(Document("a", "", "", text), 200, 50)
        assert [len(part.text) for part in parts] == [200, 200, 200, 150]
    code = "\n\n".join(f"    x{i} = {i}" for i in range(20))
    parts = documents.passages(Document("a", "", "", f"  {code}"), words=3, overlap=0)
    assert [part.text for part in parts][:2] == ["      x0 = 0", "    x1 = 1"]
