"""Skills: folders with a SKILL.md that says how to do something.

Strategy: the user's own folders come first, then those of the workspace, which are data of strangers until the user
says otherwise. Only name and description are read beforehand; both are made one harmless line. Links that lead out
of the folder's root, devices and giants are passed over. Knows no tool and no permission.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from crow.tools import Skill
from crow.tools.front_matter import front_matter

__all__ = ["FoundSkill", "find_skills", "read_skill"]

WORKSPACE_FOLDERS = (".crow/skills", ".agents/skills", ".claude/skills")
FILE = "SKILL.md"
FILE_BYTES = 256 * 1024
HEAD_BYTES = 16 * 1024
MOST_SKILLS = 200
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DESCRIPTION_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSkill:
    """A skill and the resolved path of its file; `root` is the folder of folders that it was found in."""

    skill: Skill
    path: Path
    root: Path


def find_skills(user_folders: Sequence[Path], cwd: Path) -> tuple[FoundSkill, ...]:
    """All skills, by name; of two with one name the first counts, so that a workspace replaces none of the user's."""
    found: dict[str, FoundSkill] = {}
    places = [(folder, False) for folder in user_folders] + [(cwd / folder, True) for folder in WORKSPACE_FOLDERS]
    for folder, of_workspace in places:
        for skill in skills_in(folder, of_workspace=of_workspace):
            if len(found) < MOST_SKILLS:
                found.setdefault(skill.skill.name, skill)
    return tuple(found[name] for name in sorted(found))


def read_skill(found: FoundSkill) -> str:
    """The skill's text without its front matter. :raises OSError: it cannot be read any more."""
    text = bounded_text(found.path, FILE_BYTES)
    return text[front_matter(text, ())[1] :].strip()


def skills_in(folder: Path, *, of_workspace: bool) -> Iterator[FoundSkill]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(10 * MOST_SKILLS), strict=False))
    except OSError:  # mostly there is none
        return
    root = Path(os.path.realpath(folder))
    for name in names:
        path = Path(os.path.realpath(root / name / FILE))
        if of_workspace and not path.is_relative_to(root):
            continue
        try:
            head = bounded_text(path, HEAD_BYTES)
        except OSError:
            continue
        fields, _ = front_matter(head, ("name", "description"))
        called = fields.get("name", name)
        if NAME.fullmatch(called):
            skill = Skill(
                name=called,
                description=one_line(fields.get("description", "")),
                source=str(path),
                of_workspace=of_workspace,
            )
            yield FoundSkill(skill=skill, path=path, root=root)


def bounded_text(path: Path, limit: int) -> str:
    """The beginning of a regular file. :raises OSError: there is none, or it is something else."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        return file.read(limit).decode("utf-8", "replace")


def one_line(text: str) -> str:
    """A description that can close no section and open no line."""
    plain = " ".join("".join(char for char in text if char.isprintable() or char.isspace()).split())
    return plain.replace("<", "‹").replace(">", "›")[:DESCRIPTION_CHARS]
