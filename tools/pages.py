"""Bytes of a page or a file -> text: what kind it is, and which characters its bytes mean.

HTML and PDF are read by tools/reader.py in a child process, because strangers write them.

HTML is read by lxml, which is small (one wheel, no dependency), has been well kept for twenty years
and knows real pages. Parsers that build the full tree of the HTML5 standard are easier to kill:
there one megabyte can ask for billions of elements. trafilatura would bring 16 packages. PDF is
read by pypdf, which is plain Python without dependencies. Both packages are optional:
pip install -r requirements-documents.txt

Tests: pytest tests/test_documents.py
"""

import codecs
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from tools import ToolError

HOW_TO_INSTALL = "pip install -r requirements-documents.txt"
SECONDS = {"html": 20, "pdf": 60}  # for one file
LONG = 1 << 20  # bytes
READER = Path(__file__).with_name("reader.py").resolve()


class NotText(ValueError):
    """The bytes hold no text that can be read; the message says why, in our own words."""


def missing(kind: str) -> str | None:
    """None if a kind ("html", "pdf", "text") can be read here, else what to install."""
    library = {"html": "lxml", "pdf": "pypdf"}.get(kind)
    if library is None or importlib.util.find_spec(library):
        return None
    return f"{kind.upper()} is read by {library}, which is not installed: {HOW_TO_INSTALL}"


def page_text(raw: bytes, headers) -> str:
    """The text of a fetched page. ToolError if its kind holds none, ValueError if it is empty."""
    encoding = str(headers.get("Content-Encoding") or "").strip().lower()
    if encoding in ("gzip", "x-gzip", "deflate", "br", "zstd", "compress"):
        raise ToolError("the page is compressed, which was not asked for")
    content_type = str(headers.get("Content-Type") or "")
    try:
        text = read(raw, kind_of(raw, content_type), charset_in(content_type))
    except NotText as error:
        raise ToolError(str(error)) from None
    if not text.strip():
        raise ValueError("the page holds no text")
    return text


def kind_of(raw: bytes, content_type: str) -> str:
    """ "html", "pdf" or "text"; NotText for all else.

    Without a telling Content-Type the bytes decide.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if raw.startswith(b"%PDF-") or kind == "application/pdf":
        return "pdf"
    if "html" in kind:
        return "html"
    if kind in ("", "application/octet-stream", "application/xml", "text/xml"):
        begins_as_html = rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+)?html"
        return "html" if re.match(begins_as_html, raw[:2048], re.I | re.S) else "text"
    if kind.startswith("text/") or "json" in kind:
        return "text"
    raise NotText("it is neither text, HTML nor PDF")


def read(raw: bytes, kind: str, charset: str = "") -> str:
    """The text of `raw`. charset: as declared beside the bytes. NotText if it cannot be read."""
    lacking = missing(kind)
    if lacking:
        raise NotText(lacking)
    if kind == "pdf":
        return read_in_child("pdf", raw)
    text = decode(raw, charset)
    if kind == "html":
        return read_in_child("html", text.encode("utf-8", "replace"))
    return text


# Characters --------------------------------------------------------------------------------------

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")  # as browsers tell binary from text
# The web's names of encodings (WHATWG), where they mean something else to Python, or nothing.
# Browsers read latin-1 as windows-1252, and gb2312 as gb18030, and pages are written for browsers.
CODECS = {
    "cp1252": "iso-8859-1 iso8859-1 iso88591 latin1 latin-1 l1 ascii us-ascii cp1252 x-cp1252 "
    "windows-1252 ansi_x3.4-1968 cp819",
    "cp1254": "iso-8859-9 iso8859-9 latin5 windows-1254 x-cp1254",
    "cp874": "tis-620 iso-8859-11 dos-874 windows-874",
    "gb18030": "gb2312 gb_2312-80 gbk x-gbk gb18030 chinese csgb2312 cp936",
    "big5hkscs": "big5 big5-hkscs x-x-big5 cn-big5",
    "cp932": "shift_jis shift-jis sjis x-sjis ms_kanji windows-31j ms932",
    "euc_jp": "euc-jp x-euc-jp",
    "iso2022_jp": "iso-2022-jp csiso2022jp",
    "cp949": "euc-kr ks_c_5601-1987 ks_c_5601-1989 ksc5601 ksc_5601 korean windows-949 cseuckr",
    "cp866": "ibm866 cp866 866",
    "koi8_r": "koi8-r koi8 koi cskoi8r",
    "koi8_u": "koi8-u koi8-ru",
    "mac_roman": "macintosh mac x-mac-roman",
    "mac_cyrillic": "x-mac-cyrillic x-mac-ukrainian",
    "iso8859_8": "iso-8859-8 iso-8859-8-i logical visual",
    "utf-16-le": "utf-16 utf-16le unicode ucs-2 csunicode iso-10646-ucs-2",
    "utf-16-be": "utf-16be unicodefffe",
    "utf-8": "utf-8 utf8 unicode-1-1-utf-8 x-unicode20utf8",
}
CODEC_OF = {label: codec for codec, labels in CODECS.items() for label in labels.split()}
PLAIN_LABEL = re.compile(r"(iso-?8859-\d{1,2}|windows-125\d|cp125\d)")
DECLARED = re.compile(
    rb"(?:charset|<\?xml[^>]{0,200}encoding)\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.I
)


def charset_in(content_type: str) -> str:
    """The charset that a Content-Type header names, or an empty string."""
    named = re.search(r"charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", content_type, re.IGNORECASE)
    return named[1] if named else ""


def codec_of(label: str) -> str | None:
    """Python's name of the encoding that the web calls `label`; None if the web has no such."""
    label = label.strip().lower()
    if label in CODEC_OF:
        return CODEC_OF[label]
    return label if PLAIN_LABEL.fullmatch(label) else None


def decode(raw: bytes, charset: str = "") -> str:
    """The characters: by the byte order mark, the charset, the bytes' own declaration, or a guess.

    The guess is UTF-8 if the bytes are, else windows-1252. NotText if the bytes are binary.
    """
    for mark, codec in BYTE_ORDER_MARKS.items():
        if raw.startswith(mark):
            return raw[len(mark) :].decode(codec, "replace")
    codec = codec_of(charset)
    if codec not in ("utf-16-le", "utf-16-be") and BINARY.search(raw[:4096]):
        raise NotText("it is binary, not text")
    if codec is None and raw.lstrip()[:1] == b"<":  # markup may say itself what it is written in
        declared = DECLARED.search(raw[:4096])
        if declared:
            codec = codec_of(declared[1].decode("ascii", "replace"))
    if codec in ("utf-16-le", "utf-16-be") and not charset:
        codec = "utf-8"  # bytes that declare themselves in ASCII cannot be UTF-16
    if codec is None:
        codec = "utf-8" if _is_utf8(raw) else "cp1252"
    try:
        return raw.decode(codec, "replace")
    except LookupError:  # windows-1259
        return raw.decode("utf-8", "replace")


def _is_utf8(raw: bytes) -> bool:
    """Whether the bytes are UTF-8. Long pages are cut, perhaps within their last character."""
    whole = len(raw) < LONG
    try:
        codecs.getincrementaldecoder("utf-8")().decode(raw, final=whole)
    except UnicodeDecodeError:
        return False
    return True


# HTML and PDF ------------------------------------------------------------------------------------


def read_in_child(kind: str, raw: bytes) -> str:
    """The text that tools/reader.py finds in a file. NotText when it finds none."""
    seconds = SECONDS[kind]
    command = [sys.executable, "-P", str(READER), kind]
    try:
        child = subprocess.run(command, input=raw, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NotText(f"it takes more than {seconds} s to read") from None
    except OSError as error:
        raise NotText(f"no process could be started to read it ({error.strerror})") from None
    if child.returncode != 0:
        raise NotText(f"it is {kind.upper()} that cannot be read (damaged, locked, or too large)")
    text = child.stdout.decode("utf-8", "replace")
    if not text.strip():
        raise NotText("it holds no text")
    return text
