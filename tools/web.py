"""The client of all web calls: a cache on disk, retries, and messages that are safe to pass on.

A call returns an answer or raises ToolError and nothing else, whatever the other side sent: a
failure must never be taken for an empty answer, and no stranger's page may end a run. A failure
that may pass (a time-out, a dropped or cut connection, 408, 429, 5xx, an answer of another shape)
is tried again after a growing, jittered pause, no sooner than Retry-After asks. Other refusals are
final.

Good answers are kept on disk under sha256(url, body), without any key; failures are not kept. Equal
requests that are under way at the same time (a group's first searches) are sent once and share
their outcome. Offline, only the cache answers.

What a ToolError says reaches System 2, the rollout records and the operator's terminal. It is one
line of at most 200 characters, without our keys and without control characters. About a page it
says nothing that the page wrote, for a stranger must not speak to System 2 past System 1.

The exchanges themselves stand in tools/exchange.py. Tests: pytest tests/test_web.py
"""

import contextlib
import datetime
import email.utils
import hashlib
import http.client
import json
import os
import random
import re
import ssl
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from config import UserError
from tools import ToolError
from tools.documents import one_line
from tools.exchange import Refused, service

LONGEST_WAIT = 60.0  # seconds; a larger Retry-After is cut to this
LONGEST_MESSAGE = 200  # characters of a ToolError
ABANDONED = 3600.0  # seconds after which an unfinished file is nobody's any more


@dataclass
class Client:
    """Thread-safe. cache: a folder, or None. timeout: seconds for one whole exchange.

    tries, pause: how often, and seconds before the second try (doubled for each further one).
    parallel: exchanges at once.
    """

    cache: Path | None
    offline: bool = False
    timeout: float = 20.0
    tries: int = 5
    pause: float = 1.0
    parallel: int = 16

    def __post_init__(self):
        self.slots = threading.BoundedSemaphore(self.parallel)
        self.guard = threading.Lock()
        self.under_way: dict[str, Future] = {}  # name of a request -> its outcome
        if self.offline and self.cache is None:
            raise UserError("offline mode answers from the cache alone: name a cache folder")
        if self.cache is None:
            return
        self.unfinished = self.cache / "unfinished"
        try:
            self.unfinished.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the cache folder {self.cache} cannot be made ({error.strerror}): name another one"
            ) from None
        _remove_abandoned(self.unfinished)

    def call(
        self,
        url: str,
        decode: Callable,
        *,
        body: dict | None = None,
        headers: dict | None = None,
        send: Callable = service,
        check: Callable | None = None,
    ):
        """The answer of `url`: GET, or POST of `body` as JSON. ToolError when it cannot be had.

        decode(raw: bytes, headers) -> an answer that JSON can hold.
        check(answer): raises when the answer, fresh or from the cache, is not the one asked for.
        send: the kind of exchange: `service`, or exchange.page for what a stranger chose.
        """
        request = json.dumps([url, body], sort_keys=True)
        name = hashlib.sha256(request.encode()).hexdigest()
        with self.guard:
            future = self.under_way.get(name)
            is_mine = future is None
            if is_mine:
                future = self.under_way[name] = Future()
        if not is_mine:
            return future.result()
        try:
            answer = self._answer(name, url, decode, body, headers or {}, send, check)
            future.set_result(answer)
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self.guard:
                del self.under_way[name]
        return future.result()

    def _answer(self, name, url, decode, body, headers, send, check):
        """From the cache, or else from the web, and then into the cache."""
        path = None
        if self.cache is not None:
            path = self.cache / name[:2] / f"{name}.json"
            # A file that is not as we wrote it counts as none.
            with contextlib.suppress(Exception):
                answer = json.loads(path.read_bytes())["answer"]
                if check:
                    check(answer)
                return answer
        if self.offline:
            raise ToolError("this request is not in the cache, and the run is offline")

        def attempt():
            with self.slots:
                raw, answer_headers = send(url, body, headers, self.timeout)
            answer = decode(raw, answer_headers)
            if check:
                check(answer)
            return answer

        from_stranger = send is not service
        answer = self._persist(attempt, url, headers, from_stranger)
        if path:
            with contextlib.suppress(OSError):  # a full disk does not take the answer away
                self._keep(path, {"url": url, "body": body, "answer": answer})
        return answer

    def _persist(self, attempt: Callable, url: str, headers: dict, from_stranger: bool):
        """Makes attempts until one succeeds, or is refused for good, or none is left."""
        for number in range(1, self.tries + 1):
            wait = self.pause * 2 ** (number - 1) * random.uniform(0.5, 1)
            try:
                return attempt()
            except ToolError as error:
                raise ToolError(_message(url, str(error), headers)) from None
            except Refused as refused:
                why = _refusal(refused)
                if refused.status not in (408, 429) and refused.status < 500:
                    raise ToolError(_message(url, why, headers)) from None
                wait = max(wait, retry_after(refused.headers.get("Retry-After")))
            except Exception as error:
                # What strangers send reaches the parsers of the standard library, which raise many
                # kinds of exceptions. All of them mean the same: there is no answer.
                why = _failure(error, from_stranger)
            if number < self.tries:
                time.sleep(wait)
        raise ToolError(_message(url, f"{why}, {self.tries} tries", headers))

    def _keep(self, path: Path, content: dict) -> None:
        """Writes the file whole or not at all, also when several processes do so at once."""
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.unfinished, delete=False) as file:
            try:
                json.dump(content, file)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise


def _remove_abandoned(folder: Path) -> None:
    """Removes what processes left behind that were killed while they wrote."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if time.time() - file.stat().st_mtime > ABANDONED:
                file.unlink()


# Messages ----------------------------------------------------------------------------------------


def _refusal(refused: Refused) -> str:
    """The status, and a service's own words. The exchange drops those of a page."""
    return f"HTTP {refused.status} {refused.body.decode('utf-8', 'replace')}".strip()


def _failure(error: Exception, from_stranger: bool) -> str:
    """Why an exchange failed. Messages of exceptions may quote what the other side sent."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason})"
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    if isinstance(error, http.client.HTTPException):
        return f"the answer is not HTTP ({type(error).__name__})"
    if from_stranger:
        return f"the answer cannot be read ({type(error).__name__})"
    return f"the answer is not what was asked for ({error})"


def _message(url: str, why: str, headers: dict) -> str:
    """One short line for System 2 and the operator, without our keys and control characters."""
    why = hide(why, headers.values())
    site = "/".join(url.split("/")[:3])
    return one_line(f"{one_line(site, 80)}: {why}", LONGEST_MESSAGE)


def hide(text: str, secrets) -> str:
    """`text` with *** for each secret, in whatever case it is written.

    The text may be cut where a secret stands, so the length of the longest one is dropped from the
    end of a long text. Therefore callers hide first and cut afterwards.
    """
    secrets = [secret.removeprefix("Bearer ") for secret in secrets]
    secrets = [secret for secret in secrets if secret]
    for secret in secrets:
        text = re.sub(re.escape(secret), "***", text, flags=re.IGNORECASE)
    longest = max(map(len, secrets), default=0)
    if longest and len(text) > LONGEST_MESSAGE + longest:
        text = text[:-longest]
    return text


def retry_after(header: str | None) -> float:
    """Seconds that a Retry-After header (a number, or a date) asks for; 0 if none or unreadable.

    At most LONGEST_WAIT.
    """
    header = str(header or "").strip()
    if header.isascii() and header.isdigit():
        return min(float(header), LONGEST_WAIT)
    try:
        date = email.utils.parsedate_to_datetime(header)
        if date.tzinfo is None:
            date = date.replace(tzinfo=datetime.UTC)
        seconds = (date - datetime.datetime.now(datetime.UTC)).total_seconds()
    except (ValueError, TypeError, LookupError, ArithmeticError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_WAIT)


def check_base_url(name: str, url: str, *, path: bool = False) -> str:
    """The base URL of a service without its last slashes; UserError, which names it, if it is none.

    path: whether one may follow the host. A password in the URL is refused: it would not be sent,
    and it would stand in every error message.
    """
    url = url.strip().rstrip("/")
    if "@" in url:
        raise UserError(f"{name} holds an @: give the address without a user or a password")
    allowed = r"https?://[^/?#\s\\]+"
    shape = "http(s)://host:port without a path"
    if path:
        allowed += r"(/[^?#\s\\]*)?"
        shape = "http(s)://host:port/path"
    try:
        well_formed = re.fullmatch(allowed, url) and urllib.parse.urlsplit(url).port != 0
    except ValueError:
        well_formed = False
    if not well_formed:
        raise UserError(f"{name} is {one_line(url, 80)!r}: give {shape}")
    return url
