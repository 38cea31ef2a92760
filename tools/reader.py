"""Reads the text of a file. All but plain text is parsed by a child process.

A file of a few kilobytes can keep a parser busy for hours or fill the memory. So this file runs as
a child that limits its own processor time, memory and output. It imports nothing of the project.

lxml parses HTML, webencodings maps encoding names as browsers do, pypdf parses PDF, and markitdown
Word files and slides. All are optional: pip install -r requirements-documents.txt

The text keeps the page's facts: "10<sup>28</sup>" becomes 10^28 and not 1028, an empty table cell
leaves a bar, struck text is marked, <pre> keeps its indentation, and a formula becomes its source.
Elements that a browser does not show (hidden ones, scripts, templates) are dropped, because they
may hold instructions to language models. A formula's source is the exception. The reader checks
attributes and inline styles, but no style sheets. Navigation and banners stay.

    python tools/reader.py html|pdf|docx|pptx SECONDS < FILE

Tests: pytest tests/test_documents.py
"""

import codecs
import contextlib
import importlib.util
import io
import itertools
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile

LIBRARIES = {"html": ("lxml", "webencodings"), "pdf": ("pypdf",)}
LIBRARIES |= {"docx": ("markitdown", "mammoth"), "pptx": ("markitdown", "pptx")}
HOW_TO_INSTALL = "pip install -r requirements-documents.txt"
SECONDS = {"html": 20, "pdf": 60, "docx": 60, "pptx": 60}  # of processor time, for one file
PATIENCE = 20  # the child's limit of wall-clock time, as a multiple of its processor time
MEMORY = 2 << 30  # bytes of address space
MOST_CHARACTERS = 10_000_000  # the limit of one file's text; a long book has three million
CUT = "[The rest of this file is too long to be read.]"
CANNOT_WRITE = 3  # the child's exit code on a full disk
BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")  # browsers use the same test


class NotText(ValueError):
    """The bytes hold no readable text. The message says why and quotes nothing of the file."""


def missing(kind: str) -> str | None:
    """What to install to read the kind ("text" or a key of LIBRARIES); None: it can be read."""
    for library in LIBRARIES.get(kind, ()):
        if not importlib.util.find_spec(library):
            return f"{kind.upper()} is read by {library}, which is not installed: {HOW_TO_INSTALL}"
    return None


def read(raw: bytes, kind: str) -> str:
    """The text of `raw`. kind: "text", or a key of LIBRARIES. Raises NotText if there is none.

    OSError if this machine lacks memory or room on its disk, which says nothing about the file.
    """
    if kind == "text":
        return decode(raw)
    if problem := missing(kind):
        raise NotText(problem)
    seconds = SECONDS[kind]
    command = [sys.executable, "-P", __file__, kind, str(seconds)]
    options = {"input": raw, "stderr": subprocess.DEVNULL, "timeout": PATIENCE * seconds}
    with tempfile.TemporaryFile() as output:  # a file, whose size can be limited
        try:
            subprocess.run(command, stdout=output, check=True, **options)
        except subprocess.SubprocessError as error:
            # The kernel kills a child when the machine's memory is used up.
            if getattr(error, "returncode", None) in (CANNOT_WRITE, -signal.SIGKILL):
                raise OSError("the machine lacks memory or disk space for it") from None
            raise NotText(f"{kind.upper()} that is damaged, locked or too large") from None
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    if not text.strip():
        raise NotText("it holds no text")
    return text


def decode(raw: bytes, declared: str | None = None) -> str:
    """Decodes text by its byte order mark, else as `declared`, else as UTF-8 or windows-1252.

    Damaged text counts as UTF-8 if at least half of its characters outside ASCII are valid. Raises
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
    with contextlib.suppress(UnicodeDecodeError):
        return raw.decode()
    text = raw.decode("utf-8", "replace")
    foreign = len(text) - len(text.encode("ascii", "ignore"))
    is_utf8 = 2 * text.count("\N{REPLACEMENT CHARACTER}") <= foreign
    return text if is_utf8 else raw.decode("cp1252", "replace")


# HTML --------------------------------------------------------------------------------------------

DECLARED = re.compile(
    rb"(?:charset|<\?xml[^>]{0,200}encoding)\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE
)
# Browsers decode these encodings differently from Python's codec of the same name. A page that
# declares UTF-16 in ASCII letters is not UTF-16.
DECODERS = {"gbk": "gb18030", "x-user-defined": "cp1252", "replacement": None}
DECODERS |= {"utf-16le": "utf-8", "utf-16be": "utf-8"}
BLOCKS = set(
    "address article aside blockquote body br button caption dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav "
    "ol optgroup option p pre section summary table tbody tfoot thead title tr ul".split()
)
CELLS = ("td", "th")
IN_CELL = "in-cell"  # a tag of our own for a block in a table cell that becomes one line
SMALL_CELL = 30  # a cell becomes one line if it has fewer elements than this and no table
UNSEEN = "audio base canvas datalist embed iframe link meta noembed noframes noscript".split()
UNSEEN += "object script style svg template video".split()
# An XPath of elements that a browser does not show, and of KaTeX's second copy of each formula.
HIDDEN = """//*[not(self::html or self::body)][@hidden or @class="katex-html" or
    self::dialog[not(@open)] or
    re:test(@style, "display\\s*:\\s*none|visibility\\s*:\\s*(hidden|collapse)", "i")]"""
REGEX = {"re": "http://exslt.org/regular-expressions"}
# Tag -> (mark before it, mark after it). A heading has one # more than its level, because in
# Markdown a single # marks the title of the whole text.
MARKS = {f"h{level}": ("#" * (level + 1) + " ", "") for level in range(1, 7)}
MARKS |= dict.fromkeys(("del", "s", "strike"), ("~~", "~~"))
ONE_TERM = re.compile(r"[-−+]?[\w.,]+")  # such an exponent or index needs no brackets
ORDINALS = ("st", "nd", "rd", "th", "er", "e")
# Placeholders for the white space of <pre> until the text is split into lines. No page holds \0,
# and hardly any page holds \1.
KEEP = str.maketrans({" ": "\0", "\t": "\1", "\n": "\0\n"})
RESTORE = str.maketrans({"\0": " ", "\1": "\t"})


def html_to_text(raw: bytes) -> str:
    """The visible text of a page, one line per block.

    `## ` is written before headings, `|` between the cells of a row, `^` before superscripts, `_`
    before subscripts, and `~~` around struck text.
    """
    import webencodings
    from lxml import etree
    from lxml.html import HTMLParser, document_fromstring

    declared = DECLARED.search(raw[:4096])
    encoding = declared and webencodings.lookup(declared[1].decode("ascii"))
    codec = encoding and DECODERS.get(encoding.name, encoding.codec_info.name)
    html = decode(raw, codec).replace("\0", "\N{REPLACEMENT CHARACTER}")
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
    lines = [line.translate(RESTORE).rstrip() for line in lines if line.strip("#| ")]
    return "\n".join(lines).strip("\n")


def _pieces(walk) -> list[str]:
    """The page's text and marks in order. Only "\\n" ends a line."""
    pieces = []
    end_marks = []  # one for each open element
    pre = 0  # depth of <pre> elements
    for event, element in walk:
        tag = element.tag
        edge = "\n" if tag in BLOCKS else " " if tag == IN_CELL else ""
        if event == "start":
            start_mark, end_mark = _marks(element, pieces)
            end_marks.append(end_mark)
            pieces += edge, start_mark
            pre += tag == "pre"
            text = (element.text or "").removeprefix("\n" if tag == "pre" else "")  # HTML drops it
            if tag == "math":
                text = element.get("alttext") or element.findtext(".//annotation")
                text = f" {text or ' '.join(element.itertext())} "
                walk.skip_subtree()
        else:
            pieces += end_marks.pop(), edge
            pre -= tag == "pre"
            text = element.tail or ""
        pieces.append(text.translate(KEEP) if pre else text.replace("\n", " "))
    return pieces


def _marks(element, pieces: list[str]) -> tuple[str, str]:
    """(mark before the element, mark after it). pieces: the text before it."""
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
    after = (element.tail or "")[:1]
    note_or_ordinal = not text or text[0] in "[*†‡" or (tag == "sup" and text.lower() in ORDINALS)
    formula = tag == "sub" and text.isdigit() and not before.isdigit()  # H2O needs no mark
    if note_or_ordinal or (formula and not after.isdigit()):
        return "", ""
    sign = "^" if tag == "sup" else "_"
    if ONE_TERM.fullmatch(text) and not after.isalnum():
        return sign, ""
    return f"{sign}(", ")"


# PDF ---------------------------------------------------------------------------------------------


def pdf_to_text(raw: bytes) -> str:
    """The text of a PDF's pages, separated by form feeds."""
    import pypdf

    logging.disable()  # pypdf logs every small fault of a file
    reader = pypdf.PdfReader(io.BytesIO(raw), strict=False)
    if reader.is_encrypted:
        reader.decrypt("")  # many files are locked with an empty password
    return "\f".join(page.extract_text().replace("\f", "\n") for page in reader.pages)


# Word files and slides ---------------------------------------------------------------------------


def office_to_text(raw: bytes, kind: str) -> str:
    """The text of a Word file ("docx") or of slides ("pptx"), which form feeds separate."""
    from markitdown import StreamInfo, converters

    converter = getattr(converters, f"{kind.title()}Converter")()
    text = converter.convert(io.BytesIO(raw), StreamInfo(extension=f".{kind}")).markdown
    return re.sub(r"\s*<!-- Slide number: \d+ -->\s*", "\f", text).removeprefix("\f")


# The child ---------------------------------------------------------------------------------------


def main(kind: str, seconds: int) -> None:
    limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_AS: MEMORY, resource.RLIMIT_CORE: 0}
    limits[resource.RLIMIT_FSIZE] = 4 * MOST_CHARACTERS + 100  # bytes in UTF-8, with CUT
    for limit, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set, or macOS has none
            # SIGKILL follows a second after the soft limit of processor time.
            resource.setrlimit(limit, (most, most + 1))
    raw = sys.stdin.buffer.read()
    readers = {"html": html_to_text, "pdf": pdf_to_text}
    text = readers[kind](raw) if kind in readers else office_to_text(raw, kind)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}\n{CUT}"
    try:
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.flush()
    except OSError:
        os._exit(CANNOT_WRITE)  # Python would try again, and end with another code


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
