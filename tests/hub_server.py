"""A stand-in for the Hugging Face Hub that the package `huggingface_hub` can talk to.

It keeps repositories in memory and answers the requests that a push and a pull make. Tests change
what it stores, or what it answers, to play a damaged or a malicious server.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

TOKEN = "hf_secretsecretsecretsecretsecret00"  # noqa: S105 (of the stand-in)
LARGE = (".safetensors", ".mp4")
"""Files that are kept in large file storage"""


def git_hash(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@dataclass
class StoredFile:
    data: bytes
    is_large: bool = False

    @property
    def oid(self) -> str:
        return git_hash(b"blob %d\0" % len(self.data) + self.data)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def listed(self, path: str) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "size": len(self.data), "oid": self.oid}
        if self.is_large:
            entry["oid"] = git_hash(self.sha256.encode())  # of the pointer
            entry["lfs"] = {"oid": self.sha256, "size": len(self.data), "pointerSize": 130}
        return entry


@dataclass
class StoredRepository:
    private: bool = False
    commits: list[dict[str, StoredFile]] = field(default_factory=lambda: [{}])
    messages: list[str] = field(default_factory=list)
    branches: dict[str, int] = field(default_factory=dict)
    """Number of the commit of branches other than main"""

    def commit_id(self, number: int = -1) -> str:
        return git_hash(str(number % len(self.commits)).encode())

    def find(self, revision: str) -> int | None:
        if revision == "main":
            return len(self.commits) - 1
        if revision in self.branches:
            return self.branches[revision]
        ids = [self.commit_id(number) for number in range(len(self.commits))]
        return ids.index(revision) if revision in ids else None

    @property
    def files(self) -> dict[str, StoredFile]:
        return self.commits[-1]


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, dict[str, str], bytes]


class StandInHub:
    """The state of the server, its answers, and every request that it has received."""

    def __init__(self) -> None:
        self.repositories: dict[str, StoredRepository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.user = "alice"
        self.organizations: list[str] = ["lab"]
        self.role = "write"
        self.large: tuple[str, ...] = LARGE
        self.interfere: Callable[[Request], Answer | None] = lambda request: None
        """Answers instead of the server, unless it returns None"""
        self.change_listing: Callable[[list[Any]], Any] = lambda entries: entries
        self.address = ""

    def paths(self, method: str) -> list[str]:
        return [request.path for request in self.requests if request.method == method]

    def answer(self, request: Request) -> Answer:
        self.requests.append(request)
        answered = self.interfere(request)
        if answered is not None:
            return answered
        path = urlsplit(request.path).path
        for method, pattern, action in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and method == request.method:
                return action(self, request, *map(unquote, found.groups()))
        return error(404, "no such route")

    def is_logged_in(self, request: Request) -> bool:
        return request.headers.get("authorization") == f"Bearer {TOKEN}"

    def visible(self, request: Request, repo_id: str) -> StoredRepository | None:
        repository = self.repositories.get(repo_id)
        if repository is None or (repository.private and not self.is_logged_in(request)):
            return None
        return repository

    def whoami(self, request: Request) -> Answer:
        if not self.is_logged_in(request):
            return error(401, "Invalid credentials in Authorization header")
        organizations = [{"name": name} for name in self.organizations]
        token = {"accessToken": {"role": self.role}}
        return answer({"name": self.user, "orgs": organizations, "auth": token})

    def create(self, request: Request) -> Answer:
        values = json.loads(request.body)
        owner = values.get("organization") or self.user
        if not self.is_logged_in(request) or owner not in [self.user, *self.organizations]:
            return error(403, "You don't have the rights to create a model under this namespace")
        repo_id = f"{owner}/{values['name']}"
        if repo_id in self.repositories:
            return error(409, "You already created this model repo")
        private = values.get("visibility") == "private" or values.get("private") is True
        self.repositories[repo_id] = StoredRepository(private)
        self.repositories[repo_id].files[".gitattributes"] = StoredFile(b"*.safetensors filter=lfs")
        return answer({"url": f"{self.address}/{repo_id}", "name": repo_id})

    def info(self, request: Request, repo_id: str, revision: str = "main") -> Answer:
        repository = self.visible(request, repo_id)
        if repository is None:
            return not_found()
        number = repository.find(revision)
        if number is None:
            return error(404, "Invalid rev id", "RevisionNotFound")
        values = {"id": repo_id, "sha": repository.commit_id(number), "private": repository.private}
        return answer({"_id": "1", "modelId": repo_id, **values})

    def paths_info(self, request: Request, repo_id: str, revision: str) -> Answer:
        repository = self.visible(request, repo_id)
        number = None if repository is None else repository.find(revision)
        if repository is None or number is None:
            return not_found()
        if request.headers.get("content-type", "").startswith("application/json"):
            wanted = json.loads(request.body)["paths"]
        else:
            wanted = parse_qs(request.body.decode())["paths"]
        files = repository.commits[number]
        entries = [files[path].listed(path) for path in wanted if path in files]
        return answer(self.change_listing(entries))

    def validate(self, request: Request) -> Answer:
        content = json.loads(request.body)["content"]
        block = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        problems = [] if block else [{"message": "no metadata"}]
        metadata = yaml.safe_load(block[1]) if block else {}
        for model in metadata.get("model-index", []):
            for result in model["results"]:
                if not {"task", "dataset", "metrics"} <= result.keys():
                    problems.append({"message": "model-index is not complete"})
        status = 400 if problems else 200
        return status, {}, json.dumps({"errors": problems, "warnings": []}).encode()

    def preupload(self, request: Request, repo_id: str, revision: str) -> Answer:
        if not self.is_logged_in(request) or repo_id not in self.repositories:
            return not_found()
        present = self.repositories[repo_id].files
        files = []
        for each in json.loads(request.body)["files"]:
            path, stored = each["path"], present.get(each["path"])
            mode = "lfs" if path.endswith(self.large) else "regular"
            entry: dict[str, Any] = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if stored is not None:
                entry["oid"] = stored.sha256 if stored.is_large else stored.oid
            files.append(entry)
        return answer({"files": files})

    def batch(self, request: Request, repo_id: str) -> Answer:
        if not self.is_logged_in(request):
            return error(401, "Invalid credentials in Authorization header")
        objects = []
        for each in json.loads(request.body)["objects"]:
            oid = each["oid"]
            upload = {"href": f"{self.address}/storage/{oid}", "header": {}}
            verify = {"href": f"{self.address}/verify/{oid}", "header": {}}
            known = {} if oid in self.objects else {"actions": {"upload": upload, "verify": verify}}
            objects.append({**each, **known})
        return answer({"transfer": "basic", "objects": objects})

    def store(self, request: Request, oid: str) -> Answer:
        if hashlib.sha256(request.body).hexdigest() != oid:
            return error(400, "wrong hash")
        self.objects[oid] = request.body
        return answer({})

    def verify(self, request: Request, oid: str) -> Answer:
        return answer({}) if oid in self.objects else error(404, "not uploaded")

    def commit(self, request: Request, repo_id: str, revision: str) -> Answer:
        repository = self.repositories.get(repo_id)
        if repository is None or not self.is_logged_in(request):
            return not_found()
        files = dict(repository.files)
        lines = [json.loads(line) for line in request.body.splitlines()]
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "header":
                parent = value.get("parentCommit")
                if parent is not None and parent != repository.commit_id():
                    return error(412, "A commit has happened since. Please refresh and try again.")
                repository.messages.append(value["summary"])
            elif key == "file":
                files[value["path"]] = StoredFile(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                files[value["path"]] = StoredFile(self.objects[value["oid"]], is_large=True)
            elif key == "deletedFile":
                del files[value["path"]]
        repository.commits.append(files)
        made = repository.commit_id()
        url = f"{self.address}/{repo_id}/commit/{made}"
        return answer({"success": True, "commitOid": made, "commitUrl": url})

    def resolve(self, request: Request, repo_id: str, revision: str, path: str) -> Answer:
        repository = self.visible(request, repo_id)
        number = None if repository is None else repository.find(revision)
        if repository is None or number is None:
            return not_found()
        stored = repository.commits[number].get(path)
        if stored is None:
            return error(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": repository.commit_id(number), "ETag": f'"{stored.oid}"'}
        if not stored.is_large:
            return 200, headers, stored.data
        headers["X-Linked-Size"] = str(len(stored.data))
        headers["X-Linked-ETag"] = f'"{stored.sha256}"'
        self.objects[stored.sha256] = stored.data
        return 302, {**headers, "Location": f"{self.address}/storage/{stored.sha256}"}, b""

    def stored(self, request: Request, oid: str) -> Answer:
        return 200, {"ETag": f'"{oid}"'}, self.objects[oid]


ID, REVISION = r"([^/]+/[^/]+)", r"([^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", "/api/whoami-v2", StandInHub.whoami),
    ("POST", "/api/repos/create", StandInHub.create),
    ("POST", "/api/validate-yaml", StandInHub.validate),
    ("GET", f"/api/models/{ID}", StandInHub.info),
    ("GET", f"/api/models/{ID}/revision/{REVISION}", StandInHub.info),
    ("POST", f"/api/models/{ID}/paths-info/{REVISION}", StandInHub.paths_info),
    ("POST", f"/api/models/{ID}/preupload/{REVISION}", StandInHub.preupload),
    ("POST", f"/api/models/{ID}/commit/{REVISION}", StandInHub.commit),
    ("POST", rf"/{ID}\.git/info/lfs/objects/batch", StandInHub.batch),
    ("PUT", r"/storage/(\w+)", StandInHub.store),
    ("POST", r"/verify/(\w+)", StandInHub.verify),
    ("GET", r"/storage/(\w+)", StandInHub.stored),
    ("HEAD", r"/storage/(\w+)", StandInHub.stored),
    ("HEAD", f"/{ID}/resolve/{REVISION}/(.+)", StandInHub.resolve),
    ("GET", f"/{ID}/resolve/{REVISION}/(.+)", StandInHub.resolve),
]


def answer(values: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(values).encode()


def error(status: int, message: str, code: str | None = None) -> Answer:
    headers = {"Content-Type": "application/json", "X-Error-Message": message}
    if code is not None:
        headers["X-Error-Code"] = code
    return status, headers, json.dumps({"error": message}).encode()


def not_found() -> Answer:
    return error(404, "Repository not found", "RepoNotFound")


@contextlib.contextmanager
def hub_of_this_process(folder: Path) -> Iterator[StandInHub]:
    """Serve a stand-in that the client of this process uses, with a user who is logged in."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    with running_hub() as server, pytest.MonkeyPatch.context() as patch:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        for module in (constants, file_download):  # older versions have copies in the second
            for name, value in (("HUGGINGFACE_CO_URL_TEMPLATE", template), ("ENDPOINT", "")):
                if hasattr(module, name):
                    patch.setattr(module, name, server.address + value)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub-cache"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
        patch.setenv("HF_TOKEN", TOKEN)
        yield server


@contextlib.contextmanager
def running_hub() -> Iterator[StandInHub]:
    """Serve a stand-in on a free port of this machine."""
    hub = StandInHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self._body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, extra, data = hub.answer(Request(self.command, self.path, headers, body))
            self.send_response(status)
            for name, value in extra.items():
                self.send_header(name, value)
            if "Content-Length" not in extra and "Transfer-Encoding" not in extra:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                with contextlib.suppress(OSError):  # the client stops reading what is too long
                    self.wfile.write(data)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        do_GET = do_HEAD = do_POST = do_PUT = _handle  # noqa: N815

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
