"""Bytes of a file -> its text. HTML and PDF, which strangers write, are read in a child process.

Both formats allow files of a few kilobytes that keep a parser busy for hours or take all the
memory. So this file, run as a child, limits its own processor time, memory and output, and the
text itself: to MOST_CHARACTERS, and to EXPANSION characters for every byte of the file. As a child
it imports nothing of the project.

HTML is read by lxml, which knows real pages; webencodings knows what their names of encodings mean
to browsers; PDF is read by pypdf. All are small, well kept and optional:
pip install -r requirements-documents.txt

Facts must survive: "10<sup>28</sup>" becomes 10^28 and not 1028, an empty table cell leaves a bar,
struck text is marked, <pre> keeps its indentation. Dropped is what a reader of the page would not
see (hidden elements, scripts, templates), for there instructions to language models are hidden.
Only attributes and inline styles are looked at, no style sheets. Navigation and banners stay.

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
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

LIBRARIES = {"html": ("lxml", "webencodings"), "pdf": ("pypdf",)}
HOW_TO_INSTALL = "pip install -r requirements-documents.txt"
SECONDS = {"html": 20, "pdf": 60}  # of processor time, for one file
PATIENCE = 20  # so many times as long may pass on the clock, for the machine may be busy
MEMORY = 2 << 30  # bytes of address space
MOST_CHARACTERS = 20_000_000  # of one file's text
EXPANSION = 100  # characters for each byte of a file; compressed tables of numbers have ten
LONGEST_PAGE = 100_000  # characters of one page of a PDF; a newspaper's has 30,000
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
            child = subprocess.run(
                command,
                input=raw,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=PATIENCE * seconds,
            )
        except subprocess.TimeoutExpired:
            raise NotText(f"it takes more than {PATIENCE * seconds} s to read") from None
        except OSError as error:
            raise NotText(f"no process could be started to read it ({error.strerror})") from None
        if child.returncode == -signal.SIGXCPU:
            raise NotText(f"it takes more than {seconds} s of processor time to read")
        if child.returncode != 0:
            raise NotText(
                f"it is {kind.upper()} that cannot be read (damaged, locked, or too large)"
            )
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    if not text.strip():
        raise NotText("it holds no text")
    return text


def decode(raw: bytes, declared: str | None = None) -> str:
    """The characters: by the byte order mark, the declared codec, or a guess.

    The guess is UTF-8 if the bytes are, else windows-1252. NotText if the bytes are binary.
    """
    marks = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le"}
    marks[codecs.BOM_UTF16_BE] = "utf-16-be"
    for mark, codec in marks.items():
        if raw.startswith(mark):
            return raw[len(mark) :].decode(codec, "replace")
    if BINARY.search(raw[:4096]):
        raise NotText("it is binary, not text")
    if declared:
        return raw.decode(declared, "replace")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("cp1252", "replace")


# HTML --------------------------------------------------------------------------------------------

DECLARED = re.compile(
    rb"(?:charset|<\?xml[^>]{0,200}encoding)\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE
)
BLOCKS = frozenset(
    "address article aside blockquote body br button caption dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav "
    "ol optgroup option p pre section summary table tbody tfoot thead title tr ul".split()
)
# One # more than the level: a single # stands before the title of a whole document.
HEADINGS = {f"h{level}": "#" * (level + 1) + " " for level in range(1, 7)}
UNSEEN = frozenset(
    "audio base canvas datalist embed iframe link meta noembed object script style svg template "
    "video".split()
)
UNSEEN_STYLE = re.compile(r"display\s*:\s*none|visibility\s*:\s*(hidden|collapse)", re.IGNORECASE)
SCRIPT_STYLE = re.compile(r"vertical-align\s*:\s*su(b|per)\b", re.IGNORECASE)
ONE_TERM = re.compile(r"[-−+]?[\w.,]+|[^\w\s]|\([^()]*\)|")  # needs no brackets around it
ORDINALS = ("st", "nd", "rd", "th", "er", "e")
SMALL_CELL = 30  # elements below a table cell that is written in one line
MOST_BARS = 20  # before one cell


def html_to_text(raw: bytes | str) -> str:
    """The text of a page as its reader sees it, one line a block.

    `## ` stands before headings, `|` between the cells of a row, `^` before what is raised, `_`
    before what is lowered, `~~` around what is struck.
    """
    from lxml import etree

    html = raw if isinstance(raw, str) else decode(raw, declared_codec(raw))
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
    text = _Page(etree, root).text()
    if any("Excessive depth" in entry.message for entry in parser.error_log):
        text += "\n[The rest of this page is nested too deeply to be read.]"
    return text


def declared_codec(raw: bytes) -> str | None:
    """Python's name of the encoding that a page declares; None if it declares none."""
    import webencodings

    declared = DECLARED.search(raw[:4096])
    encoding = declared and webencodings.lookup(declared[1].decode("ascii", "replace"))
    if not encoding:
        return None
    if encoding.name.startswith("utf-16"):
        return "utf-8"  # bytes that declare themselves in ASCII cannot be UTF-16
    return encoding.codec_info.name


@dataclass
class _Table:
    """Where the next cell of an open table stands, and the columns that cells from above fill."""

    column: int = 0
    bars: int = 0  # written in this row
    below: dict[int, int] = field(default_factory=dict)  # column -> rows, this one included


class _Page:
    """Walks over a page's tree, without recursion, and collects its lines."""

    def __init__(self, etree, root):
        self.lines: list[str] = []
        self.line: list[str] = []  # pieces of the line that is being collected
        self.pre = 0  # depth of <pre> elements
        self.tables: list[_Table] = []
        self.small_cells: list[bool] = []  # for each open table cell, whether it fits one line
        self.marked: list[tuple] = []  # open elements with a mark: (element, what closes it, apart)
        self.apart = None  # str.isalnum, str.isdigit: what comes next then stands apart
        self.has_formulas = root.find(".//math") is not None
        skipped = False  # the element whose end comes next
        walk = etree.iterwalk(root, events=("start", "end", "comment", "pi"))
        for event, element in walk:
            if event == "start":
                skipped = element.tag == "math" or not self.is_shown(element)
                if element.tag == "math":
                    self.formula(element)
                if skipped:
                    walk.skip_subtree()
                else:
                    self.begin(element)
                continue
            if event == "end" and not skipped:
                self.end(element)
            if event == "end":
                skipped = False
            if element is not root:
                self.add(element.tail)

    def text(self) -> str:
        self.break_line()
        return "\n".join(self.lines).strip("\n")

    def add(self, text: str | None) -> None:
        if not text:
            return
        if self.apart and self.apart(text[0]):
            self.line.append(" ")
        self.apart = None
        if not self.pre:
            self.line.append(text)
            return
        first, *others = text.replace("\r\n", "\n").split("\n")
        self.line.append(first)
        for other in others:
            self.lines.append("".join(self.line).rstrip())
            self.line = [other]

    def last(self) -> str:
        """The last character of the line so far."""
        return self.line[-1][-1:] if self.line else ""

    def break_line(self) -> None:
        self.apart = None
        if any(self.small_cells[-1:]) and not self.pre:
            self.line.append(" ")
            return
        line = "".join(self.line)
        self.line = []
        line = line.rstrip() if self.pre else " ".join(line.split())
        if line.strip("#| "):
            self.lines.append(line)

    def is_shown(self, element) -> bool:
        if element.tag in ("html", "body"):
            return True
        if element.tag in UNSEEN or element.get("hidden", "until-found") != "until-found":
            return False
        if UNSEEN_STYLE.search(element.get("style", "")[:1000]):
            return self.has_formulas and element.find(".//math") is not None
        if self.has_formulas and element.get("aria-hidden") == "true":
            # The picture of a formula, which stands beside as MathML.
            return element.getparent().find(".//math") is None
        return True

    def begin(self, element) -> None:
        tag = element.tag
        if tag in BLOCKS:
            self.break_line()
        if tag in HEADINGS:
            self.line.append(HEADINGS[tag])
        elif tag == "pre":
            self.pre += 1
        elif tag == "table":
            self.tables.append(_Table())
        elif tag == "tr" and self.tables:
            rows = self.tables[-1].below.items()
            self.tables[-1] = _Table(below={column: n - 1 for column, n in rows if n > 1})
        elif tag in ("td", "th"):
            self.begin_cell(element)
        elif tag == "img" and element.get("alt", "").strip():
            self.line.append(f" [image: {element.get('alt')}] ")
        opens, closes, apart = self.mark(element)
        if opens or apart:
            self.line.append(opens)
            self.marked.append((element, closes, apart))
        text = element.text
        if tag == "pre" and text:
            text = text.removeprefix("\n")  # HTML does not count this one
        self.add(text)

    def begin_cell(self, cell) -> None:
        below = list(itertools.islice(cell.iter(), SMALL_CELL + 1))
        small = len(below) <= SMALL_CELL and not any(element.tag == "table" for element in below)
        self.small_cells.append(small)
        if not self.tables:
            return
        table = self.tables[-1]
        while table.column in table.below:
            table.column += 1
        bars = min(table.column - table.bars, MOST_BARS)
        if bars:
            self.line.append(" |" * bars + " ")
        table.bars = table.column
        columns = min(_span(cell, "colspan"), MOST_BARS)
        rows = _span(cell, "rowspan")
        if rows > 1:
            table.below |= dict.fromkeys(range(table.column, table.column + columns), rows)
        table.column += columns

    def end(self, element) -> None:
        tag = element.tag
        if self.marked and self.marked[-1][0] is element:
            _, closes, self.apart = self.marked.pop()
            self.line.append(closes)
        if tag in ("td", "th"):
            self.small_cells.pop()
        if tag in BLOCKS:
            self.break_line()
        if tag == "pre":
            self.pre -= 1
        if tag == "table":
            self.tables.pop()

    def mark(self, element) -> tuple:
        """(what opens it, what closes it, what then stands apart) for raised, lowered, struck text.

        2<sup>n</sup>k is not 2^nk, and log<sub>10</sub>5 is not log105.
        """
        none = "", "", None
        style = element.get("style", "")[:1000]
        found = SCRIPT_STYLE.search(style)
        struck = element.tag in ("del", "s", "strike") or "line-through" in style
        raised = element.tag == "sup" or (found and found[1] == "per")
        if not (struck or raised or found or element.tag == "sub"):
            return none
        text = "".join(itertools.islice(element.itertext(), 20)).strip()
        before = self.last()
        if not text or before in ("^", "_"):  # marked already
            return none
        if struck:
            return "~~", "~~", None
        if raised:
            if text[0] in "[*†‡" or text.lower() in ORDINALS:
                return none
            following = next(element.itersiblings("*"), None)
            is_fraction = following is not None and following.tag == "sub"
            if is_fraction and (element.tail or "").strip() in ("/", "⁄"):
                return " ", "", None  # 3<sup>1</sup>/<sub>2</sub> is three and a half
            sign = "^"
        else:
            if not before.isalnum() and before not in (")", "]"):
                return none
            if not before.isdigit() and text.isdigit():
                return "", "", str.isdigit  # H2O
            sign = "_"
        if ONE_TERM.fullmatch(text):
            return sign, "", str.isalnum
        return f"{sign}(", ")", str.isalnum

    def formula(self, element) -> None:
        if self.last().isalnum():
            self.apart = str.isalnum
        self.add(_formula(element))
        self.apart = str.isalnum


def _span(cell, name: str) -> int:
    text = cell.get(name, "").strip()
    return int(text) if re.fullmatch(r"[1-9]\d{0,3}", text) else 1


def _formula(math) -> str:
    """MathML on one line: 10^28, x_i^2, (a+b)/2, √(x+1), [1, 2; 3, 4]."""
    written = {}  # of each element whose parent has not been written yet
    for element in reversed(list(math.iter("*"))):
        parts = [written.pop(child) for child in element.iterchildren("*")]
        texts = [element.text or ""]
        parts_left = iter(parts)
        for child in element:
            texts += [next(parts_left) if isinstance(child.tag, str) else "", child.tail or ""]
        written[element] = _written(element.tag, element, parts, texts)
    return re.sub("[\u2061-\u2064]", " ", written[math]).strip()


def _written(tag: str, element, parts: list[str], texts: list[str]) -> str:
    terms = [part if ONE_TERM.fullmatch(part) else f"({part})" for part in parts]
    if tag in ("mn", "mi", "mo", "mtext"):
        return " ".join("".join(texts).split())
    if tag in ("annotation", "annotation-xml", "mphantom"):
        return ""
    if tag in ("msup", "mover") and len(terms) == 2:
        return _scripts(terms[0], "", terms[1])
    if tag in ("msub", "munder") and len(terms) == 2:
        return _scripts(terms[0], terms[1], "")
    if tag in ("msubsup", "munderover") and len(terms) == 3:
        return _scripts(*terms)
    if tag == "mmultiscripts" and terms:
        return _multiscripts(element, terms)
    if tag == "mfrac" and len(terms) == 2:
        if element.get("linethickness") == "0":
            return f"({parts[0]} over {parts[1]})"
        return f"{terms[0]}/{terms[1]}"
    if tag == "mroot" and len(terms) == 2:
        return f"{terms[0]}^(1/{terms[1]})"
    if tag == "mtable":
        return f"[{'; '.join(parts)}]"
    if tag in ("mtr", "mlabeledtr"):
        return ", ".join(parts)
    row = ""
    for text in texts:
        text = " ".join(text.split())
        script = re.search(r"[\^_/√]", row) and text[:1].isalnum()
        if row[-1:].isalnum() and (script or text[:1].isdigit()):
            row += " "  # the 3 and 1/2 of three and a half
        row += text
    if tag == "msqrt":
        return f"√{row}" if ONE_TERM.fullmatch(row) else f"√({row})"
    return " " if tag == "mspace" else row


def _scripts(base: str, lower: str, upper: str) -> str:
    return base + (lower and f"_{lower}") + (upper and f"^{upper}")


def _multiscripts(element, terms: list[str]) -> str:
    """Pairs of a lower and an upper script behind the base; after <mprescripts>, before it."""
    tags = [child.tag for child in element.iterchildren("*")]
    split = tags.index("mprescripts") if "mprescripts" in tags else len(tags)
    behind = zip(terms[1:split:2], terms[2:split:2], strict=False)
    before = zip(terms[split + 1 :: 2], terms[split + 2 :: 2], strict=False)
    ahead = "".join(_scripts("", lower, upper) for lower, upper in before)
    base = f"{ahead} {terms[0]}" if ahead else terms[0]
    return base + "".join(_scripts("", lower, upper) for lower, upper in behind)


# PDF ---------------------------------------------------------------------------------------------


def pdf_to_text(raw: bytes, most: int) -> str:
    """The text of a PDF's pages, a form feed between two of them; little more than `most` of it."""
    import pypdf

    logging.disable()  # pypdf reports every small fault of a file
    reader = pypdf.PdfReader(io.BytesIO(raw), strict=False)
    if reader.is_encrypted:
        reader.decrypt("")  # many files are locked with an empty password
    pages = []
    for page in reader.pages:
        text = page.extract_text().replace("\f", "\n")
        if len(text) > LONGEST_PAGE:
            text = f"{text[:LONGEST_PAGE]}\n{CUT}"
        pages.append(text)
        most -= len(text)
        if most < 0:
            break
    return "\f".join(pages)


# The child ---------------------------------------------------------------------------------------


def limit(what: int, most: int) -> None:
    """Sets a limit of this process, or keeps a lower one that holds already."""
    ceiling = resource.getrlimit(what)[1]
    if ceiling == resource.RLIM_INFINITY:
        ceiling = most + 1  # at `most` comes a signal of its own, above it SIGKILL
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit address space
        resource.setrlimit(what, (min(most, ceiling), ceiling))


def main(kind: str, seconds: int) -> None:
    limit(resource.RLIMIT_CPU, seconds)
    limit(resource.RLIMIT_AS, MEMORY)
    limit(resource.RLIMIT_FSIZE, 4 * MOST_CHARACTERS + 100)
    limit(resource.RLIMIT_CORE, 0)
    raw = sys.stdin.buffer.read()
    most = min(MOST_CHARACTERS, EXPANSION * len(raw))
    text = html_to_text(raw) if kind == "html" else pdf_to_text(raw, most)
    if len(text) > most:
        text = f"{text[:most]}\n{CUT}"
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
