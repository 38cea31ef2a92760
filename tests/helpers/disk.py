"""A disk that takes no more, without a disk: files may be no longer than a limit."""

import contextlib
import resource
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def files_no_longer_than(limit: int) -> Iterator[None]:
    """In this process a write beyond `limit` bytes of a file is an OSError."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
