"""As much of the model hub's HTTP as downloads and uploads need, over folders on this machine."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import huggingface_hub.constants
import pytest


class FakeHub(BaseHTTPRequestHandler):
    """A hub, or with `silent` one that never answers. Its repositories are a folder for each branch."""

    repositories: dict[str, dict[str, Path]]  # "models/someone/tiny" or "datasets/someone/sums" -> branch -> folder
    asked: list[str]
    created: list[dict[str, Any]]
    pushed: dict[str, bytes]  # path in the repository -> content
    tokens: set[str]
    public: set[str]  # models that everybody may see
    silent = False

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.silent:
            time.sleep(30)
            return
        path = unquote(self.path.split("?")[0]).lstrip("/")
        path = (
            path.removeprefix("api/")
            if path.startswith("api/")
            else f"{'' if path[:9] == 'datasets/' else 'models/'}{path}"
        )
        name, branches = next(
            ((name, found) for name, found in self.repositories.items() if f"{path}/".startswith(f"{name}/")), ("", {})
        )
        if not branches:
            self.fault(404, "RepoNotFound", "Repository not found")
            return
        kind, _, rest = path.removeprefix(name).lstrip("/").partition("/")
        wanted = [branch for branch in branches if rest.startswith((branch, version_of(branch)))] if rest else ["main"]
        if not wanted:
            self.fault(404, "RevisionNotFound", "Invalid rev id")
            return
        branch, folder = wanted[0], branches.get(wanted[0])
        files = sorted(file for file in folder.rglob("*") if file.is_file()) if folder else []
        names = [file.relative_to(folder).as_posix() for file in files] if folder else []
        if kind == "tree":
            sizes = [file.stat().st_size for file in files]
            self.json(
                [
                    {"type": "file", "path": one, "size": size, "oid": f"{number:040d}"}
                    for number, (one, size) in enumerate(zip(names, sizes, strict=True))
                ]
            )
        elif kind == "resolve":
            prefix = branch if rest.startswith(branch) else version_of(branch)
            content = files[names.index(rest.removeprefix(f"{prefix}/"))].read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": version_of(branch)}
            self.reply(200, content, **headers)
        else:
            model = name.removeprefix("models/").removeprefix("datasets/")
            listed = [{"rfilename": one} for one in names]
            self.json({"id": model, "sha": version_of(branch), "siblings": listed, "private": model not in self.public})

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.tokens.add(self.headers.get("Authorization", ""))
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            asked = json.loads(content)
            if asked["organization"] == "other":
                self.fault(403, "", "You don't have the rights to create a model there")
                return
            self.created.append(asked)
            model = f"{asked['organization']}/{asked['name']}"
            self.repositories.setdefault(f"models/{model}", {"main": Path(__file__).parent / "none"})
            self.json({"url": f"{huggingface_hub.constants.ENDPOINT}/{model}"})
        elif "/preupload/" in self.path:
            files = json.loads(content)["files"]
            self.json(
                {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]}
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    self.pushed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            model = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            page = f"{huggingface_hub.constants.ENDPOINT}/{model}/commit/{'c' * 40}"
            self.json({"commitUrl": page, "commitOid": "c" * 40})
        else:  # /api/validate-yaml
            self.json({"warnings": [], "errors": []})

    def fault(self, status: int, code: str, message: str) -> None:
        self.reply(status, b"{}", **{"X-Error-Code": code, "X-Error-Message": message})

    def json(self, document: Any) -> None:
        self.reply(200, json.dumps(document).encode(), **{"Content-Type": "application/json"})

    def reply(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def version_of(branch: str) -> str:
    """The commit of a branch."""
    return hashlib.sha1(branch.encode()).hexdigest()


@contextmanager
def fake_hub(
    repositories: dict[str, dict[str, Path]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[FakeHub]]:
    """Context manager: huggingface_hub asks this hub, and keeps its files in `cache`."""
    hub = type(
        "Handler",
        (FakeHub,),
        {"repositories": repositories, "asked": [], "created": [], "pushed": {}, "tokens": set(), "public": set()},
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), hub) as http:
        http.daemon_threads, http.block_on_close = True, False
        threading.Thread(target=http.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{http.server_port}"
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + template[template.index("/{repo_id}") :]
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(variable, raising=False)
        yield hub
        http.shutdown()
