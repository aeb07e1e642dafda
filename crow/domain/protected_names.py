"""The names of files that make programs run commands, instruct agents or hold keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from unicodedata import category, normalize


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the table of protected names."""

    names: tuple[str, ...]
    """Names of files and folders, or relative paths such as `.github/workflows`, in lower case. They may be globs. A
    name covers everything in a folder of this name."""

    reason: str
    """Why the user is asked about each change."""

    is_fixed: bool = False
    """Whether the user's settings cannot remove the row."""

    is_last: bool = False
    """Whether the names count only as the last part of a path."""


ROWS = (
    _Row((".git", "git~1", ".gitconfig"), "git runs its hooks and the commands in its settings", is_fixed=True),
    _Row(("head",), "a file called HEAD can turn its folder into a repository", is_fixed=True, is_last=True),
    _Row((".gitattributes",), "chooses the filters and diff programs that git runs"),
    _Row((".gitmodules", ".lfsconfig"), "says from where git fetches, and how it updates submodules"),
    _Row((".config/git",), "git's settings, in a folder of settings"),
    _Row(
        (".husky", ".pre-commit-config.yaml", "lefthook.yml", "lefthook.yaml", ".lefthook.yml", ".lefthook.yaml"),
        "its commands run at each commit",
    ),
    _Row(
        (".hg/hgrc", ".hg/hgrc-not-shared", ".hgrc", ".sl/config", ".jj/repo/config.toml", ".jj/workspace-config.toml"),
        "Mercurial, Sapling and Jujutsu run the commands in their settings",
    ),
    _Row((".pre-commit-hooks.yaml", ".overcommit.yml", ".lintstagedrc*"), "its commands run at each commit"),
    _Row((".crow",), "crow's skills and agents", is_fixed=True),
    _Row(
        (".agents", ".claude", ".claude.json", ".codex", ".gemini", ".opencode", "opencode.json", "opencode.jsonc"),
        "settings, hooks and skills of coding agents",
    ),
    _Row(
        (".cursor", ".windsurf", ".roo", ".kiro", ".pi", ".amazonq", ".clinerules", ".continue", ".goose", ".augment"),
        "settings, hooks and rules of coding agents",
    ),
    _Row(
        (".trae", ".qwen", ".junie", ".factory", ".openhands", ".copilot", ".vibe", ".crush.json", "crush.json"),
        "settings, hooks and rules of coding agents",
    ),
    _Row((".aider*", ".roomodes", ".mcp.json"), "settings of coding agents, which name commands to run"),
    _Row(
        (".cursorrules", ".windsurfrules", ".goosehints", ".github/copilot-instructions.md", ".github/instructions"),
        "instructs coding agents",
    ),
    _Row((".github/agents", ".github/hooks", ".github/prompts", ".github/skills"), "instructs coding agents"),
    _Row(
        (
            "agents.md",
            "agents.override.md",
            "claude.md",
            "claude.local.md",
            "gemini.md",
            "qwen.md",
            "crush.md",
            "warp.md",
        ),
        "instructs coding agents",
        is_last=True,
    ),
    _Row(
        (".vscode", ".idea", ".zed", ".fleet", ".nova", "*.code-workspace", ".devcontainer", ".devcontainer.json"),
        "its tasks and programs run when an editor opens the folder",
    ),
    _Row((".exrc", ".nvim.lua", ".nvimrc", ".vimrc", ".dir-locals.el", ".emacs", ".emacs.d"), "editors run it"),
    _Row(("ruby_lsp/*/addon*", "pyrightconfig.json"), "chooses code that a language server runs"),
    _Row((".github/workflows", ".github/actions", ".forgejo", ".gitea"), "runs with the repository's secrets"),
    _Row(
        (".gitlab-ci.yml", ".circleci", ".buildkite", ".travis.yml", "azure-pipelines.yml", "bitbucket-pipelines.yml"),
        "runs with the repository's secrets",
    ),
    _Row((".drone.yml", ".woodpecker", ".woodpecker.yml", "jenkinsfile"), "runs with the repository's secrets"),
    _Row(
        (
            ".envrc",
            ".mise.toml",
            ".mise.*.toml",
            "mise.toml",
            "mise.*.toml",
            ".mise",
            ".config/mise",
            ".config/mise.toml",
        ),
        "runs when a shell enters the folder",
    ),
    _Row((".tool-versions", ".rtx.toml", ".autoenv", ".autoenv.zsh"), "chooses the programs that a shell runs"),
    _Row(
        (".npmrc", ".pnpmfile.cjs", ".pnpmfile.mjs", ".yarnrc", ".yarnrc.yml", ".yarn", ".pnp.cjs", ".pnp.loader.mjs"),
        "chooses code and registries for npm, pnpm and yarn",
    ),
    _Row(("bunfig.toml", ".bunfig.toml"), "chooses code and registries for bun"),
    _Row(
        (".cargo/config.toml", ".cargo/config", ".cargo/env", ".cargo/bin"),
        "chooses the compiler, linker and runner that cargo starts",
    ),
    _Row((".bazelrc", ".bazelversion", ".bazeliskrc"), "chooses the bazel that runs, and its options"),
    _Row(
        (".mvn", "gradle-wrapper.properties", "maven-wrapper.properties"), "chooses the build tool that is downloaded"
    ),
    _Row(
        (".gdbinit", ".lldbinit", ".pdbrc", ".irbrc", ".pryrc", ".rprofile", ".ghci", ".iex.exs", ".octaverc"),
        "a debugger or an interpreter runs it when it starts in the folder",
    ),
    _Row((".ripgreprc",), "may name a program that each search runs"),
    _Row(
        (".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".login", ".logout"),
        "shells run it when they start or end",
    ),
    _Row(
        (".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".kshrc", ".cshrc", ".tcshrc", "config.fish"),
        "shells run it when they start or end",
    ),
    _Row(
        (".inputrc", ".xinitrc", ".xprofile", ".xsession", ".xsessionrc", ".tmux.conf"),
        "runs or binds commands at login",
    ),
    _Row(
        (".ssh", ".gnupg", ".aws", ".netrc", ".pypirc", ".git-credentials"), "holds keys and passwords", is_fixed=True
    ),
)
"""Every protected name, with the reason. The user's settings add names, and remove rows that are not fixed."""

WORKING_PARTS = frozenset(
    ((".claude", "worktrees"), *((".yarn", name) for name in ("cache", "unplugged", "install-state.gz")))
)
"""Folders whose names are protected, each with a name in it that is not protected: programs keep ordinary work there,
such as whole worktrees or downloaded packages."""

REPOSITORY_PARTS = frozenset(
    (
        *("config", "config.worktree", "commondir", "gitdir", "hooks", "info", "modules", "objects", "refs"),
        *("worktrees", "rebase-merge", "rebase-apply", "sequencer", "remotes", "branches"),
    )
)
"""Names that are protected if they are beside the HEAD of a git repository, whatever the repository's folder is
called."""

SKIPPED = frozenset(
    (
        *("node_modules", "bower_components", ".venv", "venv", "site-packages", "target", "__pycache__"),
        *(".tox", ".nox", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".gradle", ".next", ".yarn", ".pnpm-store"),
    )
)
"""Folders in which dependencies and build results are stored. They are not searched for protected files."""

_REMOVABLE = frozenset(name for row in ROWS if not row.is_fixed for name in row.names)
"""The names that the user's settings can remove."""


def added_name(name: str) -> str:
    """Return a name that the settings add. :raises ValueError: it is absolute, too wide, or leaves its folder."""
    parts = name.strip("/").split("/")
    if name.startswith(("/", "~")) or any(part in ("", ".", "..") or not part.strip("*?") for part in parts):
        raise ValueError
    return name


def removed_name(name: str) -> str:
    """Return a name that the settings remove. :raises ValueError: it cannot be removed."""
    if name.casefold() not in _REMOVABLE:
        raise ValueError
    return name


class ProtectedNames:
    """The names in the table, with the changes of the user's settings.

    `added` are names, relative paths or globs. `removed` are names in the table. Names of rows that are fixed stay.
    """

    def __init__(self, added: Iterable[str] = (), removed: Iterable[str] = ()) -> None:
        gone = {name.casefold() for name in removed}
        kept = [(name, row.is_last) for row in ROWS for name in row.names if row.is_fixed or name not in gone]
        kept += [(name.strip("/"), False) for name in added]
        # Names that protect a path if they are any of its parts (`_anywhere`), or its last part (`_last`).
        self._anywhere = frozenset(name for name, is_last in kept if _is_plain(name) and not is_last)
        self._last = frozenset(name for name, is_last in kept if is_last)
        self._anywhere |= {fold_name(name) for name in self._anywhere}
        # Relative paths and globs, as patterns of their parts. They are tried only if a part of a path is in `_ends`,
        # which has all last parts without wildcards, or matches `_globs`.
        split = [tuple(name.split("/")) for name, _ in kept if not _is_plain(name)]
        self._paths = tuple(tuple(map(_part_pattern, path)) for path in split)
        self._ends = self._anywhere | self._last | {fold_name(path[-1]) for path in split if _is_plain(path[-1])}
        globs = [_part_pattern(path[-1]).pattern for path in split if not _is_plain(path[-1])]
        self._globs = re.compile("|".join(f"(?:{glob})" for glob in globs) or r"(?!)")

    def covers(self, parts: Sequence[str]) -> bool:
        """Return whether a path with these parts is protected. The parts are folded by `fold_name`."""
        if parts[-1] in self._last:
            return True
        if not self._anywhere.isdisjoint(parts):
            following = (*parts[1:], "")
            if any(
                part in self._anywhere and (part, then) not in WORKING_PARTS
                for part, then in zip(parts, following, strict=True)
            ):
                return True
        return any(self.may_name(part) and self._ends_here(parts[: index + 1]) for index, part in enumerate(parts))

    def names(self, parts: Sequence[str]) -> bool:
        """Return whether a path with these parts ends with a protected name. The parts are folded by `fold_name`."""
        last = parts[-1]
        return last in self._anywhere or last in self._last or (self.may_name(last) and self._ends_here(parts))

    def may_name(self, part: str) -> bool:
        """Return whether a protected name or path can end with this part, which is folded by `fold_name`."""
        return part in self._ends or self._globs.match(part) is not None

    def _ends_here(self, parts: Sequence[str]) -> bool:
        return any(
            len(path) <= len(parts)
            and all(pattern.match(part) for pattern, part in zip(path, parts[-len(path) :], strict=True))
            for path in self._paths
        )


def _is_plain(name: str) -> bool:
    """Return whether this is the name of a file or folder, and neither a path nor a glob."""
    return not any(sign in name for sign in "/*?[")


@lru_cache(maxsize=512)
def _part_pattern(part: str) -> re.Pattern[str]:
    """Return the pattern for one part of a path. It matches names folded by `fold_name`."""
    return re.compile(translate(normalize("NFKC", part).casefold()))


def fold_name(name: str) -> str:
    """Return the name in lower case, without characters that some file systems ignore: dots and spaces at the end,
    invisible characters, and anything after a colon."""
    if name.isascii() and ":" not in name and not name.endswith((" ", ".")):  # takes a tenth of the time
        return name.lower()
    visible = "".join(char for char in normalize("NFKC", name) if category(char) != "Cf")
    return visible.partition(":")[0].rstrip(" .").casefold()


DEFAULT_NAMES = ProtectedNames()
"""The names in the table, without any changes."""
