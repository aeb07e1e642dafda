"""Tests which links of a prompt are attached as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from crow.agent.permissions.rules import user_rules
from crow.agent.turns.links import attach_files, path_of
from crow.domain.messages import Link, Resource, Text
from crow.tools.workspace import DiskWorkspace


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///home/me/a%20b.py", "/home/me/a b.py"),
        ("file://localhost/home/me/a.py#L10:20", "/home/me/a.py"),
        ("/home/me/100%.py", "/home/me/100%.py"),
        ("src/a.py#L3", "src/a.py"),
        ("file:///C:/code/a.py", "C:/code/a.py"),
        (r"C:\code\a.py#L1", r"C:\code\a.py"),
        ("https://host/a.py", None),
        ("file://server/share/a.py", None),
        ("zed:///agent/thread", None),
        ("http://[", None),
        ("", None),
    ],
)
def test_path_of_a_link_on_any_system(uri: str, path: str | None) -> None:
    assert path_of(uri) == path


async def test_small_text_files_of_the_workspace_are_attached_and_other_links_stay(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "secret.txt").write_text("outside")
    (work / "a.py").write_text("print()\n")
    (work / "big.txt").write_text("x" * 40_000)
    (work / "image.bin").write_bytes(b"\xff\x00")
    (work / "way-out").symlink_to(tmp_path / "secret.txt")
    link = Link(uri="a.py", name="a.py", mime_type="text/x-python")
    kept = [
        Link(uri=uri, name="n")
        for uri in ("big.txt", "image.bin", "missing.txt", "../secret.txt", "way-out", "https://host/a.py", "a\x00b")
    ]
    (work / ".env").write_text("KEY=1\n")
    (work / "env.txt").hardlink_to(work / ".env")
    (work / ".ssh").mkdir()
    (work / ".ssh" / "config").write_text("Host nest\n")
    kept += [Link(uri=uri, name="n") for uri in (".env", "env.txt", ".ssh/config")]
    found = await attach_files(
        [Text(text="look"), link, *kept], DiskWorkspace(work), user_rules([], ["read_file(.env)"])
    )
    assert found == (Text(text="look"), Resource(uri="a.py", text="print()\n", mime_type="text/x-python"), *kept)
