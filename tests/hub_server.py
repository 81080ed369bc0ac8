"""As much of the Hugging Face Hub as its own client needs to read one dataset repository.

with HubServer(folder) as hub:  # serves the files of `folder` as hf://datasets/me/store
    subprocess.run(..., env={"HF_ENDPOINT": hub.endpoint})
"""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "datasets/me/store"
COMMIT = "c" * 40
NOT_FOUND = {"X-Error-Code": "EntryNotFound"}


class HubServer:
    """Serves a folder on loopback."""

    def __init__(self, folder: Path) -> None:
        class Handler(_Handler):
            root = folder

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def endpoint(self) -> str:
        """What the client takes for the Hub."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    root: Path

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        path = unquote(url.path)
        if match := re.fullmatch(rf"/{REPOSITORY}/resolve/[^/]+/(.*)", path):
            self.send_file(self.root / match[1])
        elif match := re.fullmatch(rf"/api/{REPOSITORY}/tree/[^/]+/?(.*)", path):
            folder = self.root / match[1].strip("/")
            is_deep = parse_qs(url.query).get("recursive", [""])[0].lower() == "true"
            found = list(self.entries(folder, is_deep)) if folder.is_dir() else None
            self.send_json(found)
        elif re.fullmatch(rf"/api/{REPOSITORY}/paths-info/[^/]+", path):
            asked = json.loads(body) if body.startswith(b"{") else parse_qs(body.decode())
            paths = [self.root / name.strip("/") for name in asked["paths"]]
            self.send_json([self.entry(path) for path in paths if path.exists()])
        elif re.fullmatch(rf"/api/{REPOSITORY}(/revision/[^/]+)?", path):
            self.send_json({"id": REPOSITORY.partition("/")[2], "sha": COMMIT, "siblings": []})
        else:
            self.send_json(None)

    do_GET = do_HEAD = do_POST = answer  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass

    def entries(self, folder: Path, is_deep: bool) -> Iterator[dict[str, Any]]:
        for path in sorted(folder.rglob("*") if is_deep else folder.iterdir()):
            yield self.entry(path)

    def entry(self, path: Path) -> dict[str, Any]:
        about = {"path": path.relative_to(self.root).as_posix(), "oid": "0" * 40}
        if path.is_dir():
            return {"type": "directory", **about}
        return {"type": "file", "size": path.stat().st_size, **about}

    def send_file(self, path: Path) -> None:
        if not path.is_file():
            self.send_bytes(404, b"", NOT_FOUND)
            return
        data, status = path.read_bytes(), 200
        headers = {"ETag": '"0"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), int(match[2] or len(data) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{min(end, len(data)) - 1}/{len(data)}"
            data, status = data[start:end], 206
        self.send_bytes(status, data, headers)

    def send_json(self, value: Any) -> None:
        if value is None:
            self.send_bytes(404, b'{"error": "not found"}', NOT_FOUND)
        else:
            headers = {"Content-Type": "application/json"}
            self.send_bytes(200, json.dumps(value).encode(), headers)

    def send_bytes(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
