"""Local search against SQLite's FTS5: time to build the index from a JSONL file, to open it again, and of a query.

Documents and queries are invented: words drawn by Zipf's law, 100 a document on average. A *question* is ten words
drawn like the text itself, common ones included; a *name* is two rare words. FTS5 gets the query as an OR of its words,
ranked by its own bm25 (k1 = 1.2; ours is 1.5), so the two lists need not be equal: their overlap is printed. CPU time,
medians of interleaved rounds.

    python -m bench.search [--documents 100000] [--quick]
"""
import argparse
import json
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench import common
from tools import search

K, QUERIES, VOCABULARY = 10, 20, 100_000


def write_corpus(path: Path, documents: int) -> tuple[list[str], list[str]]:
    """Writes the JSONL file; returns the questions and the names to search for."""
    rng = np.random.default_rng(0)
    chance = 1 / np.arange(1, VOCABULARY + 1)
    chance /= chance.sum()
    with open(path, "w") as file:
        for i in range(documents):
            words = rng.choice(VOCABULARY, size=max(10, round(rng.normal(100, 30))), p=chance)
            file.write(json.dumps({"id": f"{i:07}", "contents": " ".join(f"w{word}" for word in words)}) + "\n")
    questions = [" ".join(f"w{w}" for w in rng.choice(VOCABULARY, size=10, p=chance)) for _ in range(QUERIES)]
    names = [" ".join(f"w{w}" for w in rng.integers(1_000, 20_000, size=2)) for _ in range(QUERIES)]
    return questions, names


def build_fts5(jsonl: Path, path: Path) -> None:
    with sqlite3.connect(path) as database, open(jsonl) as file:
        database.execute("CREATE VIRTUAL TABLE documents USING fts5(id UNINDEXED, text)")
        rows = (json.loads(line) for line in file)
        database.executemany("INSERT INTO documents VALUES (?, ?)", ((row["id"], row["contents"]) for row in rows))
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="2,000 documents, 2 rounds, no file written")
    options = parser.parse_args()
    count = 2_000 if options.quick else options.documents
    with tempfile.TemporaryDirectory() as folder:
        jsonl, database = Path(folder) / "corpus.jsonl", Path(folder) / "fts5.db"
        questions, names = write_corpus(jsonl, count)
        _, build_ours = clocked(lambda: search.local(jsonl, K, folder))
        ours, open_ours = clocked(lambda: search.local(jsonl, K, folder))
        _, build_theirs = clocked(lambda: build_fts5(jsonl, database))
        theirs, open_theirs = clocked(lambda: open_fts5(database))
        runs = {(name, kind): lambda find=find, queries=queries: [find(query) for query in queries]
                for kind, queries in (("question", questions), ("name", names))
                for name, find in (("local", ours), ("fts5", theirs))}
        times = common.interleaved(runs, rounds=2 if options.quick else 5)
        shared = np.mean([len({d.id for d in ours(q)} & {row[0] for row in theirs(q)}) / K for q in questions])
    milliseconds = {key: common.spread([1e3 * t / QUERIES for t in values])["median"] for key, values in times.items()}
    rows = [{"search": name, "documents": count, "build_s": build, "open_s": opening,
             "question_ms": milliseconds[name, "question"], "name_ms": milliseconds[name, "name"]}
            for name, build, opening in (("local", build_ours, open_ours), ("fts5", build_theirs, open_theirs))]
    print(common.table(rows))
    print(f"the two agree on {shared:.0%} of a question's {K} best; sqlite {sqlite3.sqlite_version}")
    if not options.quick:
        command = " ".join(["python -m bench.search", *sys.argv[1:]])
        print(common.save("search", command, rows, sqlite=sqlite3.sqlite_version, overlap=shared))


if __name__ == "__main__":
    main()
