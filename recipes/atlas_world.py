"""The atlas: real facts about countries, pages that tell them, questions with a plan to the answer.

The facts are those of PyPI's countryinfo (MIT): capital, currency, calling code, internet domain,
demonym, population, area, neighbours. A country is kept only if each of these fields gives one
usable value (`facts_of`); not all of its neighbours need be kept. The United States are left out,
since the package lists three currencies. The facts are as old as that package.

The short world has questions of the first two kinds, the long one of all four.

    one      What is the capital of Peru?                  Which country has the capital Lima?
    two      What is the calling code of the country with the capital Lima?
    three    What is the demonym of the most populous neighbour of the country with the capital …?
    sum      How many more people live in Peru than in Chile?           (Python subtracts)

A seed splits the countries into parts: "train" and "held_out", and in the long world before them
"taught", for demonstrations. A page names countries of its own part only. A part's questions are
about its own countries, and search its own pages and those of the parts before it. So no page of
training tells what a held-out question asks.

Every country has a page of its own in varied English, and travel pages that tell the same facts.
Each travel page names another country too, so searches for that one find it as well: a distractor,
which tells nothing of what is asked. `write` makes the files that --data, --eval_data, --docs and
--eval_docs take. Tests: pytest tests/test_atlas.py
"""

import importlib.util
import json
import random
import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from config import UserError
from plumbing.folders import append_lines
from tasks.chat import DOCUMENT
from tasks.questions import same_question
from tools import Document, search
from tools.bm25 import Search

INSTALL = "pip install --no-deps -r requirements-real.txt"
TRAINED = 0.7  # share of the countries that training asks about
QUESTIONS = {"train": 1500, "held_out": 200}
BACKWARDS = 0.2  # share of the one-look-up questions that ask for a country
TRIES = 1000  # attempts to draw a question or to play a demonstration; most draws are valid
DEFUNCT = ("Serbia and Montenegro",)

# ------------------------------------------------------------------------------------------- words

# attribute -> one way in which a page tells it, and one to ask for it. Others are made below.
WORDS = {
    "capital": ("{name} has the capital {value}.", "Which city is the capital of {}?"),
    "currency code": (
        "{name} uses the currency code {value}.",
        "Which currency code does {} use?",
    ),
    "calling code": (
        "{name} is reached by the calling code {value}.",
        "Which calling code does {} have?",
    ),
    "internet domain": (
        "{name} owns the internet domain {value}.",
        "Which internet domain has {}?",
    ),
    "demonym": ("{name} goes with the demonym {value}.", "Which demonym belongs to {}?"),
    "population": ("{name} has a population of {value}.", "How many people live in {}?"),
    "area": (
        "{name} has an area of {value} square kilometres.",
        "How many square kilometres does {} cover?",
    ),
    "most populous neighbour": (
        "{name} has the most populous neighbour {value}.",
        "Which neighbour of {} has the most inhabitants?",
    ),
}
NEIGHBOUR = "most populous neighbour"  # the attribute whose value is another country
UNIT = {"area": " square kilometres"}
IN_UNIT = {"area": " in square kilometres"}
# What begins with "Its" leans on the page's title.
TELL = {
    attribute: (
        f"The {attribute} of {{name}} is {{value}}{UNIT.get(attribute, '')}.",
        told,
        f"Its {attribute} is {{value}}{UNIT.get(attribute, '')}.",
    )
    for attribute, (told, _) in WORDS.items()
}
ASK = {
    attribute: (f"What is the {attribute} of {{}}{IN_UNIT.get(attribute, '')}?", asked)
    for attribute, (_, asked) in WORDS.items()
}
# The same without the attribute's own words, or with the value before the country. To read out the
# capital of Peru from "Lima is the capital of Peru" is hard for a small model: what it wants stands
# before the words that it looks for.
TELL_INDIRECTLY = {
    "capital": (
        "{value} is the capital of {name}.",
        "{name} is governed from {value}.",
        "Its government sits in {value}.",
    ),
    "currency code": ("{name} pays with {value}.", "One pays there with {value}."),
    "calling code": (
        "Whoever rings somebody in {name} dials +{value} first.",
        "Calls to it begin with +{value}.",
    ),
    "internet domain": (
        "Web sites of {name} have addresses that end in {value}.",
        "Addresses of its web sites end in {value}.",
    ),
    "demonym": (
        "Somebody or something from {name} is called {value}.",
        "What comes from there is called {value}.",
    ),
    "population": ("{value} people live in {name}.", "It has {value} inhabitants."),
    "area": ("{name} covers {value} square kilometres.", "It covers {value} square kilometres."),
    "most populous neighbour": (
        "{value} is the most populous neighbour of {name}.",
        "Among the neighbours of {name}, {value} has the most inhabitants.",
        "Of all its neighbours, {value} has the most inhabitants.",
    ),
}
# Words that describe a country without its name, and the question that asks for it.
KEYS = {key: f"the country with the {key} {{}}" for key in ("capital", "demonym")}
WHICH = {key: f"Which country has the {key} {{}}?" for key in KEYS}
SUMS = (
    ("How many more people live in {} than in {}?", "population", "-"),
    ("How many people live in {} and {} together?", "population", "+"),
    ("How many square kilometres more does {} cover than {}?", "area", "-"),
)
TITLES = ("Travel to {name}", "A week in {name}")
FILLER = (
    "Many people visit {name} every year.",
    "The weather in {name} is best in spring.",
    "{name} is known for its markets.",
    "A new museum has opened in {name}.",
    "Trains in {name} are often late.",
    "Tourists like the food of {name}.",
    "The schools of {name} begin in autumn.",
    "Football is popular in {name}.",
    "The museum is closed on Mondays.",
    "Prices have risen since last year.",
    "Most shops are open until eight.",
    "A guide book is sold at the station.",
    "The article was first printed in a weekly paper.",
    "Photographs of the coast are shown below.",
)
# Spellings that the package lacks, or that `names_of` drops as too short.
ALIASES = {
    "Kyiv": ("Kiev",),
    "Naypyidaw": ("Nay Pyi Taw",),
    "United Kingdom": ("UK",),
    "United Arab Emirates": ("UAE",),
    "Myanmar": ("Burma",),
    "Republic of Macedonia": ("Macedonia",),
    "Federated States of Micronesia": ("Micronesia",),
}

# ------------------------------------------------------------------------------------------- facts

Fact = tuple[str, str]  # a country's name and an attribute


@dataclass(frozen=True)
class Value:
    """What a page says, and what counts as a right answer."""

    text: str
    golds: tuple[str, ...]


def countries() -> list[dict]:
    """All rows of countryinfo's data files, sorted by name."""
    spec = importlib.util.find_spec("countryinfo")
    if spec is None:
        raise UserError(
            f"the atlas needs the package countryinfo, which is not installed: {INSTALL}"
        )
    folder = Path(spec.submodule_search_locations[0]) / "data"
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    if not rows:
        raise UserError(f"{folder} holds no countries: {INSTALL}")
    named = {row["name"]: row for row in rows if row["name"] not in DEFUNCT}
    return [named[name] for name in sorted(named)]


def facts_of(row: dict) -> dict[str, Value]:
    """attribute -> value, of those fields that say one thing."""
    name = row["name"]
    demonym = the_one(row.get("demonym"))
    if demonym and set(",/").intersection(demonym):
        demonym = None
    domains = [domain for domain in row.get("tld") or [] if domain.isascii()]
    code = the_one(row.get("callingCodes"))
    found = {
        "capital": the_one(row.get("capital")),
        "currency code": the_one(row.get("currencies")),
        "calling code": code if code and code.isdecimal() else None,
        "internet domain": the_one(domains),
        "demonym": demonym,
        "population": written(row.get("population")),
        "area": written(row.get("area")),
    }
    values = {}
    for attribute, text in found.items():
        golds = spellings(text) if text else ()
        # Not Singapore's capital: every sentence that names the country would tell it.
        if golds and not says(name, golds):
            values[attribute] = Value(text, golds)
    return values


def says(text: str, golds: tuple[str, ...]) -> bool:
    """Whether a text has one of these as whole words. A domain matches with its dot only."""
    found = (rf"(?<!\w){re.escape(gold)}(?!\w)" for gold in golds)
    return any(re.search(pattern, text, re.IGNORECASE) for pattern in found)


def the_one(value) -> str | None:
    """The one text that a field holds; None if it holds none, or several."""
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None
    return (value or "").strip() or None


def written(number) -> str | None:
    """The number with commas, as 1,285,216. None if it is no whole number above 0."""
    if not isinstance(number, int) or number < 1:
        return None
    return f"{number:,}"


def spellings(text: str, others: tuple[str, ...] = ()) -> tuple[str, ...]:
    """A text as people write it: also without accents, and with St. for Saint."""
    listed = [text, *ALIASES.get(text, ()), *others]
    for spelling in list(listed):
        listed.append(spelling.replace("Saint ", "St. "))
        listed.append(spelling.replace("St. ", "Saint "))
    for spelling in list(listed):
        letters = unicodedata.normalize("NFKD", spelling)
        listed.append("".join(x for x in letters if not unicodedata.combining(x)))
    return tuple(dict.fromkeys(listed))


def names_of(row: dict) -> tuple[str, ...]:
    """What a country may be called: its name, and other spellings in Latin letters."""
    others = [other.strip() for other in row.get("altSpellings") or []]
    # The package lists "Thai" for Thailand, which is no name of a country.
    others = [other for other in others if other != row.get("demonym")]
    # Spellings of three letters or fewer are mostly codes.
    latin = [other for other in others if len(other) > 3 and all(map(is_latin, other))]
    return spellings(row["name"], tuple(latin))


def is_latin(character: str) -> bool:
    """Whether a character may stand in an English page's name of a country."""
    return not character.isalpha() or "LATIN" in unicodedata.name(character, "")


# ------------------------------------------------------------------------------------------- world


@dataclass(frozen=True)
class Size:
    """How hard a world is."""

    kinds: tuple[str, ...] = ("one", "two")  # of questions, in equal shares
    # Kinds of demonstrations, in turn. Most show one look-up, so the model tends to answer too
    # early, and RL has a habit to change.
    shown: tuple[str, ...] = ("one", "one", "one", "one", "one", "two")
    travel: int = 1  # travel pages about each country
    filler: int = 1  # idle sentences on a page; on a travel page one of them names another country
    indirect: bool = False  # facts are also told as in TELL_INDIRECTLY
    # One half of the training countries is for demonstrations, the other half for RL's questions.
    # After many demonstrations a model knows their countries, and RL would see few mistakes there.
    apart: bool = False

    @property
    def top_k(self) -> int:
        """Pages that a search returns.

        As many as name one country: its own page, the travel pages about it, and as many about
        others that name it. In a long world a few more may name it, as a neighbour. With a larger
        top_k BM25 filled up with the shortest pages that have the word "capital", and such a page
        came in up to half of all searches.
        """
        return 1 + 2 * self.travel

    def tellings(self, attribute: str) -> tuple[str, ...]:
        """How a fact may be told."""
        return TELL[attribute] + (TELL_INDIRECTLY[attribute] if self.indirect else ())


SHORT = Size()
LONG = Size(
    kinds=("one", "two", "three", "sum"),
    shown=("one", "one", "two", "one", "one", "three", "one", "sum"),
    travel=2,
    filler=4,
    indirect=True,
    apart=True,
)


@dataclass
class World:
    """Countries in parts, their facts, and the pages.

    Parts are "train" and "held_out"; before them "taught", where demonstrations have countries of
    their own. `told` has, for each fact, the (title, sentence) pairs that tell it.
    """

    size: Size
    seed: int
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # country -> its spellings
    parts: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[Fact, Value] = field(default_factory=dict)
    pages: dict[str, list[Document]] = field(default_factory=dict)  # of each part
    told: dict[Fact, set[tuple[str, str]]] = field(default_factory=dict)
    indexes: dict[str, Search] = field(default_factory=dict)  # of each part, made when it is needed

    def attributes(self, name: str) -> list[str]:
        """What is known of a country."""
        return [attribute for attribute in TELL if (name, attribute) in self.facts]

    def keys(self, name: str) -> list[str]:
        """The attributes that point at this country and no other, and do not say its name."""
        return [key for key in KEYS if self.points(name, key)]

    def points(self, name: str, key: str) -> bool:
        """Whether a value hides a country's name, and is this one's alone in this world.

        "Mexico City" hides nothing. "Samoan" is not Samoa's alone: there are American Samoans.
        """
        text = self.facts[name, key].text
        others = (self.facts[other, key].text for other in self.names if other != name)
        unique = not any(says(other, (text,)) for other in others)
        return unique and not says(text, self.names[name])

    def searched(self, part: str) -> list[Document]:
        """The pages that a part's questions are searched in: its own, and those of parts before."""
        parts = list(self.parts)
        before = parts[: parts.index(part) + 1]
        return [page for known in before for page in self.pages[known]]

    def finds(self, part: str, hop: "Hop") -> bool:
        """Whether a part's search finds the fact of a look-up, among its first few pages."""
        if part not in self.indexes:
            self.indexes[part] = search.local(self.searched(part), self.size.top_k)
        found = self.indexes[part](hop.query)
        told = self.told[hop.fact]
        return any(
            page.title == title and words in page.text for page in found for title, words in told
        )

    def titles(self, attribute: str, text: str) -> dict[str, str]:
        """country -> title of the first page in a text that tells this attribute of it.

        The text is a chunk: pages with their header lines.
        """
        found = {}
        for page in text.split(f"{DOCUMENT} ")[1:]:
            title = page.partition("\n")[0].strip()
            for name in self.names:
                pairs = self.told.get((name, attribute), ())
                if any(title == known and sentence in page for known, sentence in pairs):
                    found.setdefault(name, title)
        return found


def make_world(seed: int = 0, size: Size = SHORT) -> World:
    """The world that follows from a seed."""
    rng = random.Random(f"atlas {seed}")
    world = World(size, seed)
    rows = {row["name"]: row for row in countries()}
    for name, row in rows.items():
        values = facts_of(row)
        if values.keys() == set(TELL) - {NEIGHBOUR}:
            world.names[name] = names_of(row)
            world.facts |= {(name, attribute): value for attribute, value in values.items()}
    neighbours = largest_neighbours(world, rows)
    trained, held_out = split(list(world.names), neighbours, rng, TRAINED)
    world.parts = {"train": trained, "held_out": held_out}
    if size.apart:
        # A generator of its own, so that this choice changes no other.
        apart = random.Random(f"atlas apart {seed}")
        taught, asked = split(trained, neighbours, apart, 1 / 2)
        world.parts = {"taught": taught, "train": asked, "held_out": held_out}
    if "three" in size.kinds:  # only a world with three look-ups tells neighbours
        for name, neighbour in neighbours.items():
            world.facts[name, NEIGHBOUR] = Value(neighbour, world.names[neighbour])
    for part, names in world.parts.items():
        pages = [page(world, rng, f"country/{name}", name, name, None) for name in names]
        for number in range(size.travel):
            order = rng.sample(names, len(names))
            for name, other in zip(order, order[1:] + order[:1]):
                title = TITLES[number].format(name=name)
                pages.append(page(world, rng, f"travel/{name}/{number}", title, name, other))
        world.pages[part] = pages
    return world


def largest_neighbours(world: World, rows: dict[str, dict]) -> dict[str, str]:
    """country -> its most populous neighbour, if all its neighbours are in the world."""
    by_code = {rows[name]["ISO"]["alpha3"]: name for name in world.names}
    found = {}
    for name in world.names:
        neighbours = [by_code.get(code) for code in rows[name].get("borders") or []]
        if neighbours and None not in neighbours:
            found[name] = max(neighbours, key=lambda other: rows[other]["population"])
    return found


def split(
    names: list[str], neighbours: dict[str, str], rng: random.Random, share: float
) -> tuple[list[str], list[str]]:
    """A share of the countries, and the others.

    A country and its most populous neighbour are always in the same part. So countries linked this
    way form a cluster, and a cluster is never split.
    """
    # Every country points at its cluster's list, which all members share. `neighbours` may tell of
    # countries that are not among the names.
    cluster = {name: [name] for name in names}
    for name, neighbour in neighbours.items():
        if name in cluster and cluster[name] is not cluster[neighbour]:
            cluster[name] += cluster[neighbour]
            cluster |= dict.fromkeys(cluster[neighbour], cluster[name])
    clusters = list({id(members): members for members in cluster.values()}.values())
    rng.shuffle(clusters)
    room = len(names) - round(share * len(names))  # for others
    chosen, others = [], []
    for members in clusters:
        if len(members) > room:
            chosen += members
            continue
        others += members
        room -= len(members)
    return chosen, others


def page(
    world: World, rng: random.Random, identity: str, title: str, name: str, other: str | None
) -> Document:
    """A page that tells all that is known of a country, and idle sentences.

    `other` is a country that the page names besides. Records in world.told which facts it tells.
    """
    sentences = []
    for attribute in world.attributes(name):
        fact = (name, attribute)
        words = rng.choice(world.size.tellings(attribute))
        sentence = words.format(name=name, value=world.facts[fact].text)
        world.told.setdefault(fact, set()).add((title, sentence))
        sentences.append(sentence)
    idle = rng.sample(FILLER, world.size.filler)
    if other is not None:
        idle[0] = f"Flights from {other} to {{name}} take some hours."
    sentences += [sentence.format(name=name) for sentence in idle]
    rng.shuffle(sentences)
    return Document(identity, title, "", " ".join(sentences))


# --------------------------------------------------------------------------------------- questions


@dataclass(frozen=True)
class Hop:
    """One look-up: the query, its purpose, and the fact that must be found.

    backwards: the fact's value is given, and its country is looked for.
    """

    query: str
    purpose: str
    fact: Fact
    backwards: bool = False


@dataclass(frozen=True)
class Plan:
    """A question and the way to its answer.

    `code` is the Python expression that computes the answer from the facts found. It is empty where
    the last look-up gives the answer.
    """

    kind: str
    text: str
    hops: tuple[Hop, ...]
    golds: tuple[str, ...]
    code: str = ""


def draw_plan(world: World, part: str, kind: str, rng: random.Random) -> Plan:
    """A random question of a kind about a part's countries."""
    draw = {"one": draw_one, "two": draw_two, "three": draw_three, "sum": draw_sum}[kind]
    for _ in range(TRIES):
        plan = draw(world, world.parts[part], rng)
        if plan is not None and all(world.finds(part, hop) for hop in plan.hops):
            return plan
    raise UserError(f"this world has no question of the kind {kind}")


def draw_one(world: World, names: list[str], rng: random.Random) -> Plan | None:
    """One look-up: a fact of a country, or the country that goes with a fact."""
    name = rng.choice(names)
    if rng.random() < BACKWARDS:
        hop = by_key(world, name, rng)
        if hop is None:
            return None
        text = WHICH[hop.fact[1]].format(world.facts[hop.fact].text)
        return Plan("one", text, (hop,), world.names[name])
    return ask(world, "one", name, name, (), rng)


def draw_two(world: World, names: list[str], rng: random.Random) -> Plan | None:
    """Two look-ups: a country by its capital or demonym, then a fact of it."""
    name = rng.choice(names)
    hop = by_key(world, name, rng)
    if hop is None:
        return None
    return ask(world, "two", name, hop.purpose, (hop,), rng)


def draw_three(world: World, names: list[str], rng: random.Random) -> Plan | None:
    """Three look-ups: a country by its capital or demonym, its neighbour, a fact of that one."""
    name = rng.choice(names)
    hop = by_key(world, name, rng)
    if hop is None or (name, NEIGHBOUR) not in world.facts:
        return None
    neighbour = world.facts[name, NEIGHBOUR].text
    hops = (hop, hop_to_fact(name, NEIGHBOUR))
    return ask(world, "three", neighbour, f"the {NEIGHBOUR} of {hop.purpose}", hops, rng)


def draw_sum(world: World, names: list[str], rng: random.Random) -> Plan:
    """Two look-ups and a sum or a difference of the numbers."""
    words, attribute, operation = rng.choice(SUMS)
    pair = rng.sample(names, 2)
    numbers = {name: int(world.facts[name, attribute].text.replace(",", "")) for name in pair}
    pair.sort(key=numbers.get, reverse=True)
    larger, smaller = (numbers[name] for name in pair)
    result = larger - smaller if operation == "-" else larger + smaller
    hops = tuple(hop_to_fact(name, attribute) for name in pair)
    text = words.format(*pair)
    return Plan("sum", text, hops, (str(result),), f"{larger} {operation} {smaller}")


def by_key(world: World, name: str, rng: random.Random) -> Hop | None:
    """The look-up of a country that is described without its name, if it can be."""
    keys = world.keys(name)
    return hop_to_country(world, name, rng.choice(keys)) if keys else None


def ask(
    world: World,
    kind: str,
    name: str,
    described: str,
    hops: tuple[Hop, ...],
    rng: random.Random,
) -> Plan | None:
    """A question for a random fact of a country; `described` stands for the country's name.

    None if the question would contain its answer.
    """
    attribute = rng.choice(world.attributes(name))
    value = world.facts[name, attribute]
    text = rng.choice(ASK[attribute]).format(described)
    if says(text, value.golds):
        return None
    return Plan(kind, text, (*hops, hop_to_fact(name, attribute)), value.golds)


def hop_to_fact(name: str, attribute: str) -> Hop:
    """A look-up of one fact of a country."""
    query = f"{attribute} of {name}"
    return Hop(query, f"the {query}", (name, attribute))


def hop_to_country(world: World, name: str, key: str) -> Hop:
    """A look-up of the country that has this capital or demonym."""
    value = world.facts[name, key].text
    # "country" stands on no page; it puts a space before the value (see atlas.sayings). The key's
    # own word is left out: it would fill the search with the shortest pages that have it.
    return Hop(f"country {value}", KEYS[key].format(value), (name, key), backwards=True)


def questions(world: World, part: str) -> list[dict]:
    """Rows of a part's questions: the kinds in turn, no question twice."""
    rng = random.Random(f"atlas questions {world.seed} {part}")
    rows = []
    asked = set()
    for _ in range(100 * QUESTIONS[part]):
        kind = world.size.kinds[len(rows) % len(world.size.kinds)]
        plan = draw_plan(world, part, kind, rng)
        if same_question(plan.text) in asked:
            continue
        asked.add(same_question(plan.text))
        row = {"id": f"{part}-{len(rows)}", "set": kind, "question": plan.text}
        rows.append(row | {"golden_answers": list(plan.golds)})
        if len(rows) == QUESTIONS[part]:
            return rows
    raise UserError(f"this world has too few questions of the kind {kind}")


# ------------------------------------------------------------------------------------------- files


def write(world: World, folder: Path) -> None:
    """The world as files: what --data, --eval_data, --docs and --eval_docs take."""
    for part in QUESTIONS:
        append_lines(folder / f"{part}.jsonl", questions(world, part))
        pages = [
            {"id": page.id, "title": page.title, "contents": page.text}
            for page in world.searched(part)
        ]
        append_lines(folder / f"{part}_pages.jsonl", pages)
