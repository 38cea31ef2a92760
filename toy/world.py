"""The embedded default: an invented world, its two corpora, its questions, its little language.

People and companies are drawn from a seed; a fact is one sentence of the world's documents ("ada baker born 1968 .").
Questions need one look-up, two ("where is the employer of ada baker based ?"), a look-up and a subtraction in the
Python tool, or a look-up in the second corpus. Training and evaluation ask about two worlds of other people, companies
and facts. The worlds share their *words* (names are composed from the same lists) and no fact: what is learned is how
to look things up, not the answers.

The language is word-level. System 2 (`ToyFormat`, the interface of prompts.py) speaks

    <s2> when was ada baker born ? <eot> <call> search ada baker <purpose> birth of ada baker <eot>
    <resp> ada baker born 1968 . none . <eot> <answer> 1968 <eot>

and System 1 sees `<s1> <doc> … <doc> … <purpose> birth of ada baker <eot>` and writes `ada baker born 1968 . <eot>`, or
`none . <eot>`. The base model that speaks it (imperfectly) is made by toy_base.py. Tests: pytest tests/test_toy.py
"""
import functools
import random
from dataclasses import dataclass

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tasks.chat import Call, Step
from tasks.questions import Question
from config import UserError
from tools import Document

# ------------------------------------------------------------------------------------------------- words

FIRST_NAMES = """
    ada amir bela bob carl cleo dan dora emil eva fay finn gina gus hana hugo iris ivan jane joel kira kurt lena leo
    maya milo ned nora omar pia quin rosa sven tara uma vera walt xena yuri zoe""".split()
LAST_NAMES = """
    abbot adler baker brandt cohen cruz diaz dorn ellis engel fisher frank gomez grant hardy holm irving ito jansen
    jensen keller klein lang lopez meyer moss noble novak olsen patel quick rossi stern turner urban vogel weber
    xiong young zeller""".split()
STEMS = """
    acro belto cando dexi elvo fintra gorla hexa inno jarvo kelto luma mondo nexo orbi pluto quanta rivo solar tekno
    ultra vanta wexo xylo yalto zenta""".split()
SUFFIXES = "corp foods group labs media motors systems works".split()
CITIES = """
    almond arden birch brill caldor cedar dover dunmore eastby elgin fenwick garth hollow ironby jasper kirkby
    lowell marlow norwick oakham preston quarry redhill seaford tilbury upton verdun wexford yarm zurich""".split()
HOBBIES = """
    chess cooking dancing fishing hiking karate opera painting poker pottery rowing sailing skiing tennis
    yoga""".split()
PRODUCTS = """
    bicycles boots cameras candles carpets cheese clocks drones glass lamps paper pianos ropes tents tractors""".split()
TOPICS = """
    algae bees comets corals dreams enzymes fungi glaciers lasers magnets moths polymers robots tides
    volcanoes""".split()
YEARS = [str(year) for year in range(1960, 2000)]
NUMBERS = [str(number) for number in range(40)]
FILLER = ["the weather was mild that week .", "this page was updated last month .", "read more in our archive .",
          "tickets are sold at the door .", "many readers asked about this .", "photos are shown below .",
          "the event drew a large crowd .", "no further details are known .", "see also the list of records .",
          "the report is available online ."]

PERSONAL = ("employer", "birth", "home", "hobby")               # in the search corpus; "study" is in the other
CORPORATE = ("base", "founding", "product")
VERBS = {"employer": "joined", "birth": "born", "home": "inhabits", "hobby": "enjoys", "study": "published",
         "base": "occupies", "founding": "began", "product": "makes"}
ASK = {"employer": "which firm employs {} ?", "birth": "when was {} born ?", "home": "where does {} live ?",
       "hobby": "what does {} enjoy ?", "study": "when did {} publish on {} ?",
       "base": "where is {} based ?", "founding": "when was {} founded ?", "product": "what does {} make ?"}
MENTIONS = ("{0} was praised by {1} .", "{1} wrote about {0} .")
AGE, EMPLOYER_OF = "how old was {} in {} ?", "the employer of {}"

CONTROL = ("<pad>", "<unk>", "<eot>", "<s2>", "<s1>", "<call>", "<purpose>", "<resp>", "<answer>", "<doc>")
OWN_WORDS = "search scholar python - none . error anything about of".split()


def corpus_of(attribute: str) -> str:
    """The corpus that tells an attribute."""
    return "scholar" if attribute == "study" else "search"


def vocabulary() -> list[str]:
    """Every word of every world, the control words first; a word's place is its token id."""
    phrases = [*FILLER, *ASK.values(), *MENTIONS, AGE, EMPLOYER_OF]
    words = {word for phrase in phrases for word in phrase.split() if "{" not in word}
    words.update(FIRST_NAMES, LAST_NAMES, STEMS, SUFFIXES, CITIES, HOBBIES, PRODUCTS, TOPICS, YEARS, NUMBERS,
                 VERBS, VERBS.values(), OWN_WORDS)
    return [*CONTROL, *sorted(words)]


# ------------------------------------------------------------------------------------------------- worlds

TOOLS = ("search", "scholar", "python")
WORLD_SIZES = {"train": (200, 60), "eval": (100, 40)}           # people, companies


@dataclass(frozen=True)
class World:
    """Names ("ada baker", "acro corp"), facts (name, attribute) -> value, and a list of documents for each corpus."""
    people: list[str]
    companies: list[str]
    facts: dict[tuple[str, str], str]
    documents: dict[str, list[Document]]

    def sentence(self, name: str, attribute: str) -> str:
        """The one sentence that states a fact."""
        return f"{name} {VERBS[attribute]} {self.facts[name, attribute]} ."


def make_world(name: str, n_people: int, n_companies: int) -> World:
    """An invented world; everything in it follows from `name`."""
    rng = random.Random(f"world {name}")
    people = rng.sample([f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES], n_people)
    companies = rng.sample([f"{stem} {suffix}" for stem in STEMS for suffix in SUFFIXES], n_companies)
    facts = {}
    for company in companies:
        facts |= {(company, "base"): rng.choice(CITIES), (company, "founding"): rng.choice(YEARS),
                  (company, "product"): rng.choice(PRODUCTS)}
    for person in people:
        birth = rng.randint(1960, 1974)
        facts |= {(person, "employer"): rng.choice(companies), (person, "birth"): str(birth),
                  (person, "home"): rng.choice(CITIES), (person, "hobby"): rng.choice(HOBBIES),
                  (person, "topic"): rng.choice(TOPICS), (person, "study"): str(birth + rng.randint(18, 24))}
    world = World(people, companies, facts, {"search": [], "scholar": []})
    for subject in people + companies:
        attributes = PERSONAL if subject in people else CORPORATE
        write_pages(world, rng, "search", subject, [world.sentence(subject, attribute) for attribute in attributes])
        if subject in people:
            write_pages(world, rng, "scholar", subject, [world.sentence(subject, "study")])
    return world


def write_pages(world: World, rng, corpus: str, subject: str, facts: list[str]):
    """Adds three pages of 4 to 6 sentences to a corpus: one with the subject's facts, two that only mention it."""
    def mention():
        other = rng.choice(world.people)
        return rng.choice(MENTIONS).format(subject, other) if other != subject else mention()
    for sentences in (list(facts), [mention()], [mention()]):
        length = max(rng.randint(4, 6), len(sentences))
        while len(sentences) < length:
            sentences.append(rng.choice(FILLER) if rng.random() < 0.5 else mention())
        rng.shuffle(sentences)
        pages = world.documents[corpus]
        identifier = f"{corpus}/{len(pages)}"
        pages.append(Document(identifier, subject, f"toy://{identifier}", " ".join(sentences)))


@functools.lru_cache(maxsize=8)
def world(split: str, seed: int = 0) -> World:
    """The world that the questions of a split ("train" or "eval") ask about."""
    return make_world(f"{split} {seed}", *WORLD_SIZES[split])


# ------------------------------------------------------------------------------------------------- questions

SHARES = {"one": 0.4, "two": 0.3, "age": 0.2, "scholar": 0.1}   # of each kind of question
NEEDS = {"one": {"search"}, "two": {"search"}, "age": {"search", "python"}, "scholar": {"scholar"}}


@dataclass(frozen=True)
class Plan:
    """A question and the way to its answer: look-ups (tool, name, attribute) in order, then a sum if one is needed."""
    kind: str
    text: str
    hops: tuple[tuple[str, str, str], ...]
    answer: str
    sum: str = ""


def draw_plan(world: World, rng, tools=TOOLS) -> Plan:
    """A random question about a world that can be answered with these tools."""
    kinds = [kind for kind in SHARES if NEEDS[kind] <= set(tools)]
    if not kinds:
        raise UserError("the toy has no question for these tools; give it search or scholar (--tools search,scholar)")
    kind = rng.choices(kinds, [SHARES[kind] for kind in kinds])[0]
    facts, person = world.facts, rng.choice(world.people)
    if kind == "one":
        name = person if rng.random() < 0.57 else rng.choice(world.companies)
        attribute = rng.choice(PERSONAL if name == person else CORPORATE)
        return Plan(kind, ASK[attribute].format(name), (("search", name, attribute),), facts[name, attribute])
    if kind == "two":
        company, attribute = facts[person, "employer"], rng.choice(CORPORATE)
        hops = ("search", person, "employer"), ("search", company, attribute)
        return Plan(kind, ASK[attribute].format(EMPLOYER_OF.format(person)), hops, facts[company, attribute])
    if kind == "age":
        birth, age = facts[person, "birth"], rng.randint(1, 24)
        year = int(birth) + age
        return Plan(kind, AGE.format(person, year), (("search", person, "birth"),), str(age), f"{year} - {birth}")
    text = ASK["study"].format(person, facts[person, "topic"])
    return Plan(kind, text, (("scholar", person, "study"),), facts[person, "study"])


def question(split: str, seed: int, index: int, tools=TOOLS) -> Question:
    """Question `index` of a split's endless stream: it depends on the arguments and on nothing else."""
    plan = draw_plan(world(split, seed), random.Random(f"question {split} {seed} {index}"), tools)
    return Question(f"{split}-{seed}-{index}", plan.text, (plan.answer,), f"toy-{plan.kind}")


# ------------------------------------------------------------------------------------------------- the language


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level: lower-case, split at white space and punctuation, look up; a word outside the vocabulary is <unk>."""
    words = {word: index for index, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(CONTROL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eot>",
                                   clean_up_tokenization_spaces=False)


class ToyFormat:
    """The toy's form of the interface in prompts.py: token ids in, token ids out, words only for the parser."""

    def __init__(self, tokenizer, tools=TOOLS):
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        self.control = {word: tokenizer.convert_tokens_to_ids(word) for word in CONTROL}
        self.eot = self.control["<eot>"]
        self.stop_ids = (self.eot,)

    def encode(self, text: str) -> list[int]:
        """Text from outside: a control word in it becomes unknown words, so nobody can speak in a role's name."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def system2_prompt(self, question_text: str) -> list[int]:
        return [self.control["<s2>"], *self.encode(question_text), self.eot]

    def parse(self, tokens: list[int], *, final: bool = False) -> Step:
        """One step of System 2; `final`: the given context ended with <answer>, so the step is what follows it."""
        words = self.decode(tokens).split()
        if words[-1:] == ["<eot>"]:
            words.pop()
        if final:
            words.insert(0, "<answer>")
        head, body = words[:1], words[1:]
        if head == ["<answer>"]:
            if self.plain(body):
                return Step(answer=" ".join(body))
            return Step(error="the answer is empty or holds a control word")
        if head != ["<call>"]:
            return Step(error="a step starts with <call> or <answer>")
        if body[:1] == [] or body[0] not in self.tools:
            return Step(error=f"unknown tool; the tools are {', '.join(self.tools)}")
        tool, rest = body[0], body[1:]
        split = rest.index("<purpose>") if "<purpose>" in rest else len(rest)
        argument, purpose = rest[:split], rest[split + 1:]
        if not self.plain(argument):
            return Step(error="the query is empty or holds a control word")
        if tool != "python" and not self.plain(purpose):
            return Step(error="the purpose is missing or holds a control word")
        return Step(call=Call(tool, " ".join(argument), " ".join(purpose)))

    def plain(self, words: list[str]) -> bool:
        """Some words, none of them a control word."""
        return bool(words) and not any(word in self.control for word in words)

    def observation(self, parts: list[list[int]], *, final: bool = False) -> list[int]:
        """`<resp> note note … <eot>`; `final` goes on with <answer>, so that only an answer can follow."""
        wrapped = [self.control["<resp>"], *(token for part in parts for token in part), self.eot]
        return wrapped + [self.control["<answer>"]] * final

    def message(self, text: str, *, final: bool = False) -> list[int]:
        """Our own words to System 2. The toy has two: "none ." for no results, "error" for all that went wrong."""
        return self.observation([self.encode("none ." if text.startswith("no results") else "error")], final=final)

    def close_step(self) -> list[int]:
        return [self.eot]

    def document(self, document: Document) -> list[int]:
        return [self.control["<doc>"], *self.encode(document.text)]

    def system1_prompt(self, chunk: list[int], purpose: str, question: str = "") -> list[int]:
        """Chunk, then purpose; without one (--purpose off) its place stays empty. The toy never shows the question."""
        return [self.control["<s1>"], *chunk, self.control["<purpose>"], *self.encode(purpose), self.eot]

    def note(self, tokens: list[int]) -> list[int]:
        """System 1's words without any control word: a note can't speak for System 2 or end its turn."""
        return [token for token in tokens if token not in self.control.values()]
