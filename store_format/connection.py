"""Patient calls of fsspec: many at once, tried again while what fails may be over soon.

What fails in passing (no connection, a timeout, HTTP 5xx, throttling, half a body) is tried again
for `RETRY_FOR_S`; what fails for good is said at once. Credentials come from where the driver looks
for them (environment, ~/.aws, fsspec's configuration), never from the URL, and no message has them:
of what a driver raises only the name and the server's code are shown.
"""

import asyncio
import errno
import os
import queue
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
import fsspec.asyn
import fsspec.core

from store_format.errors import PrebakeError

T = TypeVar("T")
U = TypeVar("U")
RETRY_FOR_S = 60.0
SAY_AFTER_S = 2.0
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 8.0
MAX_AT_ONCE = 16
PIECE_BYTES = 1 << 19
MAX_PIECES = 16  # wait for who takes them
WEB = {"http", "https"}  # can only be read; lists no sizes
_S3 = {"s3", "s3a"}
_USER_IS_SECRET = {*WEB, *_S3, "gs", "gcs", "hf"}  # others have user@host or container@account

_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 507, 509, 529}
_PASSING_CODES = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "OperationAborted",
    "RequestLimitExceeded", "RequestTimeout", "Throttling", "ThrottlingException",
    "TooManyRequests", "XAmzContentSHA256Mismatch",
}  # fmt: skip
# Names, since this package must not import the drivers: builtins, botocore, aiohttp, urllib3,
# requests, httpx. An exception belongs here if one of its base classes does.
_PASSING_ERRORS = {
    "ChunkedEncodingError", "ClientConnectionError", "ClientPayloadError", "ConnectionError",
    "HTTPClientError", "IncompleteRead", "IncompleteReadError", "ProtocolError",
    "ResponseParserError", "ResponseStreamingError", "Timeout", "TimeoutError", "TransportError",
    "gaierror",
}  # fmt: skip
_CREDENTIAL_ERRORS = {
    "CredentialRetrievalError", "GoogleAuthError", "NoCredentialsError",
    "PartialCredentialsError", "PermissionError", "ProfileNotFound", "SSOError",
}  # fmt: skip
_OFFLINE_ERROR = "OfflineModeIsEnabled"  # huggingface_hub; a ConnectionError
_PASSING_ERRNOS = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EPIPE}


class AccessError(PrebakeError):
    """The server knows no credentials, or they may not do what was asked.

    No `OSError`, which readers take for a file that is damaged.
    """


class UnreachableError(PrebakeError):
    """The server did not answer, or answered 5xx, for as long as it was tried."""


class RefusedError(PrebakeError):
    """The server refuses a request for another reason than credentials."""


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call of a method of the file system; `where` is the URL, for messages."""

    where: str
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


class Connection:
    """A file system of fsspec for one URL, made at its first use, and anew after a fork."""

    def __init__(self, url: str) -> None:
        """Connect nothing yet.

        Raises:
            PrebakeError: no URL that fsspec opens, or one that carries credentials.
        """
        _check_url(url)
        self.url = url.rstrip("/")
        self.protocol = url.partition("://")[0]
        self._lock = threading.Lock()
        self._made: tuple[Any, str] | None = None
        self._has_said = False
        _connections.add(self)

    @property
    def root(self) -> str:
        """The URL's folder as the file system names it."""
        return self._connect()[1]

    def call(self, method: str, where: str, *args: Any, **options: Any) -> Any:
        """Return what a method of the file system returns; the errors are those of `call_all`."""
        return unless_error(self.call_all(method, [Call(where, args, options)])[0])

    def call_all(self, method: str, calls: Sequence[Call]) -> list[Any]:
        """Call a method several times, some at once; return results, or errors that will stay.

        Errors: FileNotFoundError, FileExistsError, EOFError (a range beyond the end),
        NotImplementedError, AccessError, RefusedError; others as the driver raises them.

        Raises:
            UnreachableError: a call failed in passing until there was no time left.
        """
        results: list[Any] = [None] * len(calls)
        todo = list(range(len(calls)))
        trying_since_s, delay_s = time.monotonic(), FIRST_DELAY_S
        while todo:
            answers = self._attempt(method, [calls[i] for i in todo])
            failed = []
            for i, answer in zip(todo, answers, strict=True):
                if isinstance(answer, Exception):
                    if reason := reason_if_passing(answer):
                        failed.append((i, reason))
                        continue
                    answer = self._lasting(answer, calls[i].where)
                results[i] = answer
            if len(failed) < len(todo):
                trying_since_s, delay_s, self._has_said = time.monotonic(), FIRST_DELAY_S, False
            todo = [i for i, _ in failed]
            if todo:
                wait_s = delay_s * random.uniform(0.5, 1.5)  # not all clients at the same moment
                waited_s = time.monotonic() - trying_since_s
                self._wait(wait_s, waited_s, calls[todo[0]].where, failed[0][1])
                delay_s = min(2 * delay_s, MAX_DELAY_S)
        return results

    def stream(self, where: str, name: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of a file as they come in one request, tried once.

        Cheaper than to have it whole. It ends early where something fails in passing, or begins
        not at all where the driver cannot do so.
        """
        filesystem, _ = self._connect()
        if not filesystem.async_impl:
            return
        options = {"size": size_bytes} if self.protocol in WEB else {}  # else it asks for it
        pieces: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        coming = _stream(filesystem, name, options, pieces)
        task = asyncio.run_coroutine_threadsafe(coming, filesystem.loop)
        try:
            while (some := pieces.get()) is not None:
                yield from some
            task.result()
        except NotImplementedError:
            return
        except Exception as error:
            if not reason_if_passing(error):
                raise self._lasting(error, where) from None
        finally:
            task.cancel()

    def _wait(self, wait_s: float, waited_s: float, where: str, reason: str) -> None:
        """Wait before the next attempt, and say so once; raise when there is no time left."""
        if waited_s + wait_s > RETRY_FOR_S:
            raise UnreachableError(
                f"{where} cannot be reached ({reason}, for {waited_s:.0f} s). Check the network, "
                f"the server and its address, then run the same command again."
            )
        if waited_s + wait_s > SAY_AFTER_S and not self._has_said:
            self._has_said = True
            line = f"waiting: {where} cannot be reached ({reason}); trying for {RETRY_FOR_S:.0f} s"
            print(line, file=sys.stderr, flush=True)
        time.sleep(wait_s)

    def _attempt(self, method: str, calls: Sequence[Call]) -> list[Any]:
        """Call a method once for each of `calls`; return results or errors."""
        filesystem, _ = self._connect()
        if method in ("ls", "find", "info"):
            filesystem.invalidate_cache()  # what drivers remember all the same
        if filesystem.async_impl:
            function = getattr(filesystem, f"_{method}")
            pending = [partial(function, *call.args, **call.options) for call in calls]
            results: list[Any] = fsspec.asyn.sync(filesystem.loop, _gather, pending)
            return results
        function = getattr(filesystem, method)
        if len(calls) == 1:
            return [_result_or_error(function, calls[0])]
        with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
            return list(pool.map(partial(_result_or_error, function), calls))

    def _lasting(self, error: Exception, where: str) -> Exception:
        """Return the error to raise for one that another attempt would give again."""
        status, code = _status_and_code(error)
        if _OFFLINE_ERROR in _base_names(error):
            return UnreachableError(f"{where} cannot be reached (HF_HUB_OFFLINE is set). Unset it.")
        if code == "NoSuchBucket":
            return FileNotFoundError(errno.ENOENT, "no such bucket", where)
        if isinstance(error, FileNotFoundError) or status == 404:
            return FileNotFoundError(errno.ENOENT, "no such file", where)
        if isinstance(error, FileExistsError) or status == 412:
            return FileExistsError(errno.EEXIST, "exists already", where)
        if status == 416:
            return EOFError(where)
        if isinstance(error, NotImplementedError) or status == 501:
            return NotImplementedError(where)
        shown = code or (f"HTTP {status}" if status else type(error).__name__)
        if status in (401, 403) or _base_names(error) & _CREDENTIAL_ERRORS:
            return AccessError(
                f"{where}: access denied ({shown}). Credentials come from {self._credentials()}; "
                f"check them, and what they may do."
            )
        if status is not None:
            return RefusedError(f"{where}: the server refuses ({shown}). Check the URL.")
        return error

    def _credentials(self) -> str:
        """Where the driver looks for them."""
        if self.protocol in _S3:
            return "the environment (AWS_ACCESS_KEY_ID, ...) or ~/.aws/credentials"
        if self.protocol == "hf":
            return "HF_TOKEN or 'hf auth login'"
        return "where the fsspec driver looks for them"

    def _connect(self) -> tuple[Any, str]:
        """Return this process's file system, and the folder's name there."""
        if self._made is None:
            with self._lock:
                if self._made is None:
                    self._made = _make_filesystem(self.url, self.protocol)
        return self._made


def _check_url(url: str) -> None:
    """Check that fsspec may open `url`, and that it carries no credentials.

    Raises:
        PrebakeError: it may not; the message shows no credentials.
    """
    protocol, _, rest = url.partition("://")
    try:
        authority = urlsplit(url).netloc
    except ValueError:
        raise PrebakeError(f"{protocol}://... is not a well-formed URL.") from None
    user, has_user, host = authority.rpartition("@")
    if has_user and (":" in user or protocol in _USER_IS_SECRET):
        raise PrebakeError(
            f"{protocol}://***@{host}: a store's URL must not carry credentials. Give them where "
            f"the driver looks for them: the environment, ~/.aws, fsspec's configuration."
        )
    if "?" in rest:
        raise PrebakeError(
            f"{url.partition('?')[0]}?***: a store's URL ends with its folder and has no query."
        )
    if "::" in url:
        raise PrebakeError(f"{url}: chained URLs are not supported; prebake has its own cache.")
    if not rest.strip("/"):
        raise PrebakeError(f"{url}: the URL of a folder is needed, such as s3://bucket/store.")
    if protocol not in fsspec.available_protocols():
        raise PrebakeError(
            f"{url}: {protocol}:// is unknown. Known are s3, gs, az, hf, https, http, memory and "
            f"the others of fsspec; a local folder is given without ://."
        )


def _make_filesystem(url: str, protocol: str) -> tuple[Any, str]:
    """Return a new file system of fsspec, and the name of the URL's folder in it."""
    try:
        # Neither shared with others in the process, nor with listings that may be out of date.
        filesystem, root = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True
        )
    except ImportError as error:
        raise PrebakeError(
            f"{url}: {protocol}:// needs a package that is not installed ({error}). "
            f"Run: pip install 'prebake[remote]'"
        ) from None
    if protocol in _S3:
        filesystem.retries = 1  # how often s3fs tries; that is decided here
        filesystem.max_concurrency = 1  # as is what goes on at once; saves a HEAD before each GET
    return filesystem, str(root).rstrip("/")


async def _gather(pending: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """Return the results or errors of calls, of which not too many go on at once."""
    gate = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(call: Callable[[], Awaitable[Any]]) -> Any:
        async with gate:
            return await call()

    return await asyncio.gather(*map(one, pending), return_exceptions=True)


async def _stream(
    filesystem: Any, name: str, options: dict[str, Any], to: "queue.SimpleQueue[list[bytes] | None]"
) -> None:
    """Put the bytes of a file into a queue, in lists of some pieces, and None at the end."""
    file = None
    try:
        file = await filesystem.open_async(name, "rb", **options)
        some: list[bytes] = []
        while piece := await file.read(PIECE_BYTES):
            some.append(piece)
            if sum(map(len, some)) >= PIECE_BYTES:
                to.put(some)
                some = []
                while to.qsize() > MAX_PIECES:  # who takes them is slower
                    await asyncio.sleep(0.002)
        to.put(some)
    finally:
        try:
            if file is not None:
                await _close(file)
        finally:
            to.put(None)


async def _close(file: Any) -> None:
    """Close a streamed file and its response, which s3fs leaves to the garbage collector."""
    response = getattr(file, "r", None)
    if response is not None:
        response.close()
    await file.close()


def _result_or_error(function: Callable[..., Any], call: Call) -> Any:
    try:
        return function(*call.args, **call.options)
    except Exception as error:  # raised by who looks at the results
        return error


def ahead(function: Callable[[T], U], items: Iterable[T], num_ahead: int) -> Iterator[U]:
    """Yield `function(item)` for each item, in order, with so many more in work meanwhile.

    In threads that an ending process does not wait for. After an error none of them is at work.
    """
    started: deque[queue.SimpleQueue[Any]] = deque()
    try:
        for item in items:
            answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
            work = partial(_put_answer, answer, function, item)
            threading.Thread(target=work, daemon=True).start()
            started.append(answer)
            if len(started) > num_ahead:
                yield unless_error(started.popleft().get())
        while started:
            yield unless_error(started.popleft().get())
    except Exception:
        for answer in started:
            answer.get()
        raise


def _put_answer(answer: queue.SimpleQueue[Any], function: Callable[[T], Any], item: T) -> None:
    try:
        answer.put(function(item))
    except BaseException as error:  # raised by who waits for it
        answer.put(error)


def unless_error(result: Any) -> Any:
    """Return a result of `call_all`, or raise it where it is an error."""
    if isinstance(result, BaseException):
        raise result
    return result


def unless_missing(result: Any) -> Any:
    """Return a result of `call_all`, None for a file that does not exist, or raise its error."""
    return None if isinstance(result, FileNotFoundError) else unless_error(result)


def reason_if_passing(error: Exception) -> str | None:
    """Return what is wrong, in words without secrets, if it may be over soon; else None."""
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        return None
    if _OFFLINE_ERROR in _base_names(error):
        return None
    for each in _chain(error):
        status, code = _own_status_and_code(each)
        if status is not None or code is not None:
            if code in _PASSING_CODES or status in _PASSING_STATUS:
                return f"HTTP {status}, {code}" if code else f"HTTP {status}"
            return None
        if _base_names(each) & _PASSING_ERRORS or getattr(each, "errno", None) in _PASSING_ERRNOS:
            return type(each).__name__
    return None


def _status_and_code(error: BaseException) -> tuple[int | None, str | None]:
    """Return the HTTP status, and the server's word for it, of an error or of what caused it."""
    for each in _chain(error):
        found = _own_status_and_code(each)
        if found != (None, None):
            return found
    return None, None


def _own_status_and_code(error: BaseException) -> tuple[int | None, str | None]:
    """Return status and code where botocore, aiohttp, requests, httpx and gcsfs put them."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = response.get("Error", {}).get("Code")
        return status, code if code and not str(code).isdigit() else None
    for owner, name in ((response, "status_code"), (error, "status"), (error, "code")):
        status = getattr(owner, name, None)  # one by one: aiohttp warns of its `code`
        if isinstance(status, int) and 100 <= status <= 599:
            return status, None
    return None, None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what caused it, and so on."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


def _base_names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()
_of_the_parent: list[Any] = []  # what a forked child has copies of, and must not close


def _forget_connections() -> None:
    """After a fork: sockets, and the thread that serves them, are the parent's."""
    for connection in list(_connections):
        _of_the_parent.append(connection._made)
        connection._made = None
        connection._lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_connections)
