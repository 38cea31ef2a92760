"""Search, its client and its page reader, against documents in memory and loopback servers that misbehave."""
import contextlib
import datetime
import email.message
import email.utils
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config import UserError
from tools import Document, ToolError, search, web

KEY = "sk-very-secret"
ROW = {"title": "Ada", "link": "http://site.test/ada", "snippet": "born 1968"}
ECHO = {"searchParameters": {"q": "ada", "type": "search"}}


def document(id, text, title=""):
    return Document(id, title, "", text)


def ids(documents):
    return [document.id for document in documents]


# A loopback server that does what it is told ------------------------------------------------------------------------

class Loopback(ThreadingHTTPServer):
    """Answers the n-th request with replies[n], the last one for ever; a reply is a function of the request handler."""
    daemon_threads = True

    def __init__(self):
        self.replies, self.requests, self.lock = [], [], threading.Lock()
        self.released = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.close_connection = True
        with server.lock:
            number = len(server.requests)
            server.requests.append((self.command, self.path, dict(self.headers), json.loads(body) if body else None))
        server.replies[min(number, len(server.replies) - 1)](self)

    do_POST = do_GET

    def log_message(self, *_):
        pass


def says(body, status=200, headers=(), kind="application/json", promise=None):
    """A reply. body: bytes, text, or what JSON can hold. promise: a Content-Length other than the true one."""
    body = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()

    def reply(handler):
        handler.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", promise or len(body)), *dict(headers).items()):
            handler.send_header(name, str(value))
        handler.end_headers()
        handler.wfile.write(body)
    return reply


def hangs(handler):
    handler.server.released.wait(20)


def drops(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


def cut_chunks(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n{\"org\r\n")


def drips(beginning):
    def reply(handler):
        with contextlib.suppress(OSError):
            handler.wfile.write(beginning)
            while not handler.server.released.wait(0.05):
                handler.wfile.write(b"x")
    return reply


def routes(pages):
    """A reply chosen by path; 404 for a path without one."""
    return lambda handler: pages.get(handler.path, says("no such page", 404))(handler)


@pytest.fixture
def server(monkeypatch):
    server = Loopback()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    for variable in search.URLS:
        monkeypatch.setenv(variable, server.url)
    for variable in ("SERPER_API_KEY", "JINA_API_KEY"):
        monkeypatch.setenv(variable, KEY)
    monkeypatch.setenv("no_proxy", "*")
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def waits(monkeypatch):
    """The client's pauses, taken down instead of slept."""
    waits = []
    monkeypatch.setattr(web.time, "sleep", waits.append)
    return waits


def serper(tmp_path, **options):
    return search.make("serper", **{"cache": tmp_path / "cache", "timeout": 5, **options})


# Local ----------------------------------------------------------------------------------------------------------------

def test_small_words_numbers_case_and_other_scripts_are_found():
    corpus = [document("c", "Vitamin C is sour."), document("d", "Vitamin D is not."),
              document("8", "Apollo 8 flew 1968"), document("who", "The Who"),
              document("é", "CAFÉ au lait"), document("京", "東京都に行く")]
    find = search.local(corpus, k=1)
    for query, expected in [("vitamin c", "c"), ("VITAMIN d", "d"), ("8", "8"), ("the who", "who"), ("café", "é"),
                            ("東京", "京"), ("apollo-8?", "8")]:
        assert ids(find(query)) == [expected]
    for query in ("", "   ", "?!", "nothing here"):
        assert find(query) == []


words = st.lists(st.sampled_from("a b c 1 22 the zebra".split()), max_size=8).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(words, min_size=1, max_size=12), words, st.integers(1, 15))
def test_local_is_bm25_sorted_by_score_then_id(texts, query, k):
    texts = [*texts, "a zebra"]                                         # a corpus without a word is an error of its own
    names = [f"{i * 7 % 13:02}" for i in range(len(texts))]
    split, average = [t.split() for t in texts], sum(len(t.split()) for t in texts) / len(texts)

    def score(text):
        total = 0
        for word in query.split():
            df, tf = sum(word in t for t in split), text.count(word)
            idf = math.log(1 + (len(texts) - df + 0.5) / (df + 0.5))
            total += idf * tf / (tf + 1.5 * (0.25 + 0.75 * len(text) / average))
        return round(total, 4)                                          # float32 sums: ties need room
    expected = sorted((-score(text), name) for text, name in zip(split, names) if score(text) > 0)
    found = ids(search.local([document(n, t) for n, t in zip(names, texts)], k)(query))
    by_name = dict(zip(names, split))
    assert [-score(by_name[name]) for name in found] == [s for s, _ in expected][:k]
    for one, other in zip(found, found[1:]):
        assert sorted(by_name[one]) != sorted(by_name[other]) or one < other


def test_equal_documents_come_by_id_whatever_order_they_were_given_in():
    corpus = [document(f"{i:02}", "same words") for i in range(40)]
    assert ids(search.local(corpus[::-1], k=5)("words")) == ["00", "01", "02", "03", "04"]


def test_a_toy_world_is_indexed_and_searched_fast():
    corpus = [document(str(i), " ".join(f"w{i * j % 371}" for j in range(40))) for i in range(1400)]
    start = time.process_time()
    find = search.local(corpus, k=3)
    assert time.process_time() - start < 1
    start = time.process_time()
    for i in range(100):
        find(f"w{i} w{i + 1} w{i + 2}")
    assert (time.process_time() - start) / 100 < 1e-3


def write_jsonl(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


ROWS = [{"id": 2, "contents": '"Ada Baker"\nborn 1968'},
        {"id": "b", "title": "Bob", "contents": "born 1970", "url": "u"},
        {"id": "c", "contents": "one line \ud83d only\u2028born"}]


def test_jsonl_is_read_with_its_titles_and_survives_half_characters(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [ROWS[0], "", *ROWS[1:]])
    two, bob, c = sorted(search.local(path, 9)("born"), key=lambda d: d.id)
    assert two == Document("2", "Ada Baker", "", "born 1968") and bob == Document("b", "Bob", "u", "born 1970")
    assert c.title == "" and c.text == "one line ? only\u2028born"
    assert ids(search.local(path, 9)("baker")) == ["2"]                 # the title is searched as well


def test_a_folder_of_text_is_read_below_too(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.TXT").write_text("\ufeffapples", encoding="utf-8")
    (tmp_path / "deep" / "b.md").write_text("# Bread\napples")
    (tmp_path / "c.pdf").write_text("apples")
    found = search.local(tmp_path, 9)("apples")
    assert [(d.id, d.title) for d in found] == [("a.TXT", "a"), ("deep/b.md", "b")] and found[0].text == "apples"


@pytest.mark.parametrize("line, reason", [
    ("{", "line 2"), ("[1]", "not a JSON object"), ('{"contents": "x"}', "no id"),
    ('{"id": true, "contents": "x"}', "no id"), ('{"id": 1}', "no contents"),
    ('{"id": 1, "contents": 5}', "no contents"), ('{"id": 1, "contents": "", "title": 5}', "title"),
    ('{"id": "0", "contents": "again"}', "line 1 already")])
def test_a_malformed_line_is_named(tmp_path, line, reason):
    path = write_jsonl(tmp_path / "d.jsonl", [{"id": 0, "contents": "fine"}, line])
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(UserError, match=reason) as caught:
            search.local(path, 1, cache)
        assert "d.jsonl, line 2" in str(caught.value)


def test_documents_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "x.txt").write_bytes(b"caf\xe9")
    (tmp_path / "file").write_text("")
    good = write_jsonl(tmp_path / "d.jsonl", ROWS)
    for path in (*map(tmp_path.joinpath, ("none", "empty", "latin", "file")), [], [document("1", "?!")]):
        with pytest.raises(UserError):
            search.local(path, 1)
    with pytest.raises(UserError, match="cache folder"):
        search.local(good, 1, tmp_path / "file")
    with pytest.raises(UserError, match="k is 0"):
        search.local(good, 0)


def test_the_index_on_disk_answers_as_the_one_in_memory_and_is_built_once(tmp_path, monkeypatch):
    rows = [{"id": f"{i:03}", "title": f"t{i % 7}", "contents": f"a{i % 5} b{i % 3} é"} for i in range(60)]
    path, cache = write_jsonl(tmp_path / "d.jsonl", rows), tmp_path / "deep" / "cache"
    memory, built = search.local(path, 7), search.local(path, 7, cache)
    with monkeypatch.context() as patch:
        patch.setattr(search, "_build", lambda *_: pytest.fail("built again"))
        loaded = search.local(path, 7, cache)
        assert ids(search.local(path, 99, cache)("é")) == [row["id"] for row in rows]
    for query in ("a1 b2", "t3", "é", "nothing", "a0 a0 t0"):
        assert memory(query) == built(query) == loaded(query)
    write_jsonl(path, [*rows, {"id": "new", "contents": "fresh"}])
    assert ids(search.local(path, 7, cache)("fresh")) == ["new"]


def test_a_build_that_dies_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    path, cache = write_jsonl(tmp_path / "d.jsonl", ROWS), tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(search.np, "save", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            search.local(path, 1, cache)
    assert not [f for f in cache.iterdir() if f.is_dir()]
    assert ids(search.local(path, 1, cache)("bob")) == ["b"]


def test_eight_ranks_build_one_index(tmp_path, monkeypatch):
    path, cache, build = write_jsonl(tmp_path / "d.jsonl", ROWS), tmp_path / "cache", search._build

    def slow_build(*arguments):
        (tmp_path / f"built-by-{os.getpid()}").touch()
        time.sleep(0.2)                                                 # so that all others arrive meanwhile
        build(*arguments)
    monkeypatch.setattr(search, "_build", slow_build)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def rank():
        answers.put([d.id for d in search.local(path, 3, cache)("born bob")])
    ranks = [context.Process(target=rank) for _ in range(8)]
    for process in ranks:
        process.start()
    assert [answers.get(timeout=30) for _ in ranks] == [ids(search.local(path, 3)("born bob"))] * 8
    for process in ranks:
        process.join()
    assert len(list(tmp_path.glob("built-by-*"))) == 1 and len([f for f in cache.iterdir() if f.is_dir()]) == 1


# The client -----------------------------------------------------------------------------------------------------------

GOOD = says({"organic": [ROW]})


def test_serper_is_asked_as_documented(server, tmp_path):
    server.replies = [GOOD]
    assert serper(tmp_path, k=3)("ada") == [Document(ROW["link"], "Ada", ROW["link"], "born 1968")]
    serper(tmp_path, k=4, scholar=True)("ada")
    (method, path, headers, body), (_, scholar, _, other) = server.requests
    assert (method, path, body) == ("POST", "/search", {"q": "ada", "num": 3})
    assert (scholar, other) == ("/scholar", {"q": "ada", "num": 4})
    sent = {name.lower(): value for name, value in headers.items()}
    assert sent["x-api-key"] == KEY and sent["content-type"] == "application/json"


@pytest.mark.parametrize("bad", [
    says("slow down", 429), says("", 408), says("oops", 500), says("", 503), drops, cut_chunks,
    says('{"organic": []}', promise=99), says("<html>"), says(""), says("[" * 100_000), says([]), says({}),
    says({"organic": 5}), says({"organic": [5]}), says({"organic": None}),
    says({"message": "Not enough credits", "statusCode": 400})])
def test_what_may_pass_is_tried_again_and_never_kept_or_taken_for_nothing_found(server, tmp_path, waits, bad):
    server.replies = [bad]
    find = serper(tmp_path, tries=3)
    with pytest.raises(ToolError, match="3 tries"):
        find("ada")
    assert len(server.requests) == 3 and len(waits) == 2
    server.replies = [bad] * 4 + [GOOD]
    assert len(find("ada")) == 1 and len(server.requests) == 5


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 302])
def test_a_refusal_is_final_and_does_not_show_the_key(server, tmp_path, waits, status):
    server.replies = [says(f"no credit for {KEY}", status, {"Location": f"{server.url}/elsewhere"})]
    with pytest.raises(ToolError, match=f"HTTP {status}") as caught:
        serper(tmp_path)("ada")
    assert len(server.requests) == 1 and not waits                      # nor was the key carried to another address
    assert KEY not in str(caught.value) and "no credit for ***" in str(caught.value) and "\n" not in str(caught.value)


def test_pauses_grow_and_jitter_and_last_as_long_as_asked(server, tmp_path, waits):
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    server.replies = [says("", 500), says("", 500), says("", 429, {"Retry-After": "20"}),
                      says("", 503, {"Retry-After": email.utils.format_datetime(soon, usegmt=True)}),
                      says("", 429, {"Retry-After": "86400"}), GOOD]
    serper(tmp_path, tries=6, pause=1)("ada")
    assert 0.5 <= waits[0] <= 1 <= waits[1] <= 2
    assert waits[2] == 20 and 25 < waits[3] <= 30 and waits[4] == web.LONGEST_WAIT
    server.replies = [says("", 500)]
    for _ in range(5):
        with pytest.raises(ToolError):
            serper(tmp_path, tries=2)("other")
    assert len(set(waits[5:])) == 5


@pytest.mark.parametrize("header", [None, "", "soon", "-5", "nan", "1e9", "Wed, 21 Oct 2015 07:28:00 GMT",
                                    "Wed, 99 Oct 2015"])
def test_a_retry_after_that_says_nothing_useful_asks_for_no_wait(header):
    assert web.retry_after(header) == 0


@pytest.mark.parametrize("reply", [hangs, drips(b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n")])
def test_a_silent_or_dripping_service_times_out(server, tmp_path, waits, reply):
    server.replies = [reply]
    start = time.monotonic()
    with pytest.raises(ToolError, match="timed out"):
        serper(tmp_path, timeout=0.3, tries=2)("ada")
    assert time.monotonic() - start < 4 and len(server.requests) == 2


def test_no_service_at_all_is_a_failure(tmp_path, monkeypatch, waits):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MARS_RETRIEVER_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ToolError, match="refused, 2 tries"):
            search.make("retriever", cache=None, tries=2)("ada")


def test_good_answers_are_kept_without_the_key_and_serve_offline(server, tmp_path, monkeypatch):
    server.replies = [GOOD]
    first = serper(tmp_path)("ada")
    assert serper(tmp_path)("ada") == first and len(server.requests) == 1
    file, = [f for f in (tmp_path / "cache").rglob("*") if f.is_file()]
    name = hashlib.sha256(json.dumps([f"{server.url}/search", {"num": 5, "q": "ada"}]).encode()).hexdigest()
    assert file.name == f"{name}.json" and KEY not in file.read_text()
    monkeypatch.delenv("SERPER_API_KEY")
    offline = serper(tmp_path, offline=True)
    assert offline("ada") == first
    with pytest.raises(ToolError, match="offline"):
        offline("bob")
    file.write_text(file.read_text()[:20])                              # a disk that was full
    with pytest.raises(ToolError, match="offline"):
        offline("ada")
    assert len(server.requests) == 1
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    assert serper(tmp_path)("ada") == first and offline("ada") == first and len(server.requests) == 2


def test_nothing_found_is_kept_like_any_answer(server, tmp_path):
    server.replies = [says(ECHO)]
    assert serper(tmp_path)("ada") == serper(tmp_path)("ada") == []
    assert serper(tmp_path)("  ") == [] and len(server.requests) == 1


def test_at_most_so_many_calls_at_once_and_threads_share_the_cache_unharmed(server, tmp_path):
    under_way, seen, lock = [], [], threading.Lock()

    def slowly(handler):
        with lock:
            under_way.append(handler)
            seen.append(len(under_way))
        time.sleep(0.05)
        with lock:
            under_way.remove(handler)                       # before the answer goes out, which is what frees the client's slot
        GOOD(handler)
    server.replies = [slowly]
    find = serper(tmp_path, parallel=3)
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(find, [f"q{i % 6}" for i in range(24)]))
    assert all(len(answer) == 1 for answer in answers) and max(seen) == 3
    files = [f for f in (tmp_path / "cache").rglob("*") if f.is_file()]
    assert len(files) == 6 and all(json.loads(f.read_text()) for f in files)


@pytest.mark.parametrize("reply, outcome", [(GOOD, 1), (says("bad key", 401), "bad key")])
def test_equal_requests_under_way_are_sent_once_and_share_the_outcome(server, tmp_path, reply, outcome):
    """A group's first searches: one is paid for. A failure is shared too, and tried anew by who asks later."""
    def slowly(handler):
        time.sleep(0.3)
        reply(handler)
    server.replies = [slowly]
    find = serper(tmp_path)

    def ask(_):
        try:
            return len(find("ada"))
        except ToolError as error:
            return "bad key" if "bad key" in str(error) else str(error)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == [outcome] * 8
    assert len(server.requests) == 1
    assert ask(0) == outcome and len(server.requests) == (1 if outcome == 1 else 2)


# Wire formats ---------------------------------------------------------------------------------------------------------

def test_every_field_of_serper_is_optional():
    rows = [{}, {"title": None, "link": 5}, {"snippet": "s", "date": "May 2020"}, {"title": "half \ud83d"}]
    found = search.serper_documents({"organic": rows})
    assert [(d.title, d.url, d.text) for d in found] == [
        ("", "", ""), ("", "5", ""), ("", "", "May 2020\ns"), ("half ?", "", "")]
    assert len(set(ids(found))) == 4
    assert search.serper_documents(ECHO) == search.serper_documents({"organic": []}) == []


def test_scholar_says_who_when_and_how_often_cited():
    row = {"title": "T", "link": "l", "snippet": "s", "publicationInfo": "A Baker - Nature, 2015", "year": 2015,
           "citedBy": 12}
    other = {"publicationInfo": {"summary": "B Cohen"}, "year": "2016", "citedBy": {"total": 3},
             "pdfUrl": "http://p/x.pdf"}
    one, two = search.serper_documents({"organic": [row, other]})
    assert one.text == "A Baker - Nature, 2015\nCited by 12\ns"
    assert two.text == "B Cohen\n2016\nCited by 3" and two.url == two.id == "http://p/x.pdf"


@pytest.mark.parametrize("row, expected", [
    ({"document": {"id": "7", "contents": '"Ada"\nborn'}, "score": 1.5}, ("7", "Ada", "born")),
    ({"document": {"id": 7, "contents": '"Ada"\nborn'}}, ("7", "Ada", "born")),
    ({"id": "7", "contents": "no title\nborn"}, ("7", "", "no title\nborn")),
    ({"id": "7", "title": "Ada", "text": "born", "url": "u"}, ("7", "Ada", "born")),
    ({"id": "7", "title": "Ada", "contents": ""}, ("7", "Ada", "")),
    ({"document": '"Ada"\nborn', "score": 1}, (None, "Ada", "born")), ('"Ada"\nborn', (None, "Ada", "born")),
    ('"quoted"', (None, "", '"quoted"'))])
def test_every_form_of_the_retriever_is_read(server, tmp_path, row, expected):
    server.replies = [says({"result": [[row, row, row]]})]
    found = search.make("retriever", k=2, cache=None)("ada")
    assert len(found) == 2 and (found[0].title, found[0].text) == expected[1:]
    assert found[0].id == (expected[0] or found[1].id)
    assert server.requests[0][1:2] + server.requests[0][3:] == (
        "/retrieve", {"queries": ["ada"], "topk": 2, "return_scores": True})


@pytest.mark.parametrize("answer", [
    [], {}, {"result": None}, {"result": []}, {"result": [[], []]}, {"result": [{"a": 1}]}, {"result": [[5]]},
    {"result": [[{"score": 1}]]}, {"result": [[{"document": None}]]}, {"result": [[{"contents": 5}]]},
    {"detail": "Internal"}])
def test_other_answers_of_a_retriever_are_failures(server, waits, answer):
    server.replies = [says(answer)]
    with pytest.raises(ToolError, match="not what was asked for"):
        search.make("retriever", cache=None, tries=1)("ada")
    server.replies = [says({"result": [[]]})]
    assert search.make("retriever", cache=None, tries=1)("ada") == []


# Pages ----------------------------------------------------------------------------------------------------------------

def found(*links):
    return says({"organic": [{"title": link, "link": link, "snippet": f"snippet {link}"} for link in links]})


def test_jina_reads_the_pages_that_were_found(server, tmp_path, waits):
    one, two = "http://a.test/x?y=1&z=é#part", "http://b.test/"
    server.replies = [found(one, "", two), routes({"/http://a.test/x?y=1&z=%C3%A9": says("# Ada\nborn 1968"),
                                                   "/http://b.test/": says("busy", 500)})]
    ada, bare, bob = serper(tmp_path, pages="jina")("ada")
    assert ada == Document(one, one, one, "# Ada\nborn 1968") and bare.text == "snippet "
    assert bob.text == f"{search.UNREAD}\nsnippet {two}"
    headers = {name.lower(): value for name, value in server.requests[1][2].items()}
    assert headers["authorization"] == f"Bearer {KEY}" and "x-api-key" not in headers
    server.replies = [says("# Bob\nborn 1970")]                         # the failure was not kept, the rest was
    before = len(server.requests)
    assert serper(tmp_path, pages="jina")("ada")[2].text == "# Bob\nborn 1970" and len(server.requests) == before + 1
    assert not any(KEY in f.read_text() for f in (tmp_path / "cache").rglob("*.json"))


GONE = "Title: Ada\n\nURL Source: http://a.test/\n\nWarning: Target URL returned error 404: Not Found\n\nMarkdown Content:\n# 404"
EMPTY = "Title: Ada\n\nURL Source: http://a.test/\n\nMarkdown Content:\n "


@pytest.mark.parametrize("reply", [says("bad key", 401), says("", 500), says(" \n"), says("half", promise=99), says(GONE),
                                   says(EMPTY)])
def test_no_page_read_at_all_is_a_failed_search(server, tmp_path, waits, reply):
    server.replies = [found("http://a.test/", "http://b.test/"), reply]
    with pytest.raises(ToolError, match="none of the 2 pages"):
        serper(tmp_path, pages="jina")("ada")
    server.replies = [says(ECHO)]
    assert serper(tmp_path, pages="jina")("nothing") == []


@pytest.mark.parametrize("host", [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "2130706433", "0x7f.1", "localhost", "::1", "::", "fe80::1", "fd00::1", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "2002:7f00:1::", "::7f00:1",
    "192.0.0.192", "168.63.129.16"])
def test_addresses_that_are_not_public_are_refused(host):
    with pytest.raises(ToolError, match="not on the public internet"):
        web.public_addresses(host, 80)
    with pytest.raises(ToolError, match="not on the public internet"):
        web.page(f"http://[{host}]/" if ":" in host else f"http://{host}/", None, {}, 1)


def test_public_addresses_are_allowed_unless_one_of_several_is_not(monkeypatch):
    assert web.public_addresses("8.8.8.8", 80) == ["8.8.8.8"]
    assert web.public_addresses("2606:4700:4700::1111", 443) == ["2606:4700:4700::1111"]
    with pytest.raises(ToolError, match="ports 80 and 443"):
        web.public_addresses("8.8.8.8", 8000)
    both = [(0, 0, 0, "", ("8.8.8.8", 80)), (0, 0, 0, "", ("127.0.0.1", 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with pytest.raises(ToolError, match="public internet"):
        web.public_addresses("two.test", 80)


def test_a_second_dns_answer_cannot_move_the_connection(monkeypatch):
    names, dialled = [], []

    def rebinding(host, *_, **__):
        names.append(host)
        return [(0, 0, 0, "", ("8.8.8.8" if len(names) == 1 else "127.0.0.1", 80))]

    def dial(address, timeout):
        dialled.append(address)
        raise OSError("no network in a test")
    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(socket, "create_connection", dial)
    with pytest.raises(OSError, match="no network"):
        web.page("http://rebind.test/", None, {}, 1)
    assert names == ["rebind.test"] and dialled == [("8.8.8.8", 80)]


def only_site(host, port):
    """A resolver for tests: site.test is this machine, everything else is judged as ever."""
    return ["127.0.0.1"] if host == "site.test" else web.public_addresses(host, port)


def read(server, path, **options):
    return web.page(f"http://site.test:{server.server_port}{path}", None, {}, 5, resolve=only_site, **options)


@pytest.mark.parametrize("target", [
    "http://127.0.0.1:{port}/secret", "http://localhost:{port}/secret", "//127.0.0.1:{port}/secret",
    "http://0x7f.1:{port}/secret", "http://[::ffff:127.0.0.1]:{port}/secret", "file:///etc/passwd",
    "ftp://site.test:{port}/secret", "http://site.test:{port}@127.0.0.1:{port}/secret"])
def test_a_redirect_to_a_private_address_is_refused_before_it_is_followed(server, tmp_path, target):
    target = target.format(port=server.server_port)
    secret = says("the secret", kind="text/plain")
    server.replies = [routes({"/": says("", 302, {"Location": target}), "/secret": secret})]
    with pytest.raises((ToolError, OSError)):
        read(server, "/")
    assert [path for _, path, _, _ in server.requests] == ["/"]


def test_ordinary_redirects_are_followed_but_not_for_ever(server):
    server.replies = [routes({
        "/": says("", 301, {"Location": "b c?q=é"}), "/b%20c?q=%C3%A9": says("", 307, {"Location": "/end"}),
        "/end": says("here", kind="text/plain"), "/loop": says("", 302, {"Location": "/loop"})})]
    assert read(server, "/")[0] == b"here"
    host = {name.lower(): value for name, value in server.requests[-1][2].items()}["host"]
    assert host == f"site.test:{server.server_port}"
    with pytest.raises(ToolError, match="without end"):
        read(server, "/loop")
    assert len(server.requests) == 3 + 6


def test_a_page_of_5_mb_is_cut_not_refused(server, tmp_path):
    server.replies = [says("<p>" + "fact " * 1_000_000, kind="text/html")]
    raw, headers = read(server, "/")
    assert len(raw) == 2 << 20 and web.page_text(raw, headers).startswith("fact fact")


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200 OK\r\nX-Header: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_dripping_page_is_not_waited_for(server, beginning):
    server.replies = [drips(beginning)]
    start = time.monotonic()
    with pytest.raises((OSError, ToolError, web.http.client.HTTPException)):
        web.page(f"http://site.test:{server.server_port}/", None, {}, 0.4, resolve=only_site)
    assert time.monotonic() - start < 4


def test_search_and_direct_reading_end_to_end(server, tmp_path, waits):
    base = f"http://site.test:{server.server_port}"
    links = [f"{base}/good", f"{base}/file.pdf", f"{base}/gone", f"{base}/trap", "javascript:alert(1)"]
    good = "<title>Ada</title><script>no()</script><p>born <b>1968</b>, see <a href='/other'>more</a>"
    server.replies = [found(*links), routes({
        "/good": says(good, kind="text/html"),
        "/file.pdf": says(b"%PDF", kind="application/pdf"),
        "/trap": says("", 302, {"Location": f"{server.url}/secret"}), "/secret": says("secret", kind="text/plain")})]
    find = serper(tmp_path, pages="fetch", resolve=only_site)
    good, *others = find("ada")
    assert good.text == "Ada\nborn 1968, see more"
    assert [d.text for d in others] == [f"{search.UNREAD}\nsnippet {link}" for link in links[1:]]
    assert {path for _, path, _, _ in server.requests} == {"/search", "/good", "/file.pdf", "/gone", "/trap"}
    assert KEY not in str(server.requests[1:])
    before = len(server.requests)
    assert serper(tmp_path, pages="fetch", offline=True)("ada") == [good, *others] and len(server.requests) == before


@pytest.mark.parametrize("link", [
    "http://[bad", "http://x:99999/", "http://", "mailto:a@b", "http://half\ud83d.test/", "é", "http://no\0.test/",
    "http://" + "x" * 70 + ".test/", "http://no such.test/"])
def test_a_link_that_is_none_is_a_page_that_cannot_be_read(server, tmp_path, waits, link):
    server.replies = [found(link)]
    with pytest.raises(ToolError, match="none of the 1 pages"):
        serper(tmp_path, pages="fetch")("ada")


def test_without_the_injected_resolver_loopback_pages_are_never_read(server, tmp_path):
    server.replies = [found(f"{server.url}/secret"), says("the secret", kind="text/plain")]
    with pytest.raises(ToolError, match="not on the public internet"):
        serper(tmp_path, pages="fetch")("ada")
    assert [path for _, path, _, _ in server.requests] == ["/search"]


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes its certificate with openssl")
def test_a_page_over_tls_is_checked_by_its_name(server, tmp_path, monkeypatch):
    cert, key = str(tmp_path / "cert"), str(tmp_path / "key")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "1", "-subj", "/CN=site.test", "-addext", "subjectAltName=DNS:site.test",
                    "-keyout", key, "-out", cert], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.replies = [says("hello", kind="text/plain")]
    monkeypatch.setattr(web, "_tls", lambda: ssl.create_default_context(cafile=cert))
    url = f"https://{{}}:{server.server_port}/"
    assert web.page(url.format("site.test"), None, {}, 5, resolve=only_site)[0] == b"hello"
    with pytest.raises(ssl.SSLCertVerificationError):
        web.page(url.format("other.test"), None, {}, 5, resolve=lambda *_: ["127.0.0.1"])


def headers(kind, **more):
    message = email.message.Message()
    message["Content-Type"] = kind
    for name, value in more.items():
        message[name.replace("_", "-")] = value
    return message


@pytest.mark.parametrize("raw, kind", [
    ("café".encode(), "text/html"), ("café".encode("latin-1"), "text/html; charset=latin-1"),
    (b'<meta charset="windows-1252">caf\xe9', "text/html"), ("café".encode(), "text/plain; charset=no-such"),
    ("café".encode(), "text/plain; charset=punycode"), ("café".encode("utf-16"), "text/plain; charset=utf-16"),
    (b'<meta http-equiv=x content="text/html; charset=iso-8859-1">caf\xe9', "application/xhtml+xml")])
def test_pages_are_decoded_as_they_declare(raw, kind):
    assert web.page_text(raw, headers(kind)) == "café"


def test_pages_without_text_are_failures():
    for kind, more in (("application/pdf", {}), ("image/png", {}), ("text/html", {"Content_Encoding": "gzip"})):
        with pytest.raises(ToolError):
            web.page_text(b"x", headers(kind, **more))
    with pytest.raises(ValueError):
        web.page_text(b"<script>x</script> <p>", headers("text/html"))


def test_html_keeps_every_fact_and_drops_scripts():
    page = """<!doctype html><html><head><title>A &amp; B</title><STYLE>p > a {x}</STYLE>
      <script type="x">if (a < b) "</p><b>no"</script ></head><body onload="a>b" title='c>d'>
      <h1>Born <b>19</b>68</h1>In
      Paris<br/>caf&eacute;&nbsp;bar<table><tr><td>x</td><td>1</td></tr><tr><th>y</th><td>2</td></tr></table>
      <pre>def f():\n    return 1 &lt; 2</pre>5 < 6 &amp;lt; 7<!-- no <b>no</b> --><script-like>kept</script-like>
      <ul><li>one<li>two"""
    assert web.html_to_text(page).split("\n") == [
        "A & B", "Born 1968", "In Paris", "café bar", "x  1", "y  2", "def f():", "    return 1 < 2",
        "5 < 6 &lt; 7kept", "one", "two"]


marks = st.sampled_from(["<p>", "</div>", "<a href='x>y'>", "<b x=1>", "<!-- no -->", "<script>no</script>", "<br>",
                         "<style>no</style>", "<?no?>", "</ no>", "<td\n>", '<i title="<no>">'])


@given(st.lists(st.tuples(marks, st.text("abc<&>é 1\n\"'=", min_size=1).map(web.html.escape)), max_size=20))
def test_no_text_is_lost_and_no_markup_shown(parts):
    shown = "".join(web.html_to_text("".join(tag + text for tag, text in parts)).split())
    assert shown == "".join("".join(web.html.unescape(text) for _, text in parts).split())


@pytest.mark.parametrize("unit", ["<!--", "<a ", "</", "&", "<script>", "<script></script ", "<?", "<a b='", "<", "= ",
                                  "<a x=\">\" ", "<a =  ", "<pre>", "<style><", "<a =\"", "&#"])
def test_hostile_html_takes_time_in_proportion(unit):
    start = time.process_time()
    web.html_to_text(unit * (1_000_000 // len(unit)))
    assert time.process_time() - start < 5


# What make and the command refuse -----------------------------------------------------------------------------------

@pytest.mark.parametrize("backend, options, reason", [
    ("bing", {}, "bing"), ("serper", {"k": 0}, "k is 0"), ("local", {}, "--docs"), ("serper", {"docs": "x"}, "--docs"),
    ("serper", {"pages": "all"}, "all"), ("retriever", {"pages": "jina"}, "--pages"),
    ("retriever", {"scholar": True}, "scholar"), ("serper", {"offline": True, "cache": None}, "cache")])
def test_make_refuses_what_makes_no_sense(server, backend, options, reason):
    with pytest.raises(UserError, match=reason):
        search.make(backend, **{"cache": None, **options})


def test_make_refuses_missing_keys_and_urls_with_a_path(server, monkeypatch):
    for variable in ("SERPER_API_KEY", "JINA_API_KEY"):
        for value in ("", "  ", "two words", "line\nbreak", "clé"):
            with monkeypatch.context() as patch, pytest.raises(UserError, match=f"{variable} is not set"):
                patch.setenv(variable, value)
                search.make("serper", pages="jina", cache=None)
    for value in ("example.org", "http://host/retrieve", "ftp://host", "http://"):
        monkeypatch.setenv("MARS_RETRIEVER_URL", value)
        with pytest.raises(UserError, match="MARS_RETRIEVER_URL"):
            search.make("retriever", cache=None)
    monkeypatch.setenv("MARS_RETRIEVER_URL", f"{server.url}/")
    server.replies = [says({"result": [[]]})]
    assert search.make("retriever", cache=None)("ada") == [] and server.requests[0][1] == "/retrieve"


@pytest.mark.parametrize("arguments", [
    "", "q", "--backend bing q", "--backend local q", "--backend serper \t", "--backend serper --k 0 q",
    "--backend serper --k many q", "--backend serper --frobnicate q", "--backend local --docs none q"])
def test_the_command_exits_2_with_one_sentence_on_misuse(server, capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert search.main(arguments.split(" ") if arguments else []) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and not server.requests


def test_the_command_prints_documents_or_exits_1(server, tmp_path, capsys):
    command = ["--backend", "serper", "--cache", str(tmp_path), "--k", "2"]
    server.replies = [says("no", 403)]
    assert search.main([*command, "ada"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "403" in err
    server.replies = [says({"organic": [ROW, ROW, ROW]})]
    assert search.main([*command, "ada"]) == 0 and search.main([*command, "--offline", "ada"]) == 0
    line = json.dumps({"title": "Ada", "url": ROW["link"], "text": "born 1968"})
    assert capsys.readouterr() == (f"{line}\n" * 4, "")
    assert search.main([*command, "--offline", "other"]) == 1


def test_the_command_runs_as_a_module(tmp_path):
    (tmp_path / "a.txt").write_text("Ada was born in 1968, naïve")
    command = [sys.executable, "-m", "tools.search", "--backend", "local", "--docs", str(tmp_path), "--cache",
               str(tmp_path / "cache"), "ada"]
    run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == 0
    assert json.loads(run.stdout) == {"title": "a", "url": "", "text": "Ada was born in 1968, naïve"}
    assert run.stderr == ""
