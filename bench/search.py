"""Local search: how often a planted fact is read, and how fast it is beside SQLite's FTS5.

Facts: 30 notes, three of them of 30,000 words, with twenty planted facts. A fact counts as
*found* when its note is among the first three results, and as *read* when the sentence
itself is within what System 1 is shown of them: the whole passage, or the first 3,000 words
of a whole document (about 4,000 tokens). Once with passages and once with whole documents.

Speed: documents of invented words, drawn by Zipf's law, 100 a document on average. A
*question* is ten words drawn like the text itself, common ones included; a *name* is two
rare words. FTS5 gets the query as an OR of its words, ranked by its own bm25 (k1 = 1.2;
ours is 1.5), so the two lists need not be equal: their overlap is printed. CPU time,
medians of interleaved rounds.

    python -m bench.search [--documents 100000] [--quick]
"""

import argparse
import json
import random
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench import common
from tools import search

K = 10
QUERIES = 20
VOCABULARY = 100_000

# Planted facts ---------------------------------------------------------------------------------

NOTES = 30
LONG_NOTES = 3
LONG = 30_000  # words
SHORT = 300
SHOWN = 3_000  # words of a whole document that System 1 reads
FACTS = """\
The warranty of the Halden pump ends in March 2031.|When does the Halden warranty end?
We agreed on a price of 417 euros for the Brisk plan.|What price did we agree on for the Brisk plan?
Ida Moreno is responsible for the Ganymede backups.|Who is responsible for the Ganymede backups?
The lease of the Kestrel office costs 2,310 a month.|What does the lease of the Kestrel office cost?
Sample B14 melted at 83 degrees in the second furnace.|At how many degrees did sample B14 melt?
The Lumen password policy changes on June 9.|When does the Lumen password policy change?
Our flight to Tromso leaves from gate 27.|From which gate does the flight to Tromso leave?
The contract with Orlo Freight renews every eighteen months.|How often does the Orlo contract renew?
Doctor Quill prescribed 40 mg of the blue tablets.|How many mg did Doctor Quill prescribe?
The Saint Edda choir rehearses in the chapel.|Where does the Saint Edda choir rehearse?"""


def write_notes(folder: Path, long: bool = True) -> list[tuple[str, str]]:
    """Writes 30 notes with ten facts, in the long notes or in short ones; [(question, fact)].

    The common words of the questions (price, office, contract, …) stand in all notes, their names
    and numbers in other notes too: no single word leads to a fact.
    """
    rng = random.Random(0)
    facts = [tuple(line.split("|")) for line in FACTS.splitlines()]
    asked = " ".join(question for _, question in facts).replace("?", "").split()
    common_words = [word for word in asked if word.islower()]
    names = sorted({word for word in asked if not word.islower()})
    invented = [f"w{i}" for i in range(3_000)]
    weights = [1 / (rank + 1) for rank in range(len(invented))]
    for number in range(NOTES):
        count = LONG if number < LONG_NOTES else SHORT
        words = rng.choices(invented, weights, k=count)
        for place in range(0, count, 15):
            words[place] = rng.choice(common_words)
        for name in rng.sample(names, 1):
            words[rng.randrange(count)] = name
        holds_facts = number < LONG_NOTES if long else number >= NOTES - len(facts)
        if holds_facts:
            holders = LONG_NOTES if long else len(facts)
            for fact, _ in facts[number % holders :: holders]:
                words.insert(rng.randrange(len(words) // 5, len(words)), fact)
        lines = [" ".join(words[i : i + 20]) for i in range(0, len(words), 20)]
        (folder / f"note-{number:02}.md").write_text("\n".join(lines))
    return [(question, fact) for fact, question in facts]


def count_read(long: bool, passage_words: int) -> tuple[int, int]:
    """Of the ten facts: (how many notes are found, how many facts are read)."""
    with tempfile.TemporaryDirectory() as folder:
        facts = write_notes(Path(folder), long)
        find = search.local(folder, 3, passage_words=passage_words)
        notes = {path.name: path.read_text() for path in Path(folder).iterdir()}
        found = read = 0
        for question, fact in facts:
            results = find(question)
            found += any(fact in unwrapped(notes[d.id.partition("#")[0]]) for d in results)
            read += any(fact in unwrapped(shown(d.text, passage_words)) for d in results)
    return found, read


def shown(text: str, passage_words: int) -> str:
    if passage_words:
        return text
    return " ".join(text.split()[:SHOWN])


def unwrapped(text: str) -> str:
    return " ".join(text.split())


# Speed -----------------------------------------------------------------------------------------


def write_corpus(path: Path, documents: int) -> tuple[list[str], list[str]]:
    """Writes the JSONL file; returns the questions and the names to search for."""
    rng = np.random.default_rng(0)
    chance = 1 / np.arange(1, VOCABULARY + 1)
    chance /= chance.sum()
    with open(path, "w") as file:
        for i in range(documents):
            count = max(10, round(rng.normal(100, 30)))
            words = rng.choice(VOCABULARY, size=count, p=chance)
            row = {"id": f"{i:07}", "contents": " ".join(f"w{word}" for word in words)}
            file.write(json.dumps(row) + "\n")
    questions = []
    for _ in range(QUERIES):
        words = rng.choice(VOCABULARY, size=10, p=chance)
        questions.append(" ".join(f"w{word}" for word in words))
    names = []
    for _ in range(QUERIES):
        words = rng.integers(1_000, 20_000, size=2)
        names.append(" ".join(f"w{word}" for word in words))
    return questions, names


def build_fts5(jsonl: Path, path: Path) -> None:
    with sqlite3.connect(path) as database, open(jsonl) as file:
        database.execute("CREATE VIRTUAL TABLE documents USING fts5(id UNINDEXED, text)")
        rows = (json.loads(line) for line in file)
        pairs = ((row["id"], row["contents"]) for row in rows)
        database.executemany("INSERT INTO documents VALUES (?, ?)", pairs)
    database.close()


def open_fts5(path: Path):
    database = sqlite3.connect(path)

    def find(query: str) -> list[tuple[str, str]]:
        match = " OR ".join(f'"{word}"' for word in query.split())
        sql = f"SELECT id, text FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT {K}"
        return database.execute(sql, [match]).fetchall()

    return find


def clocked(function):
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def measure_speed(count: int, rounds: int) -> tuple[list[dict], float]:
    """(a row for each search, the share of a question's results that both find)."""
    with tempfile.TemporaryDirectory() as folder:
        jsonl = Path(folder) / "corpus.jsonl"
        database = Path(folder) / "fts5.db"
        questions, names = write_corpus(jsonl, count)
        _, build_ours = clocked(lambda: search.local(jsonl, K, folder))
        ours, open_ours = clocked(lambda: search.local(jsonl, K, folder))
        _, build_theirs = clocked(lambda: build_fts5(jsonl, database))
        theirs, open_theirs = clocked(lambda: open_fts5(database))

        runs = {}
        for kind, queries in (("question", questions), ("name", names)):
            for name, find in (("local", ours), ("fts5", theirs)):
                runs[name, kind] = lambda find=find, queries=queries: list(map(find, queries))
        times = common.interleaved(runs, rounds=rounds)

        overlaps = []
        for question in questions:
            own = {document.id for document in ours(question)}
            other = {row[0] for row in theirs(question)}
            overlaps.append(len(own & other) / K)

    milliseconds = {}
    for key, values in times.items():
        spread = common.spread([1e3 * seconds / QUERIES for seconds in values])
        milliseconds[key] = spread["median"]
    rows = []
    for name, build, opening in (
        ("local", build_ours, open_ours),
        ("fts5", build_theirs, open_theirs),
    ):
        row = {"search": name, "documents": count, "build_s": build, "open_s": opening}
        row["question_ms"] = milliseconds[name, "question"]
        row["name_ms"] = milliseconds[name, "name"]
        rows.append(row)
    return rows, float(np.mean(overlaps))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument(
        "--quick", action="store_true", help="2,000 documents, 2 rounds, no file written"
    )
    options = parser.parse_args()

    reading = []
    for long in (True, False):
        for passage_words in (200, 0):
            found, read = count_read(long, passage_words)
            notes = f"{LONG if long else SHORT} words"
            unit = f"{passage_words} words" if passage_words else "whole"
            reading.append({"notes": notes, "unit": unit, "found of 10": found, "read of 10": read})
    print(common.table(reading))

    count = 2_000 if options.quick else options.documents
    rows, overlap = measure_speed(count, rounds=2 if options.quick else 5)
    print(common.table(rows))
    print(f"the two agree on {overlap:.0%} of a question's {K} best")
    print(f"sqlite {sqlite3.sqlite_version}")
    if not options.quick:
        command = " ".join(["python -m bench.search", *sys.argv[1:]])
        version = sqlite3.sqlite_version
        extra = {"sqlite": version, "overlap": overlap, "facts": reading}
        print(common.save("search", command, rows, **extra))


if __name__ == "__main__":
    main()
