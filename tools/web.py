"""The client of every service that is asked over HTTP: search, page reader, judge, servers.

A call returns an answer or raises ToolError and nothing else, whatever the other side sent: a
failure must never be taken for an empty answer. A failure that may pass (a time-out, a cut
connection, 408, 429, 5xx, an answer of another shape) is tried again after a growing, jittered
pause, no sooner than Retry-After asks. Other refusals are final.

Good answers are kept on disk under sha256(url, body), without any key; failures are not kept. Equal
requests that are under way at the same time (a group's first searches) are sent once.

What a ToolError says reaches System 2, the rollout records and the operator's terminal. It is one
line of at most 200 characters, without our keys. About strangers' pages it says nothing that they
or a service wrote, for a stranger must not speak to System 2 past System 1.

One exchange is httpx2's (huggingface_hub brings it): the machine's certificates, the environment's
proxies, and no redirects, for our key would go along. Its time-out holds for every single wait, and
between two pieces of a body we look at the deadline of the whole. A head that drips in, or a name
server that never answers, may take longer: the thread of the tool call (driver.ToolCall) ends it.

Tests: pytest tests/test_web.py (a loopback server that misbehaves)
"""

import contextlib
import functools
import hashlib
import html
import json
import os
import random
import re
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from config import UserError
from tools import ToolError, one_line

HEADERS = {"User-Agent": "mars", "Accept-Encoding": "identity"}
ANSWER_BYTES = 8 << 20  # a longer answer is cut
REASON_BYTES = 64 << 10  # of a refusal
LONGEST_WAIT = 60.0  # seconds; a larger Retry-After is cut to this
LONGEST_MESSAGE = 200  # characters of a ToolError
AT_ONCE = 16  # exchanges of one client


# One exchange ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Refused(Exception):
    """The server answered with a status that is no success."""

    status: int
    headers: Mapping[str, str]
    body: bytes  # the beginning of the answer


@functools.cache
def _tls() -> ssl.SSLContext:
    """Reading the machine's certificates takes 20 ms, so they are read once."""
    import httpx2

    return httpx2.create_ssl_context()


def service(
    url: str, body: dict | None, headers: dict, timeout: float
) -> tuple[bytes, Mapping[str, str]]:
    """GET of `url`, or POST of `body` as JSON: (at most ANSWER_BYTES, headers).

    Refused unless the status is one of success; TimeoutError after `timeout` seconds;
    ConnectionError when there is no connection, or none that speaks HTTP to its end.
    """
    import httpx2  # here, so that a run without any service does not need it

    deadline = time.monotonic() + timeout
    headers = HEADERS | headers
    method = "GET"
    content = None
    if body is not None:
        method = "POST"
        content = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    try:
        with (
            httpx2.Client(verify=_tls(), timeout=timeout) as client,
            client.stream(method, url, content=content, headers=headers) as response,
        ):
            if response.is_success:
                return _read(response, ANSWER_BYTES, deadline), response.headers
            reason = b""
            with contextlib.suppress(Exception):  # the status is known, and it counts
                reason = _read(response, REASON_BYTES, deadline)
            raise Refused(response.status_code, response.headers, reason)
    except httpx2.TimeoutException:
        raise TimeoutError("timed out") from None
    except httpx2.HTTPError as error:
        why = re.sub(r"^\[Errno -?\d+\] ", "", str(error))
        raise ConnectionError(0, why or type(error).__name__) from None


def _read(response, limit: int, deadline: float) -> bytes:
    raw = bytearray()
    for piece in response.iter_bytes():
        raw += piece
        if len(raw) >= limit:
            break
        seconds_left(deadline)
    return bytes(raw[:limit])


def seconds_left(deadline: float) -> float:
    """Seconds until the deadline (time.monotonic); TimeoutError when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def in_threads(function: Callable, items: list) -> list:
    """[function(item) for each item], each in a thread of its own.

    The threads are daemons: neither Ctrl-C nor the end of the program waits for them.
    """
    outcomes = [Future() for _ in items]

    def work(item, outcome: Future):
        try:
            outcome.set_result(function(item))
        except BaseException as error:
            outcome.set_exception(error)

    for item, outcome in zip(items, outcomes, strict=True):
        try:
            threading.Thread(target=work, args=(item, outcome), daemon=True).start()
        except RuntimeError:
            raise ToolError("this machine has no thread left for the call") from None
    return [outcome.result() for outcome in outcomes]


# Calls -------------------------------------------------------------------------------------------


@dataclass
class Client:
    """Thread-safe. cache: a folder, or None. timeout: seconds for one exchange.

    tries, pause: how often, and seconds before the second try (doubled for each further one).
    """

    cache: Path | None
    timeout: float = 20.0
    tries: int = 5
    pause: float = 1.0

    def __post_init__(self):
        self.slots = threading.BoundedSemaphore(AT_ONCE)
        self.guard = threading.Lock()
        self.under_way: dict[str, Future] = {}  # name of a request -> its outcome
        if self.cache is None:
            return
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the cache folder {one_line(str(self.cache), 80)} cannot be made "
                f"({error.strerror}): name another one"
            ) from None

    def call(
        self,
        url: str,
        decode: Callable,
        *,
        body: dict | None = None,
        headers: dict | None = None,
        check: Callable | None = None,
        quote: bool = True,
    ):
        """The answer of `url`: GET, or POST of `body` as JSON. ToolError when it cannot be had.

        decode(raw: bytes, headers) -> an answer that JSON can hold.
        check(answer): raises when the answer, fresh or from the cache, is not the one asked for.
        quote: whether a ToolError may quote the answer; not if a stranger may have a part in it.
        """
        request = json.dumps([url, body], sort_keys=True)
        name = hashlib.sha256(request.encode()).hexdigest()
        mine = Future()
        with self.guard:
            outcome = self.under_way.setdefault(name, mine)
        if outcome is not mine:
            return outcome.result()

        def attempt():
            with self.slots:
                raw, answer_headers = service(url, body, headers or {}, self.timeout)
            answer = decode(raw, answer_headers)
            if check:
                check(answer)
            return answer

        try:
            answer = self._kept(name, check)
            if answer is None:
                answer = self._persist(attempt, url, headers or {}, quote)
                self._keep(name, {"url": url, "body": body, "answer": answer})
            mine.set_result(answer)
        except BaseException as error:
            mine.set_exception(error)
        finally:
            with self.guard:
                del self.under_way[name]
        return mine.result()

    def _persist(self, attempt: Callable, url: str, headers: dict, quote: bool):
        """Makes attempts until one succeeds, or is refused for good, or none is left."""
        site = one_line("/".join(url.split("/")[:3]), 80)
        for number in range(1, self.tries + 1):
            wait = self.pause * 2 ** (number - 1) * random.uniform(0.5, 1)
            may_pass = True
            try:
                return attempt()
            except ToolError as error:
                why = str(error)
                may_pass = False
            except Refused as refused:
                why = f"HTTP {refused.status}"
                if quote:
                    why += f" {refused.body.decode('utf-8', 'replace')}"
                may_pass = refused.status in (408, 429) or refused.status >= 500
                wait = max(wait, retry_after(refused.headers.get("Retry-After")))
            except Exception as error:
                # What is sent reaches many parsers, which raise many kinds of exceptions. All of
                # them mean the same: there is no answer.
                why = _failure(error, quote)
            # A key may stand where the answer was cut, so what is quoted ends long before.
            why = one_line(f"{site}: {hide(why, headers.values())[:1000]}", LONGEST_MESSAGE - 10)
            if not may_pass:
                raise ToolError(why)
            if number < self.tries:
                time.sleep(wait)
        raise ToolError(f"{why}, {self.tries} tries")

    def _path(self, name: str) -> Path:
        return self.cache / name[:2] / f"{name}.json"

    def _kept(self, name: str, check: Callable | None):
        """The answer that is kept under a name; None if there is none as we would write it."""
        if self.cache is None:
            return None
        with contextlib.suppress(Exception):
            answer = json.loads(self._path(name).read_bytes())["answer"]
            if check:
                check(answer)
            return answer

    def _keep(self, name: str, content: dict) -> None:
        """Writes the file whole or not at all. A full disk does not take the answer away."""
        if self.cache is None:
            return
        path = self._path(name)
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.cache, prefix="unfinished-") as folder:
                unfinished = Path(folder, "answer")
                unfinished.write_text(json.dumps(content))
                os.replace(unfinished, path)


# Messages ----------------------------------------------------------------------------------------


def _failure(error: Exception, quote: bool) -> str:
    """Why an exchange failed. Messages of exceptions may quote what the other side sent."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if not quote:
        return f"the answer cannot be had ({type(error).__name__})"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"the answer is not what was asked for ({error})"


def hide(text: str, secrets) -> str:
    """`text` with *** for each secret, in whatever case and in whatever spelling it is written.

    Hide first and cut afterwards, or a part of a secret may be left at the cut.
    """
    for secret in secrets:
        secret = secret.removeprefix("Bearer ")
        if secret:
            text = re.sub("".join(map(_spellings, secret)), "***", text, flags=re.IGNORECASE)
    return text


@functools.cache
def _spellings(character: str) -> str:
    r"""A pattern of the forms of a character: x, \x, \u0078, \x78, %78, &#120;, &#x78;, by name.

    Each may have been escaped a second time.
    """
    code = ord(character)
    names = [name for name, meaning in html.entities.html5.items() if meaning == character]
    entity = "|".join(
        [f"#0{{0,6}}{code};?", f"#x0{{0,6}}{code:x};?", *sorted(names, key=len)[::-1]]
    )
    return (
        rf"(?:&(?:amp;){{0,4}}(?:{entity})|%(?:25){{0,4}}{code:02x}|\\{{1,8}}(?:u00|x){code:02x}"
        rf"|\\{{0,8}}{re.escape(character)})"
    )


def retry_after(header: str | None) -> float:
    """Seconds that a Retry-After header asks for, at most LONGEST_WAIT; 0 if it holds no number."""
    header = str(header or "").strip()
    if header.isascii() and header.isdigit():
        return min(float(header), LONGEST_WAIT)
    return 0.0


def check_base_url(name: str, url: str) -> str:
    """The base URL of a service without its last slashes; UserError, which names it, if it is none.

    A password in the URL is refused: it would stand in every error message.
    """
    url = url.strip().rstrip("/")
    if "@" in url:
        raise UserError(f"{name} holds an @: give the address without a user or a password")
    if not re.fullmatch(
        r"https?://(\[[\da-f:.]+\]|[^/?#\s\\:]+)(:[1-9]\d{0,4})?(/[^?#\s\\]*)?", url
    ):
        raise UserError(f"{name} is {one_line(url, 80)!r}: give http(s)://host:port")
    return url
