"""Bytes to text, files to documents, documents to passages."""

import email.message
import html
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import needs_lxml, needs_pypdf

from config import UserError
from tools import Document, ToolError, documents, pages, reader, search


def headers(kind, **more):
    message = email.message.Message()
    if kind:
        message["Content-Type"] = kind
    for name, value in more.items():
        message[name.replace("_", "-")] = value
    return message


# Kinds and characters ----------------------------------------------------------------------------


@needs_lxml
@pytest.mark.parametrize(
    "raw, kind",
    [
        ("café".encode(), "text/html"),
        ("café".encode("latin-1"), "text/html; charset=latin-1"),
        (b'<meta charset="windows-1252">caf\xe9', "text/html"),
        ("café".encode(), "text/plain; charset=no-such"),
        ("café".encode(), "text/plain; charset=punycode"),
        ("café".encode("utf-16"), "text/plain; charset=utf-16"),
        ("café".encode("utf-16"), "text/plain"),
        ("café".encode("utf-16-le"), "text/plain; charset=utf-16le"),
        (b"caf\xe9", "text/plain"),
        (b'<?xml version="1.0" encoding="iso-8859-1"?><html>caf\xe9', "application/xhtml+xml"),
        (b'<meta http-equiv=x content="text/html; charset=iso-8859-1">caf\xe9', "text/html"),
        (b"<!-- x -->\n<!DOCTYPE html><p>caf\xc3\xa9", ""),
        (b"caf\xc3\xa9", ""),
        ("café".encode(), "text/html; charset*0=a; charset*=b"),
        ("café".encode(), ";;;=;charset="),
    ],
)
def test_pages_are_decoded_as_they_declare(raw, kind):
    assert pages.page_text(raw, headers(kind)) == "café"


@pytest.mark.parametrize(
    "charset, codec, text",
    [
        ("iso-8859-1", "cp1252", "“quotes” – and €"),
        ("us-ascii", "cp1252", "“quotes”"),
        ("gb2312", "gb18030", "镕基"),
        ("x-gbk", "gb18030", "镕基"),
        ("x-sjis", "cp932", "髙①東京"),
        ("ks_c_5601-1987", "cp949", "똠방각하"),
        ("tis-620", "cp874", "ไทย"),
        ("windows-874", "cp874", "ไทย"),
        ("macintosh", "mac_roman", "café"),
        ("koi8-r", "koi8_r", "Москва"),
        ("windows-1251", "cp1251", "Москва"),
        ("iso-8859-2", "iso8859_2", "Łódź"),
        ("big5", "big5hkscs", "臺北"),
        ("euc-jp", "euc_jp", "東京"),
    ],
)
def test_charsets_mean_what_browsers_take_them_for(charset, codec, text):
    raw = text.encode(codec)
    assert pages.page_text(raw, headers(f"text/plain; charset={charset}")) == text


@pytest.mark.parametrize(
    "raw, kind, more",
    [
        (b"x", "application/pdf", {}),
        (b"x", "image/png", {}),
        (b"x", "text/html", {"Content_Encoding": "gzip"}),
        (b"\x00\x01\x02" * 99, "text/html", {}),
        (b"\x00\x01\x02" * 99, "text/plain", {}),
        (b"\x00\x01\x02" * 99, "", {}),
        (b"<script>x</script> <p>", "text/html", {}),
    ],
)
def test_pages_without_text_are_failures(raw, kind, more):
    with pytest.raises(ToolError):
        pages.page_text(raw, headers(kind, **more))


@pytest.mark.parametrize("encoding", ["", "utf-8", "identity", " Identity"])
def test_an_encoding_that_compresses_nothing_is_none(encoding):
    assert pages.page_text(b"x", headers("text/plain", Content_Encoding=encoding)) == "x"


# HTML --------------------------------------------------------------------------------------------


@needs_lxml
def test_html_keeps_every_fact_and_drops_scripts():
    page = """<!doctype html><html><head><title>A &amp; B</title><STYLE>p > a {x}</STYLE>
      <script type="x">if (a < b) "</p><b>no"</script ></head><body onload="a>b" title='c>d'>
      <h1>Born <b>19</b>68</h1>In
      Paris<br/>caf&eacute;&nbsp;bar<table><tr><td>x</td><td>1</td></tr>
      <tr><th>y</th><td>2</td></tr></table>
      5 < 6 &amp;lt; 7<!-- no <b>no</b> --><script-like>kept</script-like>
      <ul><li>one<li>two"""
    assert reader.html_to_text(page).split("\n") == [
        "A & B",
        "## Born 1968",
        "In Paris",
        "café bar",
        "x | 1",
        "y | 2",
        "5 < 6 &lt; 7kept",
        "one",
        "two",
    ]


@needs_lxml
@pytest.mark.parametrize(
    "html, text",
    [
        ("6.6×10<sup>28</sup> years", "6.6×10^28 years"),
        ("10<sup>−6</sup>m", "10^−6 m"),
        ("in 1897<sup>2</sup>", "in 1897^2"),
        ("in 1897<sup><a>[2]</a></sup>", "in 1897[2]"),
        ("the 19<sup>th</sup> of May", "the 19th of May"),
        ("H<sub>2</sub>O, log<sub>10</sub>5", "H2O, log10 5"),
        ("<math><msup><mn>10</mn><mn>28</mn></msup></math>", "10^28"),
        ("<math><mfrac><mn>1</mn><mn>2</mn></mfrac></math>", "1/2"),
        ("<table><tr><td>a<td></td><td>c</table>", "a | | c"),
        ("<table><tr><td colspan=2>a<td>c</table>", "a | | c"),
        ("<table><tr><td><p>a</p><td><p>b</p></table>", "a | b"),
        ("<img src=x alt='rising sales'>", "[image: rising sales]"),
        ("&#1" + "1" * 5000 + ";x", "�x"),
    ],
)
def test_html_does_not_change_facts(html, text):
    assert reader.html_to_text(html) == text


@needs_lxml
def test_code_keeps_its_indentation_and_its_empty_lines():
    code = "def f():\n\tif x:\n\t    return 1\n\n    pass"
    assert reader.html_to_text(f"<p>so:<pre>\n{code}</pre>end") == f"so:\n{code}\nend"


@needs_lxml
@pytest.mark.parametrize(
    "unseen",
    [
        "<p hidden>evil</p>",
        "<p style='color: red; DISPLAY : none'>evil</p>",
        "<div style='visibility:hidden'><p>evil</p></div>",
        "<p style='font-size:0px'>evil</p>",
        "<p style='opacity:0'>evil</p>",
        "<span aria-hidden=true>evil</span>",
        "<template><p>evil</p></template>",
        "<svg><text>evil</text></svg>",
        "<nav>evil</nav>",
        "<div role=navigation>evil</div>",
        "<div id=cookie-banner>evil</div>",
        "<footer>evil</footer>",
        "<!-- evil -->",
    ],
)
def test_what_a_reader_would_not_see_is_dropped(unseen):
    assert reader.html_to_text(f"<p>good {unseen}<p>end").split() == ["good", "end"]


@needs_lxml
def test_a_page_of_nothing_but_navigation_keeps_it():
    assert reader.html_to_text("<nav>the only text</nav>") == "the only text"
    assert reader.html_to_text("<p style='opacity:0.5'>grey") == "grey"


MARKS = """<p>|</div>|<a href='x>y'>|<b x=1>|<!-- no -->|<script>no</script>|<br>|<?no?>|</ no>|
<style>no</style>|<i title="<no>">|<h2>|<section>"""
marks = st.sampled_from(MARKS.split("|"))
texts = st.text("abc<&>é 1\n\"'=", min_size=1).map(html.escape)


@needs_lxml
@settings(deadline=None)
@given(st.lists(st.tuples(marks, texts), max_size=20))
def test_no_text_is_lost_and_no_markup_shown(parts):
    shown = reader.html_to_text("".join(mark + text for mark, text in parts))
    expected = "".join(html.unescape(text) for _, text in parts)
    assert "".join(shown.replace("### ", "").split()) == "".join(expected.split())


HOSTILE = """<!--|<a |</|&|<script>|<script></script |<?|<a b='|<|= |<a x=">" |<a =  |<pre>|<div>|
<style><|<a ="|&#|<table>|<td><table>|<sup>x|<msup><mn>|<p><b>|<img alt=x>|<td>x|<br>|<ul><li>"""


@needs_lxml
@pytest.mark.parametrize("unit", HOSTILE.split("|"))
def test_hostile_html_takes_time_in_proportion(unit):
    start = time.process_time()
    reader.html_to_text(unit * (1_000_000 // len(unit)))
    assert time.process_time() - start < 5


@needs_lxml
def test_html_that_keeps_the_parser_busy_is_given_up(monkeypatch):
    monkeypatch.setitem(pages.SECONDS, "html", 0.5)
    attributes = " ".join(f"a{i}=1" for i in range(200_000))  # quadratic in the library
    start = time.monotonic()
    with pytest.raises(pages.NotText, match="more than 0.5 s"):
        pages.read(f"<a {attributes}>x".encode(), "html")
    assert time.monotonic() - start < 5


@needs_lxml
def test_the_reader_keeps_lower_limits_that_hold_already():
    command = f"ulimit -v 1000000; echo '<p>x' | {sys.executable} -P {pages.READER} html"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert run.stdout == "x" and run.stderr == ""


# PDF ---------------------------------------------------------------------------------------------


def make_pdf(*texts):
    """A PDF with one line of text a page, written by hand."""
    kids = " ".join(f"{3 + 2 * i} 0 R" for i in range(len(texts)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(texts)} >>",
    ]
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    for i, text in enumerate(texts):
        stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {4 + 2 * i} 0 R "
            f"/Resources << /Font << /F1 {font} >> >> >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    out = "%PDF-1.4\n"
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    out += f"xref\n0 {size}\n0000000000 65535 f \n{table}"
    start = out.index("xref\n0")
    out += f"trailer << /Size {size} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF"
    return out.encode()


@needs_pypdf
def test_a_pdf_is_read_page_by_page_and_a_damaged_one_is_no_text():
    raw = make_pdf("born in 1968", "in Paris")
    assert pages.page_text(raw, headers("application/pdf")) == "born in 1968\fin Paris"
    assert pages.page_text(raw, headers("application/octet-stream")) == "born in 1968\fin Paris"
    with pytest.raises(ToolError, match="cannot be read"):
        pages.page_text(raw[:50], headers("application/pdf"))


# Files -------------------------------------------------------------------------------------------


def texts_of(path):
    return {document.id: document.text for document in documents.read_documents(path)}


def test_what_cannot_be_read_is_listed_and_does_not_refuse_the_folder(tmp_path, capsys):
    folder = tmp_path / "notes"
    folder.mkdir()
    (tmp_path / "secret.md").write_text("secret")
    (folder / "a.md").write_text("# A\nplain")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "wide.txt").write_bytes("café".encode("utf-16"))
    (folder / "b.rst").write_text("rest")
    (folder / "c.markdown").write_text("down")
    (folder / "binary.md").write_bytes(b"\x00\x01" * 50)
    (folder / "x.docx").write_bytes(b"PK")
    (folder / "y.png").write_bytes(b"PNG")
    (folder / "out.md").symlink_to(tmp_path / "secret.md")
    (folder / "in.md").symlink_to(folder / "a.md")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.md")
    read = texts_of(folder)
    assert read.pop("in.md") == read.pop("a.md") == "# A\nplain"
    assert read.pop("latin.txt") == read.pop("wide.txt") == "café"
    assert read == {"b.rst": "rest", "c.markdown": "down"}
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "2 files (x.docx, y.png): of a kind that is not read" in said
    for part in ("out.md): a link out of", "pipe.md): not a file", "binary.md): it is binary"):
        assert part in said


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_skipped(tmp_path, capsys):
    (tmp_path / "a.md").write_text("fine")
    (tmp_path / "b.md").write_text("closed")
    (tmp_path / "b.md").chmod(0)
    assert texts_of(tmp_path) == {"a.md": "fine"}
    assert "b.md): cannot be opened" in capsys.readouterr().err


def test_a_file_that_cannot_be_opened_is_skipped(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.md").write_text("fine")
    (tmp_path / "b.md").write_text("closed")
    real = documents.Path.read_bytes

    def closed(path):
        if path.name == "b.md":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(documents.Path, "read_bytes", closed)
    assert texts_of(tmp_path) == {"a.md": "fine"}
    assert "b.md): cannot be opened (Permission denied)" in capsys.readouterr().err


def test_a_folder_that_cannot_be_opened_is_listed(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.md").write_text("fine")
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert texts_of(tmp_path) == {"a.md": "fine"}
    assert "closed): a folder that cannot be opened" in capsys.readouterr().err


@needs_lxml
@needs_pypdf
def test_html_and_pdf_files_are_read(tmp_path):
    (tmp_path / "a.html").write_text("<title>T</title><p>born in 19<b>68</b>")
    (tmp_path / "b.pdf").write_bytes(make_pdf("in Paris"))
    assert texts_of(tmp_path) == {"a.html": "T\nborn in 1968", "b.pdf": "in Paris"}


def test_without_the_library_files_are_skipped_with_what_to_install(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.md").write_text("fine")
    (tmp_path / "b.html").write_text("<p>x")
    monkeypatch.setattr(pages.importlib.util, "find_spec", lambda name: None)
    assert texts_of(tmp_path) == {"a.md": "fine"}
    assert "b.html): HTML is read by lxml, which is not installed" in capsys.readouterr().err
    with pytest.raises(UserError, match="requirements-documents.txt"):
        texts_of(tmp_path / "b.html")


def test_one_file_can_be_searched(tmp_path):
    (tmp_path / "note.md").write_text("apples")
    (found,) = search.local(tmp_path / "note.md", 3)("apples")
    assert (found.id, found.title, found.url) == ("note.md", "note", "note.md")


@pytest.mark.parametrize("cache", [False, True])
def test_what_is_no_file_and_what_is_nested_without_end_is_one_sentence(tmp_path, cache):
    os.mkfifo(tmp_path / "pipe")
    deep = tmp_path / "deep.jsonl"
    deep.write_text("[" * 200_000)
    cache = tmp_path / "cache" if cache else None
    for path, reason in [
        (tmp_path / "pipe", "neither a file nor a folder"),
        ("/dev/zero", "neither a file nor a folder"),
        (deep, "line 1: nested too deeply"),
    ]:
        with pytest.raises(UserError, match=reason):
            search.local(path, 1, cache)


def test_titles_are_one_line_without_control_characters():
    made = documents.make_document("1", "A\n# B (https://b.test)\u202e\x1b]0;x\x07", "u\nv", "t\n")
    assert made == Document("1", "A # B (https://b.test) ]0;x", "u v", "t\n")


# Passages ----------------------------------------------------------------------------------------


def numbered(count, first=0):
    return " ".join(f"w{i}" for i in range(first, first + count))


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
    lines = ["intro", "", "# Fruit", *[numbered(10)] * 10, "Prices", "======", *[numbered(10)] * 10]
    lines += ["```", "# a comment", "```"]
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


def test_passages_of_a_pdf_know_their_page_and_those_of_a_page_their_part():
    paper = Document("p.pdf", "p", "p.pdf", f"{numbered(30)}\f{numbered(30)}")
    places = [part.url for part in documents.passages(paper, words=30, overlap=0)]
    assert places == ["p.pdf, page 1", "p.pdf, page 2"]
    page = Document("x", "T", "https://x.test/", numbered(60))
    parts = documents.passages(page, words=30, overlap=0)
    assert [part.url for part in parts] == ["https://x.test/"] * 2
    assert [part.title for part in parts] == ["T (part 1 of 2)", "T (part 2 of 2)"]


def test_text_without_spaces_is_cut_by_its_characters():
    parts = documents.passages(Document("a", "", "", "東京" * 300), 200, 50)
    assert [len(part.text) for part in parts] == [200, 200, 200, 150]


def test_a_long_page_is_shortened_to_the_passages_that_match():
    page = Document("p", "P", "https://p.test", f"{numbered(500)} needle {numbered(500, 500)}")

    def rank(parts):
        return [part for part in parts if "needle" in part.text]

    short = documents.best_passages(page, rank, words=100, longest=300)
    places = [line for line in short.text.split("\n") if line.startswith("[")]
    assert places == ["[part 1 of 11]", "[part 2 of 11]", "[part 6 of 11]"]
    assert "needle" in short.text and len(short.text.split()) < 330
    assert documents.best_passages(page, rank, words=0, longest=300) == page
    assert documents.best_passages(page, rank, words=100, longest=1001) == page
