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
BLOCKS = frozenset(
    "address article aside blockquote body br button caption dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav "
    "ol optgroup option p pre section summary table tbody tfoot thead title tr ul".split()
)
# One # more than the level: in Markdown a single # is for the title of the whole.
HEADINGS = {f"h{level}": "#" * (level + 1) + " " for level in range(1, 7)}
UNSEEN = (
    "audio base canvas datalist embed iframe link meta noembed object script style svg template "
    "video".split()
)
UNSEEN_STYLE = re.compile(r"display\s*:\s*none|visibility\s*:\s*(hidden|collapse)", re.IGNORECASE)
STRUCK = ("del", "s", "strike")
ONE_TERM = re.compile(r"[-−+]?[\w.,]+")  # needs no brackets around it
ORDINALS = ("st", "nd", "rd", "th", "er", "e")
SMALL_CELL = 30  # elements below a table cell that is written in one line


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
    for element in list(root.iter()):
        if _is_hidden(element):
            element.drop_tree()
    for formula in list(root.iter("math")):
        source = formula.get("alttext") or formula.findtext(".//annotation")
        source = source or " ".join(formula.itertext())
        formula.clear(keep_tail=True)
        formula.text = f" {source} "
    page = _Page()
    for event, element in etree.iterwalk(root, events=("start", "end")):
        if event == "start":
            page.begin(element)
        else:
            page.end(element)
    return "\n".join(page.lines).strip("\n")


def declared_codec(raw: bytes) -> str | None:
    """Python's name of the encoding that a page declares; None if it declares none."""
    import webencodings

    start = COMMENT.sub(b"", raw[:4096])
    labels = [label.decode("ascii") for form in DECLARATIONS for label in form.findall(start)]
    encoding = next(filter(None, map(webencodings.lookup, labels)), None)
    return encoding and DECODERS.get(encoding.name, encoding.codec_info.name)


def _is_hidden(element) -> bool:
    """Whether a reader does not see an element. KaTeX draws a formula once more beside it."""
    if element.getparent() is None or element.tag == "body":
        return False
    style = element.get("style", "")
    drawn = element.get("class") == "katex-html"
    return drawn or "hidden" in element.attrib or bool(UNSEEN_STYLE.search(style))


class _Page:
    """Collects the lines of a page from a walk over its tree."""

    def __init__(self):
        self.lines: list[str] = []
        self.line: list[str] = []  # pieces of the line that is being collected
        self.pre = 0  # depth of <pre> elements
        self.small_cells: list[bool] = []  # for each open table cell, whether it fits one line
        self.closing: list[str] = []  # what closes each open element

    def add(self, text: str) -> None:
        if not self.pre:
            self.line.append(text)
            return
        first, *others = text.split("\n")
        self.line.append(first)
        for other in others:
            self.lines.append("".join(self.line).rstrip())
            self.line = [other]

    def break_line(self) -> None:
        if self.small_cells and self.small_cells[-1] and not self.pre:
            self.line.append(" ")
            return
        line = "".join(self.line)
        self.line = []
        line = line.rstrip() if self.pre else " ".join(line.split())
        if line.strip("#| "):
            self.lines.append(line)

    def begin(self, element) -> None:
        tag = element.tag
        if tag in BLOCKS:
            self.break_line()
        if tag in HEADINGS:
            self.line.append(HEADINGS[tag])
        elif tag == "pre":
            self.pre += 1
        elif tag in ("td", "th"):
            before = element.getprevious()
            if before is not None and before.tag in ("td", "th"):
                self.line.append(" | ")
            below = list(itertools.islice(element.iter(), SMALL_CELL + 1))
            nested = any(inner.tag == "table" for inner in below)
            self.small_cells.append(len(below) <= SMALL_CELL and not nested)
        elif tag == "img" and element.get("alt", "").strip():
            self.line.append(f" [image: {element.get('alt')}] ")
        opens, closes = self.marks(element)
        self.line.append(opens)
        self.closing.append(closes)
        text = element.text or ""
        self.add(text.removeprefix("\n") if tag == "pre" else text)  # HTML drops it

    def end(self, element) -> None:
        tag = element.tag
        self.line.append(self.closing.pop())
        if tag in ("td", "th"):
            self.small_cells.pop()
        if tag in BLOCKS:
            self.break_line()
        if tag == "pre":
            self.pre -= 1
        self.add(element.tail or "")

    def marks(self, element) -> tuple[str, str]:
        """What opens and what closes raised, lowered and struck text; H2O and 19th need none."""
        if element.tag in STRUCK:
            return "~~", "~~"
        if element.tag not in ("sup", "sub"):
            return "", ""
        text = "".join(itertools.islice(element.itertext(), 20)).strip()
        before = "".join(self.line[-3:])[-1:]
        follows = (element.tail or "")[:1]
        footnote = not text or text[0] in "[*†‡" or text.lower() in ORDINALS
        atoms = element.tag == "sub" and text.isdigit() and not before.isdigit()
        if footnote or (atoms and not follows.isdigit()):
            return "", ""
        sign = "^" if element.tag == "sup" else "_"
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
