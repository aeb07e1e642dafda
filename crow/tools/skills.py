"""Finds and reads skills: folders with a SKILL.md that says how to do something.

The user's folders are searched first, then the folders of the workspace. Skills of the workspace are untrusted data
until the user allows them. They are ignored if their files are outside the workspace after links are resolved. Only
names and descriptions are read in advance. Each description is reduced to one line that cannot close a section of the
prompt. Devices are ignored, and only the beginning of a very large file is read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from crow.tools import SKILL_FOLDERS, SkillInfo
from crow.tools.disk import read_file
from crow.tools.front_matter import front_matter

_FILE = "SKILL.md"
_FILE_BYTES = 256 * 1024
HEAD_BYTES = 16 * 1024
_MAX_SKILLS = 200
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DESCRIPTION_CHARS = 500


def find_skills(user_folders: Sequence[Path], cwd: Path, is_inside: Callable[[Path], bool]) -> tuple[SkillInfo, ...]:
    """Return all skills, sorted by name. If several have the same name, the first one found is used. The user's folders
    are searched first, so a workspace cannot replace a user's skill.

    `is_inside` tells whether a resolved path is in the workspace and may be read without asking the user.
    """
    found: dict[str, SkillInfo] = {}
    places = [(folder, False) for folder in user_folders] + [(cwd / folder, True) for folder in SKILL_FOLDERS]
    for folder, is_from_workspace in places:
        for each in _skills_in(folder, is_inside if is_from_workspace else None):
            if len(found) < _MAX_SKILLS:
                found.setdefault(each.name, each)
    return tuple(found[name] for name in sorted(found))


def _skills_in(folder: Path, is_inside: Callable[[Path], bool] | None) -> Iterator[SkillInfo]:
    """Return the skills in a folder; `is_inside` is None for a user's folder."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(10 * _MAX_SKILLS), strict=False))
    except OSError:  # usually there is no such folder
        return
    for folder_name in names:
        path = Path(os.path.realpath(folder / folder_name / _FILE))
        if is_inside is not None and not is_inside(path):
            continue
        try:
            head = read_file(path, 0, HEAD_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        fields, _ = front_matter(head, ("name", "description"))
        name, description = fields.get("name", folder_name), clean_line(fields.get("description", ""))
        if NAME.fullmatch(name):
            is_from_workspace = is_inside is not None
            yield SkillInfo(name=name, description=description, source=str(path), is_from_workspace=is_from_workspace)


def clean_line(text: str) -> str:
    """Return the text on one line, cut to `_DESCRIPTION_CHARS` characters. `<` and `>` are replaced, so that the text
    cannot close a section of the prompt."""
    plain = " ".join("".join(char for char in text if char.isprintable() or char.isspace()).split())
    return plain.replace("<", "‹").replace(">", "›")[:_DESCRIPTION_CHARS]


def read_skill(skill: SkillInfo) -> tuple[str, str]:
    """Return the text of a skill below its front matter, and the sha256 (hex) of its file. If the file is larger than
    256 KiB, only its beginning is read, and a line at the end says so.

    :raises OSError: the file cannot be read any more, or a link has been put into its path.
    """
    data = read_file(Path(skill.source), 0, _FILE_BYTES + 1)
    text = data[:_FILE_BYTES].decode("utf-8", "replace")
    more = f"\n[only the first {_FILE_BYTES:,} bytes of the file]" if len(data) > _FILE_BYTES else ""
    return text[front_matter(text, ())[1] :].strip() + more, hashlib.sha256(data).hexdigest()
