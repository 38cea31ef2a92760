"""The toy's invented world: people and companies, two corpora about them, questions.

A world follows from its name: `make_world("train 0", ...)` is the same in every process. A fact is
one sentence of the world's documents ("ada baker born 1968 ."). A question needs one look-up, or
two ("where is the employer of ada baker based ?"), or a look-up and a subtraction in Python, or a
look-up in the second corpus.

Training and evaluation ask about two worlds. Both have the same *words*, because all names are
composed from the same lists, but their facts are drawn independently. So a policy can learn to look
facts up, but not the answers.

language.py says how both roles speak about a world. Tests: pytest tests/test_toy.py
"""

import functools
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from config import UserError
from tasks.questions import Question
from tools import Document

# ---------------------------------------------------------------------------- words

FIRST_NAMES = """
    ada amir bela bob carl cleo dan dora emil eva fay finn gina gus hana hugo iris ivan
    jane joel kira kurt lena leo maya milo ned nora omar pia quin rosa sven tara uma vera
    walt xena yuri zoe
""".split()
LAST_NAMES = """
    abbot adler baker brandt cohen cruz diaz dorn ellis engel fisher frank gomez grant
    hardy holm irving ito jansen jensen keller klein lang lopez meyer moss noble novak
    olsen patel quick rossi stern turner urban vogel weber xiong young zeller
""".split()
STEMS = """
    acro belto cando dexi elvo fintra gorla hexa inno jarvo kelto luma mondo nexo orbi
    pluto quanta rivo solar tekno ultra vanta wexo xylo yalto zenta
""".split()
SUFFIXES = "corp foods group labs media motors systems works".split()
CITIES = """
    almond arden birch brill caldor cedar dover dunmore eastby elgin fenwick garth hollow
    ironby jasper kirkby lowell marlow norwick oakham preston quarry redhill seaford
    tilbury upton verdun wexford yarm zurich
""".split()
HOBBIES = """
    chess cooking dancing fishing hiking karate opera painting poker pottery rowing
    sailing skiing tennis yoga
""".split()
PRODUCTS = """
    bicycles boots cameras candles carpets cheese clocks drones glass lamps paper pianos
    ropes tents tractors
""".split()
TOPICS = """
    algae bees comets corals dreams enzymes fungi glaciers lasers magnets moths polymers
    robots tides volcanoes
""".split()
YEARS = [str(year) for year in range(1960, 2000)]
NUMBERS = [str(number) for number in range(40)]
FILLER = [
    "the weather was mild that week .",
    "this page was updated last month .",
    "read more in our archive .",
    "tickets are sold at the door .",
    "many readers asked about this .",
    "photos are shown below .",
    "the event drew a large crowd .",
    "no further details are known .",
    "see also the list of records .",
    "the report is available online .",
]

# The scholar corpus has one more attribute of a person: "study".
PERSONAL = ("employer", "birth", "home", "hobby")
CORPORATE = ("base", "founding", "product")
# attribute -> the verb that states it, and the question that asks for it
ATTRIBUTES = {
    "employer": ("joined", "which firm employs {} ?"),
    "birth": ("born", "when was {} born ?"),
    "home": ("inhabits", "where does {} live ?"),
    "hobby": ("enjoys", "what does {} enjoy ?"),
    "study": ("published", "when did {} publish on {} ?"),
    "base": ("occupies", "where is {} based ?"),
    "founding": ("began", "when was {} founded ?"),
    "product": ("makes", "what does {} make ?"),
}
VERBS = {attribute: verb for attribute, (verb, _) in ATTRIBUTES.items()}
ASK = {attribute: question for attribute, (_, question) in ATTRIBUTES.items()}
MENTIONS = ("{0} was praised by {1} .", "{1} wrote about {0} .")
AGE = "how old was {} in {} ?"
EMPLOYER_OF = "the employer of {}"


# --------------------------------------------------------------------------- worlds

TOOLS = ("search", "scholar", "python")
WORLD_SIZES = {"train": (200, 60), "eval": (100, 40)}  # people, companies


@dataclass(frozen=True)
class World:
    """People ("ada baker"), companies ("acro corp"), and the facts and documents about them.

    `facts` maps (name, attribute) to a value. `documents` maps a corpus to its pages.
    """

    people: list[str]
    companies: list[str]
    facts: dict[tuple[str, str], str]
    documents: dict[str, list[Document]]

    def sentence(self, name: str, attribute: str) -> str:
        """The one sentence that states a fact."""
        return f"{name} {VERBS[attribute]} {self.facts[name, attribute]} ."


def make_world(name: str, n_people: int, n_companies: int) -> World:
    """An invented world, which depends on the arguments only."""
    rng = random.Random(f"world {name}")
    full_names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    firm_names = [f"{stem} {suffix}" for stem in STEMS for suffix in SUFFIXES]
    people = rng.sample(full_names, n_people)
    companies = rng.sample(firm_names, n_companies)

    facts = {}
    for company in companies:
        facts[company, "base"] = rng.choice(CITIES)
        facts[company, "founding"] = rng.choice(YEARS)
        facts[company, "product"] = rng.choice(PRODUCTS)
    for person in people:
        birth = rng.randint(1960, 1974)
        facts[person, "employer"] = rng.choice(companies)
        facts[person, "birth"] = str(birth)
        facts[person, "home"] = rng.choice(CITIES)
        facts[person, "hobby"] = rng.choice(HOBBIES)
        facts[person, "topic"] = rng.choice(TOPICS)
        facts[person, "study"] = str(birth + rng.randint(18, 24))

    world = World(people, companies, facts, {"search": [], "scholar": []})
    for person in people:
        write_documents(world, rng, "search", person, PERSONAL)
        write_documents(world, rng, "scholar", person, ["study"])
    for company in companies:
        write_documents(world, rng, "search", company, CORPORATE)
    return world


def write_documents(
    world: World, rng: random.Random, corpus: str, subject: str, attributes: Sequence[str]
) -> None:
    """Adds three documents of 4 to 6 sentences: the subject's facts, and two without any fact."""
    profile = [world.sentence(subject, attribute) for attribute in attributes]
    for sentences in profile, [mention(world, rng, subject)], [mention(world, rng, subject)]:
        length = rng.randint(4, 6)
        while len(sentences) < length:
            filler = rng.random() < 0.5
            sentences.append(rng.choice(FILLER) if filler else mention(world, rng, subject))
        rng.shuffle(sentences)
        documents = world.documents[corpus]
        identifier = f"{corpus}/{len(documents)}"
        documents.append(Document(identifier, subject, f"toy://{identifier}", " ".join(sentences)))


def mention(world: World, rng: random.Random, subject: str) -> str:
    """A sentence that names the subject and somebody else, and tells no fact."""
    while (other := rng.choice(world.people)) == subject:
        pass
    return rng.choice(MENTIONS).format(subject, other)


@functools.lru_cache(maxsize=8)
def world(split: str, seed: int = 0) -> World:
    """The world that the questions of a split ("train" or "eval") ask about."""
    return make_world(f"{split} {seed}", *WORLD_SIZES[split])


# ------------------------------------------------------------------------- questions

SHARES = {"one": 0.4, "two": 0.3, "age": 0.2, "scholar": 0.1}
NEEDS = {"one": {"search"}, "two": {"search"}, "age": {"search", "python"}, "scholar": {"scholar"}}


@dataclass(frozen=True)
class Plan:
    """A question and the way to its answer.

    `hops` are the look-ups (tool, name, attribute) in order. `expression` is for Python to compute
    at the end; it is empty if the last look-up finds the answer.
    """

    kind: str
    text: str
    hops: tuple[tuple[str, str, str], ...]
    answer: str
    expression: str = ""


def draw_plan(world: World, rng: random.Random, tools: Collection[str] = TOOLS) -> Plan:
    """A random question about a world, which these tools can answer."""
    kinds = {kind: share for kind, share in SHARES.items() if NEEDS[kind] <= set(tools)}
    if not kinds:
        raise UserError("the toy has no question for these tools: give it search or scholar")
    (kind,) = rng.choices(list(kinds), kinds.values())
    draw = {"one": draw_one, "two": draw_two, "age": draw_age, "scholar": draw_scholar}[kind]
    return draw(world, rng, rng.choice(world.people))


def draw_one(world: World, rng: random.Random, person: str) -> Plan:
    """One look-up about the person or about some company."""
    name, attributes = person, PERSONAL
    if rng.random() >= 0.57:
        name, attributes = rng.choice(world.companies), CORPORATE
    return plan_one(world, name, rng.choice(attributes))


def plan_one(world: World, name: str, attribute: str) -> Plan:
    """The question for one fact, and its look-up."""
    hops = (("search", name, attribute),)
    return Plan("one", ASK[attribute].format(name), hops, world.facts[name, attribute])


def draw_two(world: World, rng: random.Random, person: str) -> Plan:
    """Two look-ups: the person's employer, then something about that company."""
    company = world.facts[person, "employer"]
    attribute = rng.choice(CORPORATE)
    text = ASK[attribute].format(EMPLOYER_OF.format(person))
    hops = (("search", person, "employer"), ("search", company, attribute))
    return Plan("two", text, hops, world.facts[company, attribute])


def draw_age(world: World, rng: random.Random, person: str) -> Plan:
    """A look-up of the person's birth, then a subtraction."""
    birth = world.facts[person, "birth"]
    age = rng.randint(1, 24)
    year = int(birth) + age
    hops = (("search", person, "birth"),)
    return Plan("age", AGE.format(person, year), hops, str(age), f"{year} - {birth}")


def draw_scholar(world: World, rng: random.Random, person: str) -> Plan:
    """One look-up in the second corpus."""
    text = ASK["study"].format(person, world.facts[person, "topic"])
    hops = (("scholar", person, "study"),)
    return Plan("scholar", text, hops, world.facts[person, "study"])


def question(split: str, seed: int, index: int, tools: Collection[str] = TOOLS) -> Question:
    """Question `index` of a split's endless stream. It depends on the arguments only."""
    rng = random.Random(f"question {split} {seed} {index}")
    plan = draw_plan(world(split, seed), rng, tools)
    return Question(f"{split}-{seed}-{index}", plan.text, (plan.answer,), f"toy-{plan.kind}")
