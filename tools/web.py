"""The HTTP client of all services: search, page reader, judge.

A call returns an answer or raises ToolError, whatever the server sent. A temporary failure
(time-out, cut connection, 408, 429, 5xx, malformed answer) is tried again after a growing, jittered
pause, which lasts at least as long as Retry-After asks. A 429 means that the server is busy: it
does not count as a try, but its pause counts towards PATIENCE. Other 4xx are final.

Good answers are cached on disk under sha256(url, body), without any key. Equal requests at the same
time (a group's first searches) share one request and its outcome.

The message of a ToolError reaches System 2, the records and the terminal. It is one line of at most
200 characters and contains none of our keys. It never quotes a web page, because text from outside
must reach System 2 through System 1 only.

httpx2 (a dependency of huggingface_hub) makes the exchange. It uses the machine's certificates and
the environment's proxies. It follows no redirects, since they would send our key to another host.

Tests: pytest tests/test_web.py (a loopback server that misbehaves)
"""

import contextlib
import email.utils
import hashlib
import itertools
import json
import math
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomic import on_disk, reason
from config import UserError
from tools import ToolError, one_line

FIRST_WAIT = 1.0  # seconds before the second try, doubled for each further one
LONGEST_WAIT = 60.0  # seconds, also where Retry-After asks for more
PATIENCE = 180.0  # seconds of all pauses of a call; a tool may make three calls in its 600 s
LONGEST_MESSAGE = 200  # characters of a ToolError
ANSWER_BYTES = 8 << 20  # the limit of one answer, decompressed
AT_ONCE = 16  # the most exchanges of one client at the same time


def settle(outcome: Future, function: Callable, *arguments) -> None:
    """Runs the function and stores its result or exception in `outcome`."""
    try:
        outcome.set_result(function(*arguments))
    except BaseException as error:
        outcome.set_exception(error)


def in_threads(function: Callable, items: list) -> list:
    """[function(item) for item in items], in daemon threads, which do not delay Ctrl-C or exit."""
    outcomes = [Future() for _ in items]
    for item, outcome in zip(items, outcomes, strict=True):
        try:
            threading.Thread(target=settle, args=(outcome, function, item), daemon=True).start()
        except RuntimeError:
            raise ToolError("this machine has no thread left for the call") from None
    return [outcome.result() for outcome in outcomes]


class Meter:
    """Counts what this process sends to services, and stops it at a limit."""

    def __init__(self):
        self.lock = threading.Lock()
        self.sent = Counter()  # site -> calls, each try included, without those that 429 refused
        self.left = math.inf  # calls before the run stops
        self.last_warning: dict[str, float] = {}  # site -> when a line was printed about it
        self.failure = ""  # the message of the last call that failed

    def begin(self, limit: int, ranks: int) -> None:
        """Resets the counts. Each rank may then send its share of `limit` calls; 0: no limit."""
        self.sent.clear()
        self.left = limit // ranks if limit else math.inf

    def count(self, site: str) -> None:
        """Counts a call that is about to be sent. UserError if the limit is reached."""
        with self.lock:
            if self.left < 1:
                raise UserError(
                    "--max_calls is reached: this step or evaluation is not finished (calls sent: "
                    f"{self.sent.total()}{self.last_failure()}), what was done before is on disk, "
                    "and the same command with --resume may make as many calls again"
                )
            self.left -= 1
            self.sent[site] += 1

    def last_failure(self) -> str:
        """What a sentence adds about the last call that failed; empty if none did."""
        return self.failure and f"; a service's last failure was: {self.failure}"

    def refuse(self, site: str, seconds: float) -> None:
        """Takes a call refused by 429 out of the count; warns of long waits, once a minute."""
        with self.lock:
            self.left += 1
            self.sent[site] -= 1
            now = time.monotonic()
            if seconds > 60 and now - self.last_warning.get(site, -math.inf) >= 60:
                self.last_warning[site] = now
                problem = f"{site} has answered 429 (too many requests) for {seconds:.0f} s"
                print(f"{problem} to a call that still waits", file=sys.stderr, flush=True)


METER = Meter()


@dataclass
class Client:
    """Sends requests to services. Any thread may use it."""

    cache: Path | None  # a folder, or None for no cache
    timeout: float = 20.0  # seconds for one exchange
    tries: int = 5  # of one call; a 429 does not count

    def __post_init__(self):
        import httpx2  # here, so that a run without any service does not need it

        try:
            self.http = httpx2.Client(
                headers={"User-Agent": "mars", "Content-Type": "application/json"},
                timeout=httpx2.Timeout(self.timeout, pool=None),
                # No connection is reused: the server may close it at that moment.
                limits=httpx2.Limits(max_connections=AT_ONCE, max_keepalive_connections=0),
            )
        except OSError as error:
            problem = "the certificates that SSL_CERT_FILE or SSL_CERT_DIR names cannot be read"
            raise UserError(f"{problem} ({error.strerror}): unset the variable") from None
        except Exception:  # its message contains the proxy's address with the password
            problem = "the proxy in the environment (HTTPS_PROXY, ALL_PROXY) is of no use: unset it"
            raise UserError(problem) from None
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
        """Sends a GET, or a POST of `body` as JSON. Returns read(answer) or raises ToolError.

        read(raw) raises an exception if the answer, new or cached, is malformed.
        quote: whether a ToolError may quote the answer. It may not if the answer holds a web page.
        """
        request = json.dumps([url, body], sort_keys=True)
        name = hashlib.sha256(request.encode()).hexdigest()
        new = Future()
        outcome = self.under_way.setdefault(name, new)
        if outcome is new:
            settle(new, self._answer, name, url, read, body, headers, quote)
            del self.under_way[name]
        return outcome.result()

    def _answer(self, name: str, url: str, read: Callable, *request):
        """The cached answer of that name, or else a new one, which is cached."""
        if self.cache is not None:
            with contextlib.suppress(Exception):  # there is none, or `read` rejects it
                return read((self.cache / name).read_bytes())
        raw, answer = self._request(url, read, *request)
        if self.cache is not None:
            # The file is written atomically. If the disk is full, the answer is still returned.
            with (
                contextlib.suppress(OSError),
                tempfile.TemporaryDirectory(dir=self.cache, prefix="unfinished-") as folder,
            ):
                unfinished = Path(folder, "answer")
                unfinished.write_bytes(raw)
                os.replace(unfinished, self.cache / name)
        return answer

    def _request(
        self, url: str, read: Callable, body: dict | None, headers: dict, quote: bool
    ) -> tuple[bytes, Any]:
        """Tries until an answer comes, a failure is final, or tries or PATIENCE are used up."""
        method = "GET" if body is None else "POST"
        content = None if body is None else json.dumps(body).encode()
        site = one_line("/".join(url.split("/")[:3]), 80)
        failures = 0  # all but those with status 429
        pauses = 0.0  # seconds
        for number in itertools.count(1):
            wait = min(FIRST_WAIT * 2 ** (number - 1), LONGEST_WAIT) * random.uniform(0.5, 1)
            status = None
            is_final = False
            METER.count(site)
            try:
                with self.http.stream(method, url, content=content, headers=headers) as response:
                    raw = read_within(response, self.timeout)
                status = response.status_code
                if response.is_success:
                    return raw, read(raw)
                why = f"HTTP {status}"
                if quote:
                    why += f" {raw.decode('utf-8', 'replace')}"
                is_final = status not in (408, 429) and status < 500
                wait = max(wait, retry_after(response.headers))
            except ToolError as error:
                why = str(error)
                is_final = True
            except Exception as error:
                # Parsers raise many kinds of exceptions, which all mean that there is no answer.
                why = f"{type(error).__name__}: {error}" if quote else type(error).__name__
            for secret in headers.values():  # before the text is cut, which may leave half a key
                # JSON may put backslashes before any character of the key.
                key = r"\\*".join(map(re.escape, secret.removeprefix("Bearer ")))
                why = re.sub(key, "***", why, flags=re.IGNORECASE)
            why = one_line(f"{site}: {why[:1000]}", LONGEST_MESSAGE - 10)
            failures += status != 429
            if status == 429:
                METER.refuse(site, pauses)
            pauses += wait
            if is_final or failures >= self.tries or pauses > PATIENCE:
                METER.failure = why
                raise ToolError(f"{why}, {number} tries")
            time.sleep(wait)


def read_within(response, seconds: float) -> bytes:
    """The bytes of an answer. TimeoutError if it is too long or is not complete in time."""
    deadline = time.monotonic() + seconds
    raw = bytearray()
    for piece in response.iter_bytes():
        raw += piece
        if len(raw) > ANSWER_BYTES or time.monotonic() > deadline:
            raise TimeoutError("the answer is too long, or takes too long")
    return bytes(raw)


def retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that the server asks us to wait: 0 to LONGEST_WAIT."""
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch("[0-9]+", value):
        return min(float(value), LONGEST_WAIT)
    try:
        seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    except Exception:  # a server may send any text
        return 0.0
    return min(max(seconds, 0.0), LONGEST_WAIT)


def check_hub(repository: str, file: str, kind: str) -> None:
    """UserError if a file is not in the hub's local cache and one request cannot reach the hub.

    huggingface_hub itself would try six times, half a minute long. kind: "model" or "dataset".
    """
    import httpx2
    import huggingface_hub as hub

    if hub.is_offline_mode():
        return
    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=10)
    except httpx2.HTTPError as error:
        with contextlib.suppress(ValueError):  # it is no name of a repository
            if isinstance(hub.try_to_load_from_cache(repository, file, repo_type=kind), str):
                return
        raise UserError(
            f"{repository} is not on this machine, and {hub.constants.ENDPOINT} cannot be reached "
            f"({reason(error)}): name a file or folder that is here, or mend the network"
        ) from None


def check_base_url(name: str, url: str) -> str:
    """A service's base URL without the last slashes. UserError if it is malformed.

    A password in it is refused, because error messages show the URL. This one does not.
    """
    url = url.strip().rstrip("/")
    if not re.fullmatch(r"https?://[^@/?#\s\\]+(/[^@?#\s\\]*)?", url):
        raise UserError(f"{name} is no address: give http(s)://host:port, without user or password")
    return url
