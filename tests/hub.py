"""A look-alike of the Hugging Face hub: a real HTTP server that answers what huggingface_hub asks, from dicts of bytes.

    with serve_hub({"org/model": Repo({"config.json": b"..."})}, datasets={"org/data": Repo(...)}) as hub:
        subprocess.run(..., env=hub.env(cache))     # a process whose HF_ENDPOINT is the look-alike, with its own cache

Each repository has one commit, under every name in `revisions`. `hub.requests` is what came in: ("GET", path).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

API = re.compile(r"/api/(models|datasets)/(.+?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
FILE = re.compile(r"/(datasets/)?(.+?)/resolve/([^/]+)/(.+)")


@dataclass
class Repo:
    files: Mapping[str, bytes]
    token: str | None = None  # private: others are told that it does not exist
    is_gated: bool = False  # its listing is public, its files are not
    breaks_off: bool = False  # each file ends halfway
    revisions: tuple[str, ...] = ("main",)

    @cached_property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class Hub:
    base: str
    repos: Mapping[str, Mapping[str, Repo]]  # kind, "models" or "datasets" -> id -> repository
    requests: list[tuple[str, str]] = field(default_factory=list)

    def env(self, home: Path, **variables: str) -> dict[str, str]:
        """The environment of a process that sees this hub; `home` has its cache."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "TRANSFORMERS_"))
        }
        hub = {"HF_ENDPOINT": self.base, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {**inherited, **hub, **variables}


@contextmanager
def serve_hub(
    models: Mapping[str, Repo] | None = None, datasets: Mapping[str, Repo] | None = None
) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(
        f"http://127.0.0.1:{server.server_port}",
        {"models": models or {}, "datasets": datasets or {}},
    )
    server.hub = hub  # type: ignore[attr-defined]
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.requests.append((self.command, unquote(url.path)))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if found := API.fullmatch(url.path):
            kind, name, action, revision, folder = (unquote(part or "") for part in found.groups())
            if repo := self._repo(hub.repos[kind].get(name), revision):
                self._listing(name, repo, action, folder, parse_qs(url.query + "&" + body))
        elif found := FILE.fullmatch(url.path):
            is_dataset, name, revision, file = (unquote(part or "") for part in found.groups())
            if repo := self._repo(
                hub.repos["datasets" if is_dataset else "models"].get(name), revision
            ):
                self._file(repo, file)
        else:
            self._refuse(404, "", "no such path")

    do_HEAD = do_POST = do_GET

    def _repo(self, repo: Repo | None, revision: str) -> Repo | None:
        """The repository, unless it is answered that there is none for this client."""
        if repo is None or (
            repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}"
        ):
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif revision not in ("", *repo.revisions, repo.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def _listing(
        self, name: str, repo: Repo, action: str, folder: str, asked: Mapping[str, list[str]]
    ) -> None:
        """What the repository is, what is in one of its folders (tree), or the given paths of it (paths-info)."""
        entries = {path: {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                   for path, data in repo.files.items()}  # fmt: skip
        for path in repo.files:
            for parent in map(str, PurePosixPath(path).parents[:-1]):
                entries[parent] = {
                    "type": "directory",
                    "path": parent,
                    "size": 0,
                    "oid": repo.commit,
                }
        prefix = f"{folder}/" if folder else ""
        is_recursive = asked.get("recursive", [""])[0].lower() == "true"
        if action == "tree":
            inside = [path for path in entries if path.startswith(prefix)]
            shown = [
                path for path in inside if is_recursive or "/" not in path.removeprefix(prefix)
            ]
            if not inside:
                return self._refuse(404, "EntryNotFound", f"{folder} does not exist")
            answer: Any = [entries[path] for path in shown]
        elif action == "paths-info":
            answer = [entries[path] for path in asked.get("paths", []) if path in entries]
        else:
            files = [{"rfilename": file} for file in repo.files]
            answer = {
                "id": name,
                "sha": repo.commit,
                "private": False,
                "gated": repo.is_gated,
                "siblings": files,
            }
            answer |= {"tags": [], "downloads": 0, "likes": 0}
        self._reply(json.dumps(answer).encode())

    def _file(self, repo: Repo, name: str) -> None:
        headers = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if repo.is_gated:
            self._refuse(403, "GatedRepo", "Access to this model is restricted", **headers)
        elif name not in repo.files:
            self._refuse(404, "EntryNotFound", "Entry not found", **headers)
        else:
            data = repo.files[name]
            headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
            status = 200
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                status, data = 206, data[first : last + 1]
            self._reply(data, status, breaks_off=repo.breaks_off, **headers)

    def _refuse(self, status: int, code: str, message: str, **headers: str) -> None:
        self._reply(
            json.dumps({"error": message}).encode(), status, **{"X-Error-Code": code}, **headers
        )

    def _reply(
        self, data: bytes, status: int = 200, *, breaks_off: bool = False, **headers: str
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if breaks_off else data)
        self.close_connection = self.close_connection or breaks_off

    def log_message(self, *args: object) -> None:
        pass
