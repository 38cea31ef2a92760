"""Bytes to text, files to documents, documents to passages."""

import html
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import needs_lxml, needs_pypdf

from config import UserError
from tools import Document, documents, reader, search

# Characters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw, kind",
    [
        ("café".encode(), "text"),
        ("café".encode("utf-8-sig"), "text"),
        ("café".encode("utf-16"), "text"),
        (b"caf\xe9", "text"),
        ("café".encode(), "html"),
        ("café".encode("utf-16"), "html"),
        (b'<meta charset="windows-1252">caf\xe9', "html"),
        (b'<?xml version="1.0" encoding="iso-8859-1"?><html>caf\xe9', "html"),
        (b'<meta http-equiv=x content="text/html; charset=iso-8859-1">caf\xe9', "html"),
        ("<meta charset=utf-16>café".encode(), "html"),
        ("<meta charset=no-such>café".encode(), "html"),
    ],
)
def test_bytes_are_decoded_as_they_declare(raw, kind):
    if reader.missing(kind):
        pytest.skip(reader.missing(kind))
    assert reader.read(raw, kind) == "café"


@needs_lxml
@pytest.mark.parametrize(
    "charset, codec, text",
    [
        ("iso-8859-1", "cp1252", "“quotes” – and €"),
        ("us-ascii", "cp1252", "“quotes”"),
        ("gb2312", "gb18030", "镕基"),
        ("x-sjis", "cp932", "髙①東京"),
        ("ks_c_5601-1987", "cp949", "똠방각하"),
        ("tis-620", "cp874", "ไทย"),
        ("koi8-r", "koi8_r", "Москва"),
        ("windows-1251", "cp1251", "Москва"),
        ("iso-8859-2", "iso8859_2", "Łódź"),
        ("iso-2022-jp", "iso2022_jp", "東京"),
    ],
)
def test_charsets_mean_what_browsers_take_them_for(charset, codec, text):
    raw = f"<meta charset={charset}>".encode() + text.encode(codec)
    assert reader.html_to_text(raw) == text


@pytest.mark.parametrize("kind, raw", [("text", b"\0\1" * 99), ("html", b"\0\1" * 99)])
def test_binary_is_no_text(kind, raw):
    with pytest.raises(reader.NotText):
        reader.read(raw, kind)


# HTML --------------------------------------------------------------------------------------------


def table(*rows):
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def math(content):
    return f"<math>{content}</math>"


def katex(content, source, drawn):
    """As KaTeX writes it: MathML with its source, then the same drawn for the eye."""
    return (
        '<span class="katex"><span class="katex-mathml"><math><semantics><mrow>'
        f'{content}</mrow><annotation encoding="application/x-tex">{source}</annotation>'
        "</semantics></math></span>"
        f'<span class="katex-html" aria-hidden="true">{drawn}</span></span>'
    )


POWER = "<msup><mn>10</mn><mn>28</mn></msup>"
MEDIAWIKI = (
    f'<span class="mwe"><span style="display: none;"><math>{POWER}</math></span>'
    '<img alt="{\\displaystyle 10^{28}}" aria-hidden="true"></span>'
)
SUM = "<mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow>"
ROWS = ("<th>Year<th>City<th>n", "<td rowspan=2>2001<td>A<td>5", "<td>B<td>6", "<td>2002<td>C<td>7")

FACTS = [
    # comments and processing instructions between cells and within numbers
    (table("<td>Year</td><!-- x --><td>2001</td>"), "Year | 2001"),
    (table("<!-- x --><td>Year</td><td>2001</td>"), "Year | 2001"),
    (table("<td>Year</td><?php x ?><td>2001</td>"), "Year | 2001"),
    (math("<msup><mn>10</mn><!-- x --><mn>28</mn></msup>"), "10^28"),
    (math("<mn>10<!-- x -->28</mn>"), "1028"),
    # tables
    (table(*ROWS), "Year | City | n\n2001 | A | 5\n| B | 6\n2002 | C | 7"),
    (table("<td rowspan=2 colspan=2>a<td>b", "<td>c"), "a | | b\n| | c"),
    (table("<td>a<td></td><td>c"), "a | | c"),
    (table("<td colspan=2>a<td>c"), "a | | c"),
    (table("<td><p>a</p><td><p>b</p>"), "a | b"),
    # raised and lowered
    ("6.6×10<sup>28</sup> years", "6.6×10^28 years"),
    ("10<sup>−6</sup>m", "10^−6 m"),
    ("e<sup>a+b</sup>c", "e^(a+b) c"),
    ("10<span style='vertical-align:super'>28</span>", "10^28"),
    ("10<sup><span style='vertical-align: super'>28</span></sup>", "10^28"),
    ("x<span style='vertical-align:sub'>i</span>y", "x_i y"),
    ("1101<sub>2</sub> and 5<sub>10</sub>", "1101_2 and 5_10"),
    ("3<sup>1</sup>/<sub>2</sub> hours", "3 1/2 hours"),
    ("3<sup>1</sup>/", "3^1/"),
    ("H<sub>2</sub>O, log<sub>10</sub>5, x<sub>i+1</sub>", "H2O, log10 5, x_(i+1)"),
    ("in 1897<sup>2</sup>", "in 1897^2"),
    ("in 1897<sup><a>[2]</a></sup>", "in 1897[2]"),
    ("the 19<sup>th</sup> of May", "the 19th of May"),
    # struck
    ("<del>1901</del><ins>1902</ins>", "~~1901~~1902"),
    ("<s>1901</s>1902", "~~1901~~1902"),
    ("<span style='text-decoration: line-through'>19</span>20", "~~19~~20"),
    # formulas
    (katex(POWER, "10^{28}", "<b>10</b><b>28</b>"), "10^28"),
    (katex("<mn>42</mn>", "42", "42"), "42"),
    (f"so {MEDIAWIKI} end", "so 10^28 end"),
    (math(f"{POWER}<mi>m</mi>"), "10^28 m"),
    (math("<msubsup><mn>10</mn><mn>2</mn><mn>3</mn></msubsup>"), "10_2^3"),
    (math("<mroot><mn>27</mn><mn>3</mn></mroot>"), "27^(1/3)"),
    (math("<msqrt><mn>2</mn></msqrt>"), "√2"),
    (math(f"<mfrac>{SUM}<mn>2</mn></mfrac>"), "(a+b)/2"),
    (math("<mn>3</mn><mfrac><mn>1</mn><mn>2</mn></mfrac>"), "3 1/2"),
    (f"3{math('<mfrac><mn>1</mn><mn>2</mn></mfrac>')}5", "3 1/2 5"),
    (
        math(
            "<mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr>"
            "<mtr><mtd><mn>3</mn></mtd><mtd><mn>4</mn></mtd></mtr></mtable>"
        ),
        "[1, 2; 3, 4]",
    ),
    (
        math("<mmultiscripts><mi>U</mi><mprescripts/><mn>92</mn><mn>235</mn></mmultiscripts>"),
        "_92^235 U",
    ),
    # what looks like decoration and holds the page
    ('<title>T</title><body class="home cookie-banner-visible">text', "T\ntext"),
    ("<title>T</title><nav>all <p>is here</nav>", "T\nall\nis here"),
    ("<title>T</title><div role=dialog>text</div>", "T\ntext"),
    (
        "<blockquote>Words<footer>A. Einstein, 1926</footer></blockquote>",
        "Words\nA. Einstein, 1926",
    ),
    ("<div style='opacity:0'>fades in</div>", "fades in"),
    ("<svg></svg><i style='fill-opacity:0'>text</i>", "text"),
    ("<frameset><noframes>text</noframes></frameset>", "text"),
    ("<body style='display:none'>text", "text"),
    ("<p aria-hidden=true>text</p>", "text"),
    # others
    ("<img src=x alt='rising sales'>", "[image: rising sales]"),
    ("&#1" + "1" * 5000 + ";x", "�x"),
]


@needs_lxml
@pytest.mark.parametrize("html, text", FACTS)
def test_facts_survive(html, text):
    assert reader.html_to_text(html) == text


@needs_lxml
def test_html_keeps_every_fact_and_drops_scripts():
    page = """<!doctype html><html><head><title>A &amp; B</title><STYLE>p > a {x}</STYLE>
      <script type="x">if (a < b) "</p><b>no"</script ></head><body onload="a>b" title='c>d'>
      <h1>Born <b>19</b>68</h1>In
      Paris<br/>caf&eacute;&nbsp;bar<table><tr><td>x</td><td>1</td></tr>
      <tr><th>y</th><td>2</td></tr></table>
      5 < 6 &amp;lt; 7<!-- no <b>no</b> --><script-like>kept</script-like>
      <ul><li>one<li>two<pre>\ndef f():\n\treturn 1\n\n    pass</pre>"""
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
        "def f():",
        "\treturn 1",
        "",
        "    pass",
    ]


@needs_lxml
@pytest.mark.parametrize(
    "unseen",
    [
        "<p hidden>evil</p>",
        "<p style='color: red; DISPLAY : none'>evil</p>",
        "<div style='visibility:hidden'><p>evil</p></div>",
        "<template><p>evil</p></template>",
        "<svg><text>evil</text></svg>",
        "<pre hidden>evil</pre>",
        "<table hidden><tr><td>evil</table>",
        "<sup hidden>evil</sup>",
        "<!-- evil -->",
    ],
)
def test_what_a_reader_would_not_see_is_dropped(unseen):
    assert reader.html_to_text(f"<p>good {unseen}<p>end").split() == ["good", "end"]


MARKS = """<p>|</div>|<a href='x>y'>|<b x=1>|<!-- no -->|<script>no</script>|<br>|<?no?>|</ no>|
<style>no</style>|<i title="<no>">|<h2>|<section>|<td>|<table>|<tr>|<li>"""
marks = st.sampled_from(MARKS.split("|"))
texts = st.text("abc<&>é 1\n\"'=", min_size=1).map(html.escape)


@needs_lxml
@given(st.lists(st.tuples(marks, texts), max_size=20))
def test_no_text_is_lost_and_no_markup_shown(parts):
    shown = reader.html_to_text("".join(mark + text for mark, text in parts))
    expected = "".join(html.unescape(text) for _, text in parts)
    shown = re.sub("[|]", "", shown.replace("### ", ""))
    assert "".join(shown.split()) == "".join(expected.split())


TAGS = (
    "p div table tr td th pre sup sub del math mn msup mfrac msqrt mtable mtr mtd mmultiscripts "
    "mprescripts annotation img nav h1 br ul li frameset noframes svg select option q html body"
).split()
ATTRIBUTES = (
    " hidden| aria-hidden=true| style='vertical-align:super'| style='display:none'| rowspan=9999"
    "| colspan=99| rowspan=-1| alt='a b'| style='text-decoration:line-through'|"
).split("|")
PIECES = st.one_of(
    st.tuples(st.sampled_from(TAGS), st.sampled_from(ATTRIBUTES)).map("<{0[0]}{0[1]}>".format),
    st.sampled_from(TAGS).map("</{}>".format),
    st.sampled_from(["<!-- x -->", "<?x?>", "&#0;", "]]>", "<![CDATA[x]]>", "10", " a+b ", "\n"]),
    st.text(max_size=4),
)


@needs_lxml
@settings(max_examples=300)
@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_page_gives_bounded_text(page):
    text = reader.html_to_text(page)
    assert isinstance(text, str) and len(text) <= 40 * reader.MOST_BARS * (1 + len(page))
    text.encode("utf-8", "strict")


DEEP = ["<div>", "<table>", "<td><table>", "<sup>x", "<msup><mn>", "<math><msup><mn>1"]
LONG = ["<!--", "<a |", "<script>", "<a b='", '<a x=">" ', "<pre>", "&#", "<td>x", "<img alt=x>"]


@needs_lxml
@pytest.mark.parametrize("unit", DEEP + LONG)
def test_hostile_html_ends_as_text_or_as_none(unit):
    try:
        text = reader.read((unit * (1_000_000 // len(unit))).encode() + b"end", "html")
    except reader.NotText:
        return
    assert len(text) < 10_000_000


@needs_lxml
def test_html_that_keeps_the_parser_busy_is_given_up(monkeypatch):
    """By its processor time, which a busy machine does not change."""
    monkeypatch.setitem(reader.SECONDS, "html", 1)
    attributes = " ".join(f"a{i}=1" for i in range(200_000))  # quadratic in the library
    with pytest.raises(reader.NotText, match="processor time"):
        reader.read(f"<a {attributes}>x".encode(), "html")


@needs_lxml
def test_the_reader_keeps_lower_limits_that_hold_already():
    command = f"ulimit -v 1000000; echo '<p>x' | {sys.executable} -P {reader.__file__} html 9"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert run.stdout == "x" and run.stderr == ""


# PDF ---------------------------------------------------------------------------------------------


def make_pdf(*streams, extra=(), font="", pages=None):
    """A PDF with one content stream a page, written by hand; `pages` names the streams again."""
    order = range(len(streams)) if pages is None else pages
    kids = " ".join(f"{3 + 2 * i} 0 R" for i in order)
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(order)} >>",
    ]
    font = f"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica {font} >>"
    for i, stream in enumerate(streams):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {4 + 2 * i} 0 R "
            f"/Resources << /Font << /F1 {font} >> >> >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    objects += extra
    out = "%PDF-1.4\n"
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n"
    rows = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{rows}"
    out += f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF"
    return out.encode("latin-1")


def line(text):
    return f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET"


@needs_pypdf
def test_a_pdf_is_read_page_by_page_and_a_damaged_one_is_no_text():
    raw = make_pdf(line("born in 1968"), line("in Paris"))
    assert reader.read(raw, "pdf") == "born in 1968\fin Paris"
    for damaged in (raw[:50], b"", b"%PDF-1.4\n" + b"x" * 100):
        with pytest.raises(reader.NotText, match="cannot be read"):
            reader.read(damaged, "pdf")


def pdf_bomb(codes, repeats, pages):
    """Each of `codes` characters stands for 250, and each page is shown many times."""
    letters = "0041" * 250
    cmap = (
        "/CIDInit /ProcSet findresource begin begincmap 1 begincodespacerange <00> <FF> "
        f"endcodespacerange 1 beginbfchar <41> <{letters}> endbfchar endcmap end"
    )
    unicode = f"<< /Length {len(cmap)} >>\nstream\n{cmap}\nendstream"
    content = "BT /F1 1 Tf " + f"<{'41' * codes}> Tj " * repeats + "ET"
    return make_pdf(content, extra=[unicode], font="/ToUnicode 5 0 R", pages=[0] * pages)


@needs_pypdf
@pytest.mark.parametrize("codes, repeats, pages", [(100, 20, 1), (400, 1, 400), (1000, 4, 100)])
def test_a_small_pdf_cannot_fill_the_trainer(codes, repeats, pages):
    raw = pdf_bomb(codes, repeats, pages)
    text = reader.read(raw, "pdf")
    assert reader.CUT in text
    assert len(text) <= reader.EXPANSION * len(raw) + 100
    whole = Document("p.pdf", "p", "p.pdf", text)
    assert sum(len(part.text) for part in documents.passages(whole)) < 3 * len(text)


# Files -------------------------------------------------------------------------------------------


def texts_of(path):
    return {document.id: document.text for document in documents.read_documents(path)}


def test_what_cannot_be_read_is_listed_and_does_not_refuse_the_folder(
    tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "notes"
    (folder / "closed").mkdir(parents=True)
    (folder / "closed.md").write_text("closed")
    (tmp_path / "secret.md").write_text("secret")
    (folder / "a.md").write_text("# A\nplain")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "b.rst").write_text("rest")
    (folder / "binary.md").write_bytes(b"\x00\x01" * 50)
    (folder / "x.docx").write_bytes(b"PK")
    (folder / "y.png").write_bytes(b"PNG")
    (folder / "out.md").symlink_to(tmp_path / "secret.md")
    (folder / "in.md").symlink_to(folder / "a.md")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.md")

    def closed(real):
        def opened(path):
            if "closed" in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        return opened

    monkeypatch.setattr(documents.Path, "read_bytes", closed(documents.Path.read_bytes))
    monkeypatch.setattr(os, "scandir", closed(os.scandir))
    read = texts_of(folder)
    assert read.pop("in.md") == read.pop("a.md") == "# A\nplain"
    assert read == {"b.rst": "rest", "latin.txt": "café"}
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "2 files (x.docx, y.png): of a kind that is not read" in said
    for part in (
        "out.md): a link out of",
        "pipe.md): not a file",
        "binary.md): it is binary",
        "closed.md): cannot be opened (Permission denied)",
        "closed): a folder that cannot be opened",
    ):
        assert part in said


@pytest.mark.parametrize("cache", [False, True])
def test_a_huge_file_is_never_taken_into_memory(tmp_path, monkeypatch, capsys, cache):
    """Neither in a folder nor named by itself. It takes no room on the disk: it is all hole."""
    huge = tmp_path / "notes" / "huge.txt"
    huge.parent.mkdir()
    huge.touch()
    os.truncate(huge, documents.LARGEST_FILE + 1)
    (huge.parent / "a.md").write_text("fine")
    real_read = documents.Path.read_bytes

    def read_bytes(path):
        assert path.name != huge.name
        return real_read(path)

    monkeypatch.setattr(documents.Path, "read_bytes", read_bytes)
    cache = tmp_path / "cache" if cache else None
    with pytest.raises(UserError, match="huge.txt cannot be read: more than 64 MiB"):
        search.local(huge, 1, cache)
    assert search.local(huge.parent, 1, cache)("fine")
    assert "1 file (huge.txt): more than 64 MiB" in capsys.readouterr().err


@needs_lxml
@needs_pypdf
def test_html_and_pdf_files_are_read(tmp_path):
    (tmp_path / "a.html").write_text("<title>T</title><p>born in 19<b>68</b>")
    (tmp_path / "b.pdf").write_bytes(make_pdf(line("in Paris")))
    assert texts_of(tmp_path) == {"a.html": "T\nborn in 1968", "b.pdf": "in Paris"}


def test_without_the_library_files_are_skipped_with_what_to_install(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.md").write_text("fine")
    (tmp_path / "b.html").write_text("<p>x")
    monkeypatch.setattr(reader.importlib.util, "find_spec", lambda name: None)
    assert texts_of(tmp_path) == {"a.md": "fine"}
    assert "b.html): HTML is read by lxml, which is not installed" in capsys.readouterr().err
    with pytest.raises(UserError, match="requirements-documents.txt"):
        texts_of(tmp_path / "b.html")


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
        ("x" * 5000, "there is no x"),
    ]:
        with pytest.raises(UserError, match=reason) as caught:
            search.local(path, 1, cache)
        assert len(str(caught.value)) < 600


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


def test_a_passage_that_begins_with_a_line_keeps_its_indentation():
    code = "\n\n".join(f"    x{i} = {i}" for i in range(20))
    parts = documents.passages(Document("a", "", "", f"  {code}"), words=3, overlap=0)
    assert [part.text for part in parts][:2] == ["      x0 = 0", "    x1 = 1"]


def test_passages_of_a_pdf_know_their_page_and_those_of_a_page_their_part():
    paper = Document("p.pdf", "p", "p.pdf", f"{numbered(30)}\f{numbered(30)}")
    places = [part.url for part in documents.passages(paper, words=30, overlap=0)]
    assert places == ["p.pdf, page 1", "p.pdf, page 2"]
    page = Document("x", "T", "https://x.test/", numbered(60))
    parts = documents.passages(page, words=30, overlap=0)
    assert [part.url for part in parts] == ["https://x.test/"] * 2
    assert [part.title for part in parts] == ["T (part 1 of 2)", "T (part 2 of 2)"]


@pytest.mark.parametrize("text", ["東京" * 300, "สวัสดี" * 100])
def test_text_without_spaces_is_cut_by_its_characters(text):
    parts = documents.passages(Document("a", "", "", text), 200, 50)
    assert [len(part.text) for part in parts] == [200, 200, 200, 150]


class Counting(str):
    """A text that counts how many of its characters are looked at again."""

    seen = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        Counting.seen += len(found)
        return found

    def rfind(self, part, begin, end):
        Counting.seen += end - begin
        return super().rfind(part, begin, end)


@pytest.mark.parametrize("gap", [" ", "\n", "   \n   "])
def test_the_work_is_linear_in_the_length_of_a_line(gap):
    text = Counting(gap.join(["word"] * 100_000))
    parts = documents.passages(Document("a", "a", "a", text))
    assert len(parts) > 600
    assert Counting.seen < 3 * len(text), "once, and the overlaps twice"
    Counting.seen = 0


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
