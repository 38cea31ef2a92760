"""The client of every service that is asked over HTTP: search, page reader, judge.

A call returns an answer or raises ToolError, whatever the other side sent. A failure that may pass
(a time-out, a cut connection, 408, 429, 5xx, an answer of another shape) is tried again after a
growing, jittered pause, no sooner than Retry-After asks. A 429 only says that it is not our turn:
it uses up no try, but the client's patience. Other refusals are final.

Good answers are kept on disk under sha256(url, body), without any key. Equal requests that are
under way at the same time (a group's first searches) are one: they share its outcome.

What a ToolError says reaches System 2, the records and the terminal. It is one line of at most 200
characters, without our keys. About strangers' pages it says nothing that they or a service wrote,
for a stranger must not speak to System 2 past System 1.

One exchange is httpx2's (huggingface_hub brings it): the machine's certificates, the environment's
proxies, and no redirects, for our key would go along.

Tests: pytest tests/test_web.py (a loopback server that misbehaves)
"""

import contextlib
import email.utils
import hashlib
import itertools
import json
import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomic import on_disk
from config import UserError
from tools import ToolError, one_line

FIRST_WAIT = 1.0  # seconds before the second try, doubled for each further one
LONGEST_WAIT = 60.0  # seconds, also where Retry-After asks for more
PATIENCE = 240.0  # seconds between all tries; a tool's call, which may ask twice, has 600
LONGEST_MESSAGE = 200  # characters of a ToolError
ANSWER_BYTES = 8 << 20  # of one answer, unpacked
AT_ONCE = 16  # exchanges of one client


def settle(outcome: Future, function: Callable, *arguments) -> None:
    """Runs the function; `outcome` takes what it returns or raises."""
    try:
        outcome.set_result(function(*arguments))
    except BaseException as error:
        outcome.set_exception(error)


def in_threads(function: Callable, items: list) -> list:
    """[function(item) for each item], in threads that neither Ctrl-C nor a program's end awaits."""
    outcomes = [Future() for _ in items]
    for item, outcome in zip(items, outcomes, strict=True):
        try:
            threading.Thread(target=settle, args=(outcome, function, item), daemon=True).start()
        except RuntimeError:
            raise ToolError("this machine has no thread left for the call") from None
    return [outcome.result() for outcome in outcomes]


@dataclass
class Client:
    """Asks services, from any thread."""

    cache: Path | None  # a folder, or None to keep nothing
    timeout: float = 20.0  # seconds for one exchange
    tries: int = 5  # of one call; a 429 uses up none

    def __post_init__(self):
        import httpx2  # here, so that a run without any service does not need it

        try:
            self.http = httpx2.Client(
                headers={"User-Agent": "mars", "Content-Type": "application/json"},
                timeout=httpx2.Timeout(self.timeout, pool=None),
                # No connection is kept: a server may close it just when it is used again.
                limits=httpx2.Limits(max_connections=AT_ONCE, max_keepalive_connections=0),
            )
        except Exception:  # what it says holds the proxy's address, with its password
            said = "the proxy in the environment (HTTPS_PROXY, ALL_PROXY) is of no use: unset it"
            raise UserError(said) from None
        self.under_way: dict[str, Future] = {}  # name of a request -> its outcome
        if self.cache is not None:
            with on_disk(f"make the cache folder {one_line(str(self.cache), 80)}"):
                self.cache.mkdir(parents=True, exist_ok=True)

    def call(
        self,
        url: str,
        read: Callable[[bytes], Any],
        *,
        headers: dict,
        body: dict | None = None,
        quote: bool = True,
    ) -> Any:
        """What `read` makes of the answer of `url`: GET, or POST of `body` as JSON. Or ToolError.

        read(raw) raises when the answer, fresh or from the cache, is not the one asked for.
        quote: whether a ToolError may quote the answer; not if a stranger may have a part in it.
        """
        request = json.dumps([url, body], sort_keys=True)
        name = hashlib.sha256(request.encode()).hexdigest()
        mine = Future()
        outcome = self.under_way.setdefault(name, mine)
        if outcome is mine:
            settle(mine, self._answer, name, url, read, body, headers, quote)
            del self.under_way[name]
        return outcome.result()

    def _answer(self, name: str, url: str, read: Callable, *request):
        """The answer that is kept under a name, or else a new one, which is kept."""
        if self.cache is not None:
            with contextlib.suppress(Exception):  # there is none, or `read` refuses it
                return read((self.cache / name).read_bytes())
        raw, answer = self._persist(url, read, *request)
        if self.cache is not None:
            # The file is written whole or not at all; a full disk does not take the answer away.
            with (
                contextlib.suppress(OSError),
                tempfile.TemporaryDirectory(dir=self.cache, prefix="unfinished-") as folder,
            ):
                unfinished = Path(folder, "answer")
                unfinished.write_bytes(raw)
                os.replace(unfinished, self.cache / name)
        return answer

    def _persist(
        self, url: str, read: Callable, body: dict | None, headers: dict, quote: bool
    ) -> tuple[bytes, Any]:
        """Makes attempts until one succeeds, or is refused for good, or none is left."""
        method = "GET" if body is None else "POST"
        content = None if body is None else json.dumps(body).encode()
        site = one_line("/".join(url.split("/")[:3]), 80)
        failed = 0  # tries that were no 429
        waited = 0.0
        for number in itertools.count(1):
            wait = min(FIRST_WAIT * 2 ** (number - 1), LONGEST_WAIT) * random.uniform(0.5, 1)
            status = None
            may_pass = True
            try:
                with self.http.stream(method, url, content=content, headers=headers) as response:
                    raw = read_within(response, self.timeout)
                status = response.status_code
                if response.is_success:
                    return raw, read(raw)
                why = f"HTTP {status}"
                if quote:
                    why += f" {raw.decode('utf-8', 'replace')}"
                may_pass = status in (408, 429) or status >= 500
                wait = max(wait, retry_after(response.headers))
            except ToolError as error:
                why = str(error)
                may_pass = False
            except Exception as error:
                # What is sent reaches many parsers, which raise many kinds of exceptions. All of
                # them mean the same: there is no answer.
                why = f"{type(error).__name__}: {error}" if quote else type(error).__name__
            for secret in headers.values():  # hidden first and cut afterwards, or a part is left
                # JSON may put backslashes before any of its characters.
                key = r"\\*".join(map(re.escape, secret.removeprefix("Bearer ")))
                why = re.sub(key, "***", why, flags=re.IGNORECASE)
            why = one_line(f"{site}: {why[:1000]}", LONGEST_MESSAGE - 10)
            failed += status != 429
            waited += wait
            if not may_pass or failed >= self.tries or waited > PATIENCE:
                raise ToolError(f"{why}, {number} tries")
            time.sleep(wait)


def read_within(response, seconds: float) -> bytes:
    """An answer's bytes; TimeoutError if they are too many, or drip in for longer."""
    deadline = time.monotonic() + seconds
    raw = bytearray()
    for piece in response.iter_bytes():
        raw += piece
        if len(raw) > ANSWER_BYTES or time.monotonic() > deadline:
            raise TimeoutError("the answer is too long, or takes too long")
    return bytes(raw)


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a refusal asks to wait, at most LONGEST_WAIT; 0 if it names no time."""
    asked = headers.get("Retry-After", "").strip()
    if re.fullmatch("[0-9]+", asked):
        return min(float(asked), LONGEST_WAIT)
    try:
        seconds = email.utils.parsedate_to_datetime(asked).timestamp() - time.time()
    except Exception:  # a server may send any text
        return 0.0
    return min(max(seconds, 0.0), LONGEST_WAIT)


def check_base_url(name: str, url: str) -> str:
    """The base URL of a service without its last slashes; UserError, which hides it, if it is none.

    It may hold a password, which would stand in every error message.
    """
    url = url.strip().rstrip("/")
    if not re.fullmatch(r"https?://[^@/?#\s\\]+(/[^@?#\s\\]*)?", url):
        raise UserError(f"{name} is no address: give http(s)://host:port, without user or password")
    return url
