"""Skills: folders with a SKILL.md that says how to do something.

The user's own folders come first, then those of the workspace, which are data of strangers until the user says
otherwise. Only name and description are read beforehand; both are made one harmless line. A skill of the workspace lies
inside the workspace after links are resolved; others, devices and giants are passed over.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from crow.tools import SkillInfo
from crow.tools.front_matter import front_matter
from crow.tools.workspace import read_file

__all__ = ["FoundSkill", "SkillText", "find_skills", "read_skill"]

WORKSPACE_FOLDERS = (".crow/skills", ".agents/skills", ".claude/skills")
FILE = "SKILL.md"
FILE_BYTES = 256 * 1024
HEAD_BYTES = 16 * 1024
MOST_SKILLS = 200
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DESCRIPTION_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSkill:
    """A skill and the resolved path of its file."""

    skill: SkillInfo
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillText:
    """What a skill says below its front matter. `digest` is the sha256 (hex) of all that was read of the file."""

    text: str
    digest: str


def find_skills(user_folders: Sequence[Path], cwd: Path, is_inside: Callable[[Path], bool]) -> tuple[FoundSkill, ...]:
    """All skills, by name; of two with one name the first counts, so that a workspace replaces none of the user's.

    `is_inside` tells whether a resolved path lies in the workspace.
    """
    found: dict[str, FoundSkill] = {}
    places = [(folder, False) for folder in user_folders] + [(cwd / folder, True) for folder in WORKSPACE_FOLDERS]
    for folder, of_workspace in places:
        for skill in skills_in(folder, is_inside if of_workspace else None):
            if len(found) < MOST_SKILLS:
                found.setdefault(skill.skill.name, skill)
    return tuple(found[name] for name in sorted(found))


def read_skill(found: FoundSkill) -> SkillText:
    """Read a skill. :raises OSError: it cannot be read any more, or a link leads elsewhere by now."""
    data = read_file(found.path, 0, FILE_BYTES)
    text = data.decode("utf-8", "replace")
    return SkillText(text=text[front_matter(text, ())[1] :].strip(), digest=hashlib.sha256(data).hexdigest())


def skills_in(folder: Path, is_inside: Callable[[Path], bool] | None) -> Iterator[FoundSkill]:
    """The skills of a folder; of one of the workspace, those whose files are inside."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(10 * MOST_SKILLS), strict=False))
    except OSError:  # mostly there is none
        return
    for name in names:
        path = Path(os.path.realpath(folder / name / FILE))
        if is_inside is not None and not is_inside(path):
            continue
        try:
            head = read_file(path, 0, HEAD_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        fields, _ = front_matter(head, ("name", "description"))
        called = fields.get("name", name)
        if NAME.fullmatch(called):
            skill = SkillInfo(
                name=called,
                description=one_line(fields.get("description", "")),
                source=str(path),
                of_workspace=is_inside is not None,
            )
            yield FoundSkill(skill=skill, path=path)


def one_line(text: str) -> str:
    """A description that can close no section and open no line."""
    plain = " ".join("".join(char for char in text if char.isprintable() or char.isspace()).split())
    return plain.replace("<", "‹").replace(">", "›")[:DESCRIPTION_CHARS]
