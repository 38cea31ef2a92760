"""A loopback server that does what it is told, and the fixtures of the tests that talk to it."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tools import reader, search, web

needs_lxml = pytest.mark.skipif(bool(reader.missing("html")), reason=str(reader.missing("html")))
needs_pypdf = pytest.mark.skipif(bool(reader.missing("pdf")), reason=str(reader.missing("pdf")))
office = reader.missing("docx") or reader.missing("pptx")
needs_markitdown = pytest.mark.skipif(bool(office), reason=str(office))

KEY = "sk-very-secret"
ROW = {"title": "Ada", "link": "http://site.test/ada", "snippet": "born 1968"}
ECHO = {"searchParameters": {"q": "ada", "type": "search"}}


class Loopback(ThreadingHTTPServer):
    """Answers the n-th request with replies[n], and later ones with the last reply.

    A reply is a function of the request handler.
    """

    daemon_threads = True

    def __init__(self):
        self.replies = []
        self.requests = []
        self.counting = threading.Lock()
        self.released = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler, number, body):
        self.replies[min(number, len(self.replies) - 1)](handler)

    def stop(self):
        self.released.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.close_connection = True
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = json.loads(body) if body else None
        with server.counting:
            number = len(server.requests)
            server.requests.append((self.command, self.path, headers, asked))
        server.answer(self, number, asked)

    do_HEAD = do_POST = do_GET

    def log_message(self, *_):
        pass


def says(body, status=200, headers=(), promise=None):
    """A reply. body: text, or what JSON can hold. promise: another Content-Length."""
    raw = (body if isinstance(body, str) else json.dumps(body)).encode()

    def reply(handler):
        handler.send_response(status)
        fixed = {"Content-Length": promise or len(raw), "Connection": "close"}
        for name, value in {**fixed, **dict(headers)}.items():
            handler.send_header(name, str(value))
        handler.end_headers()
        handler.wfile.write(raw)

    return reply


def hangs(handler):
    handler.server.released.wait(20)


def drops(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server(monkeypatch):
    server = Loopback()
    for variable in search.URLS:
        monkeypatch.setenv(variable, server.url)
    for variable in ("SERPER_API_KEY", "JINA_API_KEY"):
        monkeypatch.setenv(variable, KEY)
    monkeypatch.setenv("no_proxy", "*")
    yield server
    server.stop()


@pytest.fixture
def waits(monkeypatch):
    """The client's pauses in seconds, which are noted and not slept."""
    waits = []
    monkeypatch.setattr(web.time, "sleep", waits.append)
    return waits


def serper(tmp_path, **options):
    return search.make("serper", **{"cache": tmp_path / "cache", "timeout": 60, **options})


GOOD = says({"organic": [ROW]})
