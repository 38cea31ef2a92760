"""A server on this machine, for tests of what speaks HTTP."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(handle):
    """Calls handle(request) for every request; yields the server's base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            handle(self)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    options = {"poll_interval": 0.01}
    threading.Thread(target=server.serve_forever, kwargs=options, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def answer(request, status, body=b"", **headers):
    """Sends one whole answer; `X_Y="z"` becomes the header "X-Y: z"."""
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
