"""Bytes to text, files to documents, documents to passages."""

import errno
import functools
import html
import io
import re
import signal
import subprocess
import tempfile
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import needs_lxml, needs_markitdown, needs_pypdf

from config import UserError
from tools import Document, bm25, documents, reader

DECLARED = [
    b'<meta charset="us-ascii">caf\xe9',  # what browsers take it for
    b'<?xml version="1.0" encoding="macintosh"?><html>caf\x8e',
    "<meta charset=utf-16>café".encode(),  # in ASCII it cannot say so
    "<meta charset=iso-2022-kr>café".encode(),  # which Python does not have
    b"<p>caf\xe9",  # declared nowhere
    "\ufeff<meta charset=gbk>café".encode(),
]
# What browsers read behind a label, and Python or an older webencodings does not.
LABELS = [
    ("gb2312", "gb18030", "朱镕基 㐂 𠮷"),
    ("GBK", "cp936", "镕"),
    ("shift_jis", "cp932", "①髙"),
    ("euc-kr", "cp949", "똠방"),
    ("big5", "big5hkscs", "㗎"),
    ("iso-8859-1", "cp1252", "“9 €”"),
    ("iso-8859-9", "cp1254", "“ğ”"),
    ("tis-620", "cp874", "“ไทย”"),
    ("x-user-defined", "cp1252", "cafÃ©"),
]


@needs_lxml
def test_html_is_decoded_as_it_declares_and_labels_mean_what_they_mean_to_browsers():
    assert {reader.html_to_text(page) for page in DECLARED} == {"café"}
    for label, encoding, text in LABELS:
        page = f'<meta http-equiv=content-type content="text/html; charset={label}">{text}'
        assert reader.html_to_text(page.encode(encoding)) == text, label


def table(*rows):
    return f"<table>{''.join(f'<tr>{row}' for row in rows)}</table>"


POWER = "<msup><mn>10</mn><mn>28</mn></msup>"
SOURCE = '<annotation encoding="application/x-tex">10^{28}</annotation>'
FACTS = [
    # blocks
    ("<title>A &amp; B</title><h1>Born <b>19</b>68</h1>In\n P", "A & B\n## Born 1968\nIn P"),
    ("x<pre>\ndef f():\n\treturn 1\n\n    pass</pre>y", "x\ndef f():\n\treturn 1\n\n    pass\ny"),
    # tables
    (table("<!-- x --><td>Year</td><?php x ?><td>2001</td>"), "Year | 2001"),
    (table("<td>a<td></td><td>c", "<td><td>5"), "a | | c\n| 5"),
    (table(f"<td>{'<p>x</p>' * 40}"), "\n".join("x" * 40)),
    (table("<td><h2>Year</h2>born<td>1968"), "Year born | 1968"),
    # raised, lowered and struck
    ("6.6×10<sup>28</sup> years", "6.6×10^28 years"),
    ("1101<sub>2</sub>, H<sub>2</sub>O, x<sub>i</sub>", "1101_2, H2O, x_i"),
    ("<i><b>1101</b></i><i><sub>2</sub></i>", "1101_2"),
    ("m<sub>e</sub>, E<sub>th</sub>", "m_e, E_th"),
    ("log<sub>10</sub>5, 2<sup>n</sup>k, e<sup>a+b</sup>", "log_(10)5, 2^(n)k, e^(a+b)"),
    ("in 1897<sup><a>[2]</a></sup> on the 19<sup>th</sup>", "in 1897[2] on the 19th"),
    ("<del>1901</del><ins>1902</ins>", "~~1901~~1902"),
    # formulas: as MathML with its source, drawn once more for the eye; the source as a picture's
    (f"<math><semantics>{POWER}{SOURCE}</semantics></math> m", "10^{28} m"),
    (f'<math alttext="10^28">{POWER}</math><i class="katex-html">10</i>', "10^28"),
    (f"<i style='display: none'><math>{POWER}</math></i><img alt='10^28'>", "[image: 10^28]"),
    (f"<math>{POWER}</math>", "10 28"),
    ("a<math>&#2;b</math>", "a \x02b"),
    # what looks like decoration and holds the page
    ("<body style='display:none'>text", "text"),
    ("<nav>a<p aria-hidden=true>b<br>c<li>d</nav><footer>e</footer>", "a\nb\nc\nd\ne"),
    # what a reader would not see
    ("<noscript>a</noscript><dialog>b</dialog><dialog open>seen</dialog>", "seen"),
    ("<p>good<b hidden>evil</b><p style='a: b; DISPLAY : none'>evil</p>end", "good\nend"),
    ("<p>good<template><p>evil</p></template> end", "good end"),
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


@needs_lxml
def test_a_text_without_end_is_cut():
    text = reader.read(("é" * (reader.MOST_CHARACTERS + 1)).encode(), "html")
    assert text == "é" * reader.MOST_CHARACTERS + "\n" + reader.CUT


# By hand, without the table of its objects, which pypdf makes anew.
PDF = b"""%PDF-1.4
1 0 obj << /Type /Catalog /Pages 2 0 R >> endobj
2 0 obj << /Type /Pages /Kids [3 0 R 5 0 R] /Count 2 /Resources 7 0 R >> endobj
3 0 obj << /Type /Page /Parent 2 0 R /Contents 4 0 R >> endobj
4 0 obj << /Length 34 >> stream
BT /F1 12 Tf (born in 1968) Tj ET
endstream endobj
5 0 obj << /Type /Page /Parent 2 0 R /Contents 6 0 R >> endobj
6 0 obj << /Length 30 >> stream
BT /F1 12 Tf (in Paris) Tj ET
endstream endobj
7 0 obj << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> endobj
trailer << /Root 1 0 R >>
startxref
0
%%EOF
"""


@needs_pypdf
def test_a_pdf_is_read_page_by_page_and_a_damaged_one_is_no_text():
    assert reader.read(PDF, "pdf") == "born in 1968\fin Paris"
    with pytest.raises(reader.NotText, match="PDF that is damaged"):
        reader.read(PDF[:50], "pdf")


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def word_file(contents, doctype=""):
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as file:
        body = f'<w:document xmlns:w="{WORD}"><w:body>{contents}</w:body></w:document>'
        file.writestr("word/document.xml", doctype + body)
    return raw.getvalue()


@needs_markitdown
def test_a_word_file_is_read_and_a_torn_or_hostile_one_is_no_text():
    said = "<w:p><w:r><w:t>born in {}</w:t></w:r></w:p>"
    table = f"<w:tbl><w:tr><w:tc>{said}</w:tc><w:tc>{said}</w:tc></w:tr></w:tbl>".format(68, 70)
    whole = word_file(said.format(1968) + table)
    text = reader.read(whole, "docx")
    assert text.startswith("born in 1968") and "| born in 68 | born in 70 |" in text
    entity = '<!DOCTYPE x [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
    outside = word_file(said.format("&x;"), entity)
    for raw in (whole[:99], b"PK", outside):
        with pytest.raises(reader.NotText, match="DOCX that is damaged"):
            reader.read(raw, "docx")


@needs_markitdown
def test_slides_are_read_one_by_one_and_a_torn_file_is_no_text():
    import pptx

    slides = pptx.Presentation()
    for title in ("1968", "1970"):
        slides.slides.add_slide(slides.slide_layouts[0]).shapes.title.text = f"Born in {title}"
    raw = io.BytesIO()
    slides.save(raw)
    pages = reader.read(raw.getvalue(), "pptx").split("\f")
    assert [page.strip() for page in pages] == ["# Born in 1968", "# Born in 1970"]
    with pytest.raises(reader.NotText, match="PPTX that is damaged"):
        reader.read(raw.getvalue()[:999], "pptx")


@pytest.mark.skipif(not reader.missing("docx"), reason="markitdown is installed")
def test_a_word_file_without_its_reader_is_refused_with_the_line_that_installs_it(tmp_path):
    (tmp_path / "a.docx").write_bytes(b"PK")
    with pytest.raises(UserError, match="a.docx cannot be read: DOCX is read by markitdown, which"):
        documents.read_documents(tmp_path / "a.docx")


@needs_lxml
def test_what_cannot_be_read_is_listed_and_does_not_refuse_the_folder(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(documents, "LARGEST_FILE", 99)
    folder = tmp_path / "notes"
    (folder / ".git").mkdir(parents=True)
    contents = {
        "../secret.md": b"secret",
        ".git/a.md": b"hidden",
        ".hidden.md": b"hidden",
        "a.md": b"# A\nplain",
        "b.html": b"<title>T</title><p>born in 19<b>68</b>",
        "bom.txt": "café".encode("utf-8-sig"),
        "binary.md": b"\0\1" * 9,
        "cut.txt": "café voilà".encode()[:-1],
        "huge.txt": b"x" * 100,
        "latin.txt": b"caf\xe9",
        "wide.txt": "café".encode("utf-16"),
        "x.odt": b"PK",
    }
    for name, raw in contents.items():
        (folder / name).write_bytes(raw)
    (folder / "out.md").symlink_to(tmp_path / "secret.md")
    (folder / "in.md").symlink_to(folder / "a.md")
    (folder / "loop").symlink_to(folder)
    expected = dict.fromkeys(["a.md", "in.md"], "# A\nplain") | {"b.html": "T\nborn in 1968"}
    expected["cut.txt"] = "café voil\N{REPLACEMENT CHARACTER}"
    expected |= dict.fromkeys(["bom.txt", "latin.txt", "wide.txt"], "café")
    assert {made.id: made.text for made in documents.read_documents(folder)} == expected
    told = dict(re.findall(r"\((.*)\): (.*)", capsys.readouterr().err))
    words = {"binary.md": "binary", "huge.txt": "MiB", "out.md": "link", "x.odt": "kind"}
    assert told.keys() == words.keys()
    assert all(word in told[files] for files, word in words.items())
    with pytest.raises(UserError, match="huge.txt cannot be read: more than"):
        documents.read_documents(folder / "huge.txt")


@needs_lxml
def test_a_full_disk_or_memory_is_no_fault_of_a_file(tmp_path, monkeypatch):
    """Else an index would lack the file for good."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.html").write_text("<p>born")
    build = functools.partial(bm25.on_disk, tmp_path / "docs", 1, tmp_path / "cache", 200)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "w+b"))
        with pytest.raises(UserError, match="cannot keep the search index.*memory or disk space"):
            build()
    with monkeypatch.context() as patch:
        lacking = OSError(errno.EMFILE, "Too many open files")
        patch.setattr(Path, "read_bytes", Mock(side_effect=lacking))
        with pytest.raises(UserError, match="cannot keep the search index.*a.html: Too many open"):
            build()
    killed = subprocess.CalledProcessError(-signal.SIGKILL, "reader")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", Mock(side_effect=killed))
        with pytest.raises(UserError, match="cannot keep the search index.*memory or disk space"):
            build()
    assert [one.id for one in build()("born")] == ["a.html"]


def test_titles_are_one_line_without_control_characters():
    made = documents.make_document("1", "A\n# B (https://b.test)\u202e\x1b]0;x\x07", "u\nv", "t\n")
    assert made == Document("1", "A # B (https://b.test) ]0;x", "u v", "t\n")


def numbered(count):
    return " ".join(f"w{i}" for i in range(count))


@given(st.integers(0, 700), st.integers(1, 60), st.integers(0, 70))
def test_passages_cover_every_word_and_overlap(count, words, overlap):
    whole = Document("a", "a", "", numbered(count))
    found = documents.passages(whole, words, overlap)
    assert (found == [whole]) == (count <= words)
    assert documents.passages(whole, 0) == [whole]
    parts = [part.text.split() for part in found]
    shared = min(overlap, words // 2)
    joined = parts[0] + [word for part in parts[1:] for word in part[shared:]]
    assert joined == whole.text.split()
    assert all(len(part) <= words for part in parts)
    for part, following in zip(parts, parts[1:], strict=False):
        assert part[len(part) - shared :] == following[:shared]


def test_passages_know_their_file_lines_page_and_heading():
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
    pages, web = ["p.pdf, page 1", "p.pdf, page 2"], "https://x.test/"
    for url, mark, places in (
        ("p.pdf", "\f", pages),
        ("p.pdf", "\n \f", pages),
        (web, "\f", [web, web]),
    ):
        document = Document("p", "p", url, f"{numbered(30)}{mark}{numbered(30)}")
        parts = documents.passages(document, words=30, overlap=0)
        assert [part.url for part in parts] == places


def test_text_without_spaces_is_cut_by_its_characters_and_code_keeps_its_indentation():
    for text in ("東京" * 300, "สวัสดี" * 100):
        parts = documents.passages(Document("a", "", "", text), 200, 50)
        assert [len(part.text) for part in parts] == [200, 200, 200, 150]
    code = "\n\n".join(f"    x{i} = {i}" for i in range(20))
    parts = documents.passages(Document("a", "", "", f"  {code}"), words=3, overlap=0)
    assert [part.text for part in parts][:2] == ["      x0 = 0", "    x1 = 1"]
