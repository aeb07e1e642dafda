"""A git server with TLS and Basic authentication, on the loopback interface."""

from __future__ import annotations

import base64
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from crow.tools.network.authority import Authority
from tests.tools.layers.trees import git

USER, PASSWORD = "dev", "pa55word-of-the-User"
_CONFIG = ("http.receivepack=true", "http.uploadpack=true")


@dataclass
class GitServer:
    """The repositories below `root`, each served as `https://localhost:PORT/NAME.git`."""

    root: Path
    port: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)
    """The headers of each request, with their names in lower case."""

    @property
    def ca(self) -> Path:
        return self.root / "ca.pem"

    def create(self, name: str) -> None:
        """Create a repository with one commit."""
        git(self.root, "init", "-q", "-b", "main", "work")
        work = self.root / "work"
        (work / "a").write_text("one\n")
        git(work, "add", "-A")
        git(work, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
        git(self.root, "clone", "-q", "--bare", "work", f"{name}.git")

    def subjects(self, name: str) -> list[str]:
        """Return the subjects of the commits on the branch main."""
        command = ["git", "-C", str(self.root / f"{name}.git"), "log", "--format=%s", "main"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        given = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if request.headers.get("Authorization") != f"Basic {given}":
            return 401, [("WWW-Authenticate", "Basic realm=git")], b""
        if request.path == "/echo":
            return 200, [], str(request.headers).encode()
        path, _, query = request.path.partition("?")
        env = {
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REMOTE_USER": USER,
            "REQUEST_METHOD": request.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": request.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
            "PATH": os.environ["PATH"],
            "GIT_CONFIG_COUNT": str(len(_CONFIG)),
        }
        for number, setting in enumerate(_CONFIG):
            env |= dict(
                zip((f"GIT_CONFIG_KEY_{number}", f"GIT_CONFIG_VALUE_{number}"), setting.split("="), strict=True)
            )
        ended = subprocess.run(["git", "http-backend"], input=body, env=env, stdout=subprocess.PIPE, check=True)
        head, _, content = ended.stdout.partition(b"\r\n\r\n")
        headers = [tuple(line.split(": ", 1)) for line in head.decode().split("\r\n")]
        status = next((int(value[:3]) for name, value in headers if name == "Status"), 200)
        return status, [(name, value) for name, value in headers if name != "Status"], content


@contextmanager
def serving_git(root: Path) -> Iterator[GitServer]:
    """Serve the repositories below a directory."""
    serving, authority = GitServer(root), Authority(["localhost"])
    serving.ca.write_bytes(authority.pem)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
                body += self.rfile.read(size)
                self.rfile.readline()
            status, headers, content = serving.answer(self, body)
            self.send_response(status)
            for name, value in (*headers, ("Content-Length", str(len(content)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = authority.context("localhost").wrap_socket(server.socket, server_side=True)
        serving.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield serving
        server.shutdown()
