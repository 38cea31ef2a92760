"""Bytes of a file -> its text. HTML and PDF, which strangers write, are read in a child process.

Both formats allow files of a few kilobytes that keep a parser busy for hours or take all the
memory. So this file, run as a child, limits its own processor time, memory and output. As a child
it imports nothing of the project.

HTML is read by lxml, which knows real pages; webencodings knows what their names of encodings mean
to browsers; PDF is read by pypdf. All are optional: pip install -r requirements-documents.txt

Facts must survive: "10<sup>28</sup>" becomes 10^28 and not 1028, an empty table cell leaves a bar,
struck text is marked, <pre> keeps its indentation, a formula is its source. Dropped is what a
reader of the page would not see (hidden elements, scripts, templates), for there instructions to
language models are hidden; a formula's source is an exception. Only attributes and inline styles
are looked at, no style sheets. Navigation and banners stay.

    python tools/reader.py html|pdf SECONDS < FILE

Tests: pytest tests/test_documents.py
"""

import codecs
import contextlib
import importlib.util
import io
import itertools
import logging
import re
import resource
import subprocess
import sys
import tempfile

LIBRARIES = {"html": ("lxml", "webencodings"), "pdf": ("pypdf",)}
HOW_TO_INSTALL = "pip install -r requirements-documents.txt"
SECONDS = {"html": 20, "pdf": 60}  # of processor time, for one file
PATIENCE = 20  # on the clock a child may take so many times as long: the machine may be busy
MEMORY = 2 << 30  # bytes of address space
MOST_CHARACTERS = 10_000_000  # of one file's text; a long book has three million
CUT = "[The rest of this file is too long to be read.]"
BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")  # as browsers tell binary from text


class NotText(ValueError):
    """The bytes hold no text that can be read; the message says why, in our own words."""


def missing(kind: str) -> str | None:
    """None if a kind ("html", "pdf", "text") can be read here, else what to install."""
    for library in LIBRARIES.get(kind, ()):
        if not importlib.util.find_spec(library):
            return f"{kind.upper()} is read by {library}, which is not installed: {HOW_TO_INSTALL}"
    return None


def read(raw: bytes, kind: str) -> str:
    """The text of `raw`, which is "html", "pdf" or "text". NotText if it cannot be read."""
    if kind == "text":
        return decode(raw)
    lacking = missing(kind)
    if lacking:
        raise NotText(lacking)
    seconds = SECONDS[kind]
    command = [sys.executable, "-P", __file__, kind, str(seconds)]
    with tempfile.TemporaryFile() as output:  # a file, whose size can be limited
        try:
            subprocess.run(
                command,
                input=raw,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=PATIENCE * seconds,
                check=True,
            )
        except subprocess.SubprocessError:
            raise NotText(f"{kind.upper()} that is damaged, locked or too large") from None
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    if not text.strip():
        raise NotText("it holds no text")
    return text


def decode(raw: bytes, declared: str | None = None) -> str:
    """The characters: by the byte order mark, as declared, or UTF-8, else windows-1252.

    NotText if the bytes are binary.
    """
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return raw.decode("utf-16", "replace")
    if BINARY.search(raw[:4096]):
        raise NotText("it is binary, not text")
    if raw.startswith(codecs.BOM_UTF8):
        return raw.decode("utf-8-sig", "replace")
    if declared:
        return raw.decode(declared, "replace")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("cp1252", "replace")


# HTML --------------------------------------------------------------------------------------------

COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
# In the order in which browsers ask.
DECLARATIONS = [
    re.compile(rb"<%s[^>]*?\b%s\s*=\s*[\"']?\s*([\w.:-]{1,40})" % words, re.IGNORECASE)
    for words in ((rb"meta\s", rb"charset"), (rb"\?xml\s", rb"encoding"))
]
# Where the standard's decoder of an encoding is not Python's of that name. Bytes that declare
# themselves in ASCII cannot be UTF-16.
DECODERS = {"gbk": "gb18030", "x-user-defined": "cp1252", "replacement": None}
DECODERS |= {"utf-16le": "utf-8", "utf-16be": "utf-8"}
BLOCKS = set(
    "address article aside blockquote body br button caption dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav "
    "ol optgroup option p pre section summary table tbody tfoot thead title tr ul".split()
)
CELLS = ("td", "th")
IN_CELL = "in-cell"  # the tag of a block in a table cell that is written in one line
SMALL_CELL = 30  # such a cell has fewer elements in it, and no table
UNSEEN = (
    "audio base canvas datalist embed iframe link meta noembed object script style svg template "
    "video".split()
)
# What a reader does not see. KaTeX draws a formula once more, for the eye.
HIDDEN = """//*[not(self::html or self::body)][@hidden or @class="katex-html" or
    re:test(@style, "display\\s*:\\s*none|visibility\\s*:\\s*(hidden|collapse)", "i")]"""
REGEX = {"re": "http://exslt.org/regular-expressions"}
# Tag -> what opens it and what closes it. A heading has one # more than its level: in Markdown a
# single # is for the title of the whole.
MARKS = {f"h{level}": ("#" * (level + 1) + " ", "") for level in range(1, 7)}
MARKS |= dict.fromkeys(("del", "s", "strike"), ("~~", "~~"))
ONE_TERM = re.compile(r"[-−+]?[\w.,]+")  # needs no brackets around it
ORDINALS = ("st", "nd", "rd", "th", "er", "e")
# White space of <pre>, until the lines are cut: no page holds \0, and hardly any \1.
KEEP = str.maketrans({" ": "\0", "\t": "\1", "\n": "\0\n"})
KEPT = str.maketrans({"\0": " ", "\1": "\t"})


def html_to_text(raw: bytes) -> str:
    """The text of a page as its reader sees it, one line a block.

    `## ` stands before headings, `|` between the cells of a row, `^` before what is raised, `_`
    before what is lowered, `~~` around what is struck.
    """
    from lxml import etree
    from lxml.html import HTMLParser, document_fromstring

    html = decode(raw, declared_codec(raw)).replace("\0", "\N{REPLACEMENT CHARACTER}")
    parser = HTMLParser(encoding="utf-8", huge_tree=True)
    try:
        root = document_fromstring(html.encode("utf-8", "replace"), parser)
    except etree.ParserError:  # a page without any element
        return ""
    etree.strip_elements(root, etree.Comment, etree.PI, *UNSEEN, with_tail=False)
    for element in root.xpath(HIDDEN, namespaces=REGEX):
        element.drop_tree()
    for cell in root.iter(*CELLS):
        below = list(itertools.islice(cell.iterdescendants(), SMALL_CELL))
        if len(below) < SMALL_CELL and all(element.tag != "table" for element in below):
            for element in below:
                if element.tag in BLOCKS and element.tag != "pre":
                    element.tag = IN_CELL
    text = "".join(_pieces(etree.iterwalk(root, events=("start", "end"))))
    lines = [" ".join(line.split()) for line in text.split("\n")]
    lines = [line.translate(KEPT).rstrip() for line in lines if line.strip("#| ")]
    return "\n".join(lines).strip("\n")


def declared_codec(raw: bytes) -> str | None:
    """Python's name of the encoding that a page declares; None if it declares none."""
    import webencodings

    start = COMMENT.sub(b"", raw[:4096])
    labels = [label.decode("ascii") for form in DECLARATIONS for label in form.findall(start)]
    encoding = next(filter(None, map(webencodings.lookup, labels)), None)
    return encoding and DECODERS.get(encoding.name, encoding.codec_info.name)


def _pieces(walk) -> list[str]:
    """A page's text and marks in order; only "\\n" ends a line."""
    pieces = []
    closing = []  # what closes each open element
    pre = 0  # depth of <pre> elements
    for event, element in walk:
        tag = element.tag
        edge = "\n" if tag in BLOCKS else " " if tag == IN_CELL else ""
        if event == "start":
            opens, closes = _marks(element, pieces)
            closing.append(closes)
            pieces += edge, opens
            pre += tag == "pre"
            text = (element.text or "").removeprefix("\n" if tag == "pre" else "")  # HTML drops it
            if tag == "math":
                text = element.get("alttext") or element.findtext(".//annotation")
                text = f" {text or ' '.join(element.itertext())} "
                walk.skip_subtree()
        else:
            pieces += closing.pop(), edge
            pre -= tag == "pre"
            text = element.tail or ""
        pieces.append(text.translate(KEEP) if pre else text.replace("\n", " "))
    return pieces


def _marks(element, pieces: list[str]) -> tuple[str, str]:
    """What opens and what closes an element behind these pieces."""
    tag = element.tag
    previous = element.getprevious()
    if tag in CELLS and previous is not None and previous.tag in CELLS:
        return " | ", ""
    if tag == "img" and element.get("alt", "").strip():
        return f" [image: {element.get('alt')}] ", ""
    if tag not in ("sup", "sub"):
        return MARKS.get(tag, ("", ""))
    text = "".join(itertools.islice(element.itertext(), 20)).strip()
    before = next(filter(None, reversed(pieces)), "")[-1:]
    follows = (element.tail or "")[:1]
    footnote = not text or text[0] in "[*†‡" or text.lower() in ORDINALS
    atoms = tag == "sub" and text.isdigit() and not before.isdigit()  # H2O needs no mark
    if footnote or (atoms and not follows.isdigit()):
        return "", ""
    sign = "^" if tag == "sup" else "_"
    if ONE_TERM.fullmatch(text) and not follows.isalnum():
        return sign, ""
    return f"{sign}(", ")"


# PDF ---------------------------------------------------------------------------------------------


def pdf_to_text(raw: bytes) -> str:
    """The text of a PDF's pages, a form feed between two of them."""
    import pypdf

    logging.disable()  # pypdf reports every small fault of a file
    reader = pypdf.PdfReader(io.BytesIO(raw), strict=False)
    if reader.is_encrypted:
        reader.decrypt("")  # many files are locked with an empty password
    return "\f".join(page.extract_text().replace("\f", "\n") for page in reader.pages)


# The child ---------------------------------------------------------------------------------------


def limit(what: int, most: int) -> None:
    """Sets a limit of this process. Of processor time SIGKILL comes a second after the signal."""
    with contextlib.suppress(ValueError, OSError):  # a lower one holds; macOS limits no memory
        resource.setrlimit(what, (most, most + 1))


def main(kind: str, seconds: int) -> None:
    limit(resource.RLIMIT_CPU, seconds)
    limit(resource.RLIMIT_AS, MEMORY)
    limit(resource.RLIMIT_FSIZE, 4 * MOST_CHARACTERS + 100)
    limit(resource.RLIMIT_CORE, 0)
    raw = sys.stdin.buffer.read()
    text = html_to_text(raw) if kind == "html" else pdf_to_text(raw)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}\n{CUT}"
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
