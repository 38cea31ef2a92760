"""Reads an HTML page or a PDF on standard input and prints its text.

It runs as a child process with limits. Strangers write what is read here, and both formats allow
files of a few kilobytes that keep a parser busy for hours or take all the memory. So the parent
(tools/pages.py) sets a deadline, and this file limits its own processor time and memory. It imports
nothing of the project.

HTML is read by lxml. Facts must survive: "10<sup>28</sup>" becomes 10^28 and not 1028, an empty
table cell leaves a bar, <pre> keeps its indentation and its empty lines. What a reader of the page
would not see (hidden elements, scripts, templates) is dropped, for there instructions to language
models are hidden. Only attributes and inline styles are looked at, no style sheets. Navigation,
footers and cookie banners are dropped too, unless the page consists of nothing else.

PDF is read by pypdf: the text of the pages, with a form feed between two of them.

    python tools/reader.py html|pdf < FILE

Tests: pytest tests/test_documents.py
"""

import contextlib
import io
import itertools
import logging
import re
import resource
import sys

SECONDS = {"html": 10, "pdf": 50}  # of processor time
MEMORY = 2 << 30  # bytes of address space
MOST_CHARACTERS = 20_000_000  # of one file's text


# HTML --------------------------------------------------------------------------------------------

BLOCKS = frozenset(
    "address article aside blockquote body br button caption dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav "
    "ol optgroup option p pre section summary table tbody tfoot thead title tr ul".split()
)
# One # more than the level: a single # stands before the title of a whole document.
HEADINGS = {f"h{level}": "#" * (level + 1) + " " for level in range(1, 7)}
UNSEEN = frozenset(
    "audio base canvas datalist embed iframe link meta noembed noframes object script style svg "
    "template video".split()
)
UNSEEN_STYLE = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*(hidden|collapse)"
    r"|(opacity|font-size)\s*:\s*0*(\.0+)?(px|em|rem|pt|%)?\s*(;|!|$)",
    re.IGNORECASE,
)
BOILERPLATE_ROLES = frozenset("navigation contentinfo dialog alertdialog menu menubar".split())
COOKIE_BANNER = re.compile(
    r"(cookie|gdpr|consent)[-_]?(banner|notice|bar|popup|modal|overlay)", re.IGNORECASE
)
BEFORE_SECOND = {"msup": "^", "msub": "_", "mfrac": "/"}  # MathML: the sign between two children
SMALL_CELL = 30  # elements below a table cell that is written in one line
MOST_BARS = 20  # for a cell that spans many columns


def html_to_text(html: str) -> str:
    """The text of a page as its reader sees it, one line a block.

    `## ` stands before headings, `|` between the cells of a row, `^` before what is raised.
    """
    from lxml import etree

    # The encoding that an XML declaration names is no longer true.
    html = re.sub(r"\A\s*<\?xml[^>]*>", "", html)
    html = html.replace("\0", "\N{REPLACEMENT CHARACTER}")
    parser = etree.HTMLParser(encoding="utf-8", huge_tree=True, no_network=True)
    try:
        root = etree.fromstring(html.encode("utf-8", "replace"), parser)
    except (etree.ParserError, etree.XMLSyntaxError):
        root = None
    if root is None:  # a page without any element
        return ""
    text = _Lines(etree, root, without_boilerplate=True).text()
    if not text:
        text = _Lines(etree, root, without_boilerplate=False).text()
    if any("Excessive depth" in entry.message for entry in parser.error_log):
        text += "\n[The rest of this page is nested too deeply to be read.]"
    return text


class _Lines:
    """Walks over a page's tree, without recursion, and collects its lines."""

    def __init__(self, etree, root, without_boilerplate: bool):
        self.lines: list[str] = []
        self.line: list[str] = []  # pieces of the line that is being collected
        self.pre = 0  # depth of <pre> elements
        self.small_cells: list[bool] = []  # for each open table cell, whether it fits one line
        self.without_boilerplate = without_boilerplate
        walk = etree.iterwalk(root, events=("start", "end", "comment", "pi"))
        for event, element in walk:
            if event == "start":
                if self.is_shown(element):
                    self.begin(element)
                else:
                    walk.skip_subtree()
                continue
            if event == "end":
                self.end(element)
            if element is not root:
                self.add(element.tail)

    def text(self) -> str:
        self.break_line()
        return "\n".join(self.lines).strip("\n")

    def add(self, text: str | None) -> None:
        if not text:
            return
        if not self.pre:
            self.line.append(text)
            return
        first, *others = text.replace("\r\n", "\n").split("\n")
        self.line.append(first)
        for other in others:
            self.lines.append("".join(self.line).rstrip())
            self.line = [other]

    def break_line(self) -> None:
        if any(self.small_cells[-1:]) and not self.pre:
            self.line.append(" ")
            return
        line = "".join(self.line)
        self.line = []
        if self.pre:
            line = line.rstrip()
        else:
            line = " ".join(line.split())
        if line.strip("#| "):
            self.lines.append(line)

    def is_shown(self, element) -> bool:
        if element.tag in UNSEEN or element.get("hidden") is not None:
            return False
        if element.get("aria-hidden") == "true":
            return False
        if UNSEEN_STYLE.search(element.get("style", "")[:1000]):
            return False
        return not (self.without_boilerplate and _is_boilerplate(element))

    def begin(self, element) -> None:
        tag = element.tag
        if tag in BLOCKS:
            self.break_line()
        if tag in HEADINGS:
            self.line.append(HEADINGS[tag])
        elif tag == "pre":
            self.pre += 1
        elif tag in ("td", "th"):
            self.line.append(_bars(element))
            self.small_cells.append(_is_small(element))
        elif tag == "img" and element.get("alt", "").strip():
            self.line.append(f" [image: {element.get('alt')}] ")
        elif tag == "sup" and not _is_ordinal_or_note(element):
            self.line.append("^")
        self.line.append(_sign_before(element))
        text = element.text
        if tag == "pre" and text:
            text = text.removeprefix("\n")  # HTML does not count this one
        self.add(text)

    def end(self, element) -> None:
        tag = element.tag
        if tag in ("td", "th") and self.small_cells:
            self.small_cells.pop()
        if tag in BLOCKS:
            self.break_line()
        if tag == "pre":
            self.pre = max(self.pre - 1, 0)
        tail = element.tail or ""
        if tag == "sup" and tail[:1].isalnum():
            self.line.append(" ")  # 2<sup>n</sup>k is not 2^nk
        if tag == "sub" and tail[:1].isdigit():
            self.line.append(" ")  # log<sub>10</sub>5 is not log105


def _is_boilerplate(element) -> bool:
    if element.tag in ("nav", "footer") or element.get("role") in BOILERPLATE_ROLES:
        return True
    names = f"{element.get('id', '')} {element.get('class', '')}"
    return COOKIE_BANNER.search(names[:1000]) is not None


def _bars(cell) -> str:
    """The bars before a table cell: as many as the cell before it spans columns."""
    before = cell.getprevious()
    if before is None:
        return ""
    span = before.get("colspan", "1").strip()
    columns = int(span) if re.fullmatch(r"[1-9]\d?", span) else 1
    return " |" * min(columns, MOST_BARS) + " "


def _is_small(cell) -> bool:
    below = list(itertools.islice(cell.iter(), SMALL_CELL + 1))
    return len(below) <= SMALL_CELL and not any(element.tag == "table" for element in below)


def _is_ordinal_or_note(sup) -> bool:
    """Whether raised text stays as it is: the th of 19th, the [2] of a reference."""
    text = "".join(itertools.islice(sup.itertext(), 5)).strip()
    return not text or text[0] in "[(*†‡" or text.lower() in ("st", "nd", "rd", "th", "er", "e")


def _sign_before(element) -> str:
    """The sign that MathML leaves out before the second child of a power, an index, a fraction."""
    parent = element.getparent()
    before = element.getprevious()
    is_second = before is not None and before.getprevious() is None
    if parent is None or not is_second:
        return ""
    return BEFORE_SECOND.get(parent.tag, "")


# PDF ---------------------------------------------------------------------------------------------


def pdf_to_text(raw: bytes) -> str:
    """The text of a PDF's pages, a form feed between two of them."""
    import pypdf

    logging.disable()  # pypdf reports every small fault of a file
    reader = pypdf.PdfReader(io.BytesIO(raw), strict=False)
    if reader.is_encrypted:
        reader.decrypt("")  # many files are locked with an empty password
    pages = []
    total = 0
    for page in reader.pages:
        pages.append(page.extract_text().replace("\f", "\n"))
        total += len(pages[-1])
        if total > MOST_CHARACTERS:
            break
    return "\f".join(pages)


def limit(what: int, most: int) -> None:
    """Sets a limit of this process, or keeps a lower one that holds already."""
    ceiling = resource.getrlimit(what)[1]
    if ceiling != resource.RLIM_INFINITY:
        most = min(most, ceiling)
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit address space
        resource.setrlimit(what, (most, most))


def main(kind: str) -> None:
    limit(resource.RLIMIT_CPU, SECONDS[kind])
    limit(resource.RLIMIT_AS, MEMORY)
    limit(resource.RLIMIT_CORE, 0)
    raw = sys.stdin.buffer.read()
    if kind == "html":
        text = html_to_text(raw.decode("utf-8", "replace"))
    else:
        text = pdf_to_text(raw)
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


if __name__ == "__main__":
    main(sys.argv[1])
