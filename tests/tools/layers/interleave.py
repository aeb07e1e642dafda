"""Random interleavings of a session and its subagents in layers of their own, and a model of them."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crow.tools.disk import replace_file
from crow.tools.layers import Conflict, Place, apply, recover
from crow.tools.layers.children import ChildLayer, has_child, keeping, open_child
from crow.tools.layers.merge import Merge, merge, prepare_merge
from crow.tools.layers.view import View
from tests.tools.layers.trees import in_layer, killed_after

Files = dict[str, bytes]
"""The contents of files, by their paths relative to the workspace."""
NAMES = ("a.py", "b.txt", "d/one", "d/two", "d/deep/three", "e/four", "new", "d/new", "made/x", "made/y")
WORDS = 12


def read_files(root: Path) -> Files:
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            found[str(path.relative_to(root))] = path.read_bytes()
    return found


@dataclass
class Model:
    """What a subagent should have: its own versions, and what they were made of. None stands for no file."""

    own: dict[str, bytes | None] = field(default_factory=dict)
    bases: dict[str, bytes | None] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    """Paths that the session changed while a command ran: a conflict is right, whatever came first."""

    has_removed: bool = False
    """The subagent has removed the directory `d`, so it sees nothing that the session makes there."""
    is_made_again: bool = False
    """It has made this directory again since."""

    def view(self, workspace: Files) -> Files:
        seen: dict[str, bytes | None] = {path: text for path, text in workspace.items() if not self.hides(path)}
        return {path: content for path, content in {**seen, **self.own}.items() if content is not None}

    def hides(self, path: str) -> bool:
        return self.has_removed and path.startswith("d/")

    def change(self, path: str, content: bytes | None, workspace: Files) -> None:
        if content is None and path not in workspace and not self.hides(path):  # it was the subagent's alone
            self.forget(path)
            return
        if path not in self.own:
            self.bases[path] = None if self.hides(path) else workspace.get(path)
        self.own[path] = content
        self.is_made_again = self.is_made_again or (self.hides(path) and content is not None)

    def open(self, root: Path) -> None:
        """What the subagent has removed and the session, too, is no change any more when the layer is opened."""
        if self.has_removed and not self.is_made_again and not (root / "d").exists():
            self.has_removed = False
            for path in [each for each in self.own if each.startswith("d/")]:
                self.forget(path)
        for path, content in [*self.own.items()]:
            if content is None and not self.hides(path) and not (root / path).exists():
                self.forget(path)

    def forget(self, path: str) -> None:
        self.own.pop(path, None)
        self.bases.pop(path, None)
        self.doubtful.discard(path)


class Round:
    """One random history of a session with some subagents."""

    def __init__(self, directory: Path, rng: random.Random, *, subagents: int, kills: bool) -> None:
        self.root, self.place = directory / "tree", Place(directory / "data")
        self.rng, self.kills = rng, kills
        self.root.mkdir()
        self.tokens = 0
        for name in NAMES[:6]:
            self.write(name, b"".join(b"%s line %d\n" % (name.encode(), n) for n in range(WORDS)))
        self.workspace = read_files(self.root)
        self.models = {f"task-{n}": Model() for n in range(subagents)}
        self.counts: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def write(self, name: str, content: bytes | None) -> None:
        path = self.root / name
        if content is not None:
            replace_file(path, content)
        else:
            path.unlink(missing_ok=True)

    def step(self) -> None:
        """Do one random thing, and check everything."""
        task = self.rng.choice([*self.models])
        kind = self.rng.choices(
            ("edit", "command", "session", "remove", "keep", "merge", "drop"), (6, 4, 6, 2, 1, 2, 0.5)
        )[0]
        match kind:
            case "session":
                self.change_workspace()
            case "edit" | "remove":
                self.edit(task, removes=kind == "remove")
            case "command":
                self.run_command(task)
            case "keep" | "merge":
                self.settle(task, merges_texts=kind == "merge")
            case "drop":
                with_child(self.place, task, self.root, lambda child: child.remove())
                self.models[task] = Model()
        self.count(kind)
        assert read_files(self.root) == self.workspace, f"{kind} of {task} changed the workspace"
        if kind in ("edit", "remove", "command", "keep", "merge"):
            self.check_view(task)

    def changed(self, content: bytes) -> bytes:
        """Return a text with one changed line."""
        lines = content.splitlines(keepends=True)
        self.tokens += 1
        token = b"token %d\n" % self.tokens
        place = self.rng.randrange(len(lines) + 1)
        if place < len(lines) and self.rng.random() < 0.8:
            lines[place] = token
        else:
            lines.insert(place, token)
        return b"".join(lines)

    def change_workspace(self) -> str:
        """Let the session change a file. Return its name."""
        name = self.rng.choice(NAMES)
        before = self.workspace.get(name)
        if before is not None and self.rng.random() < 0.15:
            self.write(name, None)
            del self.workspace[name]
        else:
            self.workspace[name] = self.changed(before or b"")
            self.write(name, self.workspace[name])
        return name

    def edit(self, task: str, *, removes: bool) -> None:
        """Let a subagent change a file with crow's tools."""
        model = self.models[task]
        name = self.rng.choice(NAMES)
        before = model.view(self.workspace).get(name)
        if removes and before is None:
            return
        after = None if removes else self.changed(before or b"")

        def work() -> None:
            child = open_child(self.place, task, [self.root])
            view, path = View(child.layer), self.root / name
            view.note_read(path)
            child.note_before(path)
            if after is None:
                view.remove(path)
            else:
                replace_file(view.prepare_write(path)[0], after)
            child.close()

        if self.kills and self.rng.random() < 0.3 and killed_after(self.rng.randint(1, 400), work):
            self.count("killed edits")
            seen = self.files_of(task).get(name)
            assert seen in (before, after), "half an edit"
            if seen == before:
                return
        elif not self.kills or read_child(self.place, task, self.root, name) != after:
            work()
        model.open(self.root)
        model.change(name, after, self.workspace)

    def run_command(self, task: str) -> None:
        """Let a subagent run a command, while the session may change files before and after what it does."""
        model = self.models[task]
        child = open_child(self.place, task, [self.root])
        model.open(self.root)
        child.begin()
        early = self.change_workspace() if self.rng.random() < 0.2 else None
        seen = model.view(self.workspace)
        name = self.rng.choice(NAMES)
        token = self.tokens = self.tokens + 1
        commands: list[tuple[str, Files | dict[str, None]]] = [
            (f"mkdir -p $(dirname {name}); echo 'token {token}' >> {name}", {name: seen.get(name, b"")}),
            (f"rm -f {name}", {name: None}),
            ("rm -rf d", {path: None for path in seen if path.startswith("d/")}),
            ("rm -rf d; mkdir d; echo back > d/back", {path: None for path in seen if path.startswith("d/")}),
            ("cat a.py > /dev/null; ls -R > /dev/null", {}),
        ]
        line, changes = self.rng.choice(commands)
        is_in_workspace = (self.root / "d").is_dir()
        had_folder = View(child.layer).locate(self.root / "d") is not None and is_in_workspace
        in_layer(child.layer, self.root, line)
        then = {**self.workspace}
        late = self.change_workspace() if self.rng.random() < 0.2 else None
        if self.kills and self.rng.random() < 0.2:
            self.count("killed before the note")
            child.close()
        else:
            child.note()
            child.close()
        if "rm -rf d" in line and not is_in_workspace:  # the directory was the subagent's alone, so it hides nothing
            model.has_removed = model.is_made_again = False
        for path, content in changes.items():
            if path not in model.own and path in (early, late):
                model.doubtful.add(path)
            if ">>" in line:
                model.change(path, (content or b"") + b"token %d\n" % token, then)
            elif path in seen:
                model.change(path, None, then)
        if "rm -rf d" in line and (had_folder or model.has_removed):
            if had_folder:
                model.has_removed, model.is_made_again = True, False
            if {early, late} & {name for name in NAMES if name.startswith("d/")}:
                model.doubtful |= {path for path in model.own if path.startswith("d/")}
        if "back" in line:
            model.change("d/back", b"back\n", then)

    def settle(self, task: str, *, merges_texts: bool) -> None:
        """Keep or merge what a subagent has changed."""
        model = self.models[task]
        model.open(self.root)
        before = {**self.workspace}

        def work() -> Merge | None:
            if not has_child(self.place, task):
                return None
            child = open_child(self.place, task, [self.root])
            try:
                made = merge(child, merges_texts=merges_texts)
                if made.conflicts and not merges_texts:
                    return made
                if not made.changes.operations:
                    if not made.conflicts:
                        child.remove()
                    return made
                change_set = prepare_merge(self.place, child, made, {})
                paths = [each.name for each in made.changes.operations if not each.is_meta]
                with keeping(child, change_set.id, paths):
                    apply(change_set)
                if not made.conflicts:
                    child.remove()
                return made
            except Conflict as error:
                raise AssertionError(error) from error
            finally:
                child.close()

        if self.kills and self.rng.random() < 0.4:
            was_killed = killed_after(self.rng.randint(1, 4_000), work)
            found = recover(self.place)
            assert not any(each.problem for each in found)
            self.count("killed keeps" if was_killed else "keeps not killed")
            self.workspace = read_files(self.root)
            made = None
        else:
            made = work()
            self.workspace = read_files(self.root)
        self.check_settled(model, before, made, merges_texts=merges_texts)
        if not has_child(self.place, task):
            self.models[task] = Model()

    def check_settled(self, model: Model, before: Files, made: Merge | None, *, merges_texts: bool) -> None:
        """Check that each file is either as it was, or has the right content, and that no conflict is silent."""
        named = [] if made is None else [os.path.relpath(path, self.root) for path in made.conflicts]
        for path in {*before, *self.workspace, *model.own}:
            now, after = before.get(path), self.workspace.get(path)
            if path not in model.own:
                assert after == now, f"{path} was never changed by the subagent"
                continue
            right, is_conflict = merged(model.bases[path], now, model.own[path])
            is_named = any(path == name or path.startswith(f"{name}/") for name in named)
            if after != now:
                self.count("kept files")
                assert path in model.doubtful or (not is_conflict and after == right), (path, model.bases[path], now)
                assert after == model.own[path] or after == right
                model.forget(path)
                model.has_removed = model.has_removed and not model.hides(path)
            elif now == right and not is_conflict:
                if made is not None and not named:
                    model.forget(path)
            elif made is not None and (merges_texts or not named):
                assert is_named, f"{path} was left out silently"
                self.count("conflicts")
                if not is_conflict and path not in model.doubtful:
                    self.count("needless conflicts")

    def check_view(self, task: str) -> None:
        self.models[task].open(self.root)
        seen, expected = self.files_of(task), self.models[task].view(self.workspace)
        assert seen == expected, f"{task} sees {differing(seen, expected)}"

    def files_of(self, task: str) -> Files:
        """Return what a subagent sees, read with crow's view. It must be what a command sees."""
        child = open_child(self.place, task, [self.root])
        try:
            view = View(child.layer)
            names = {*NAMES, "d/back"}
            found = {name: view.locate(view.resolve(self.root / name)) for name in names}
            files = {name: path.read_bytes() for name, path in found.items() if path is not None and path.is_file()}
            if self.rng.random() < 0.2:
                seen = in_layer(
                    child.layer,
                    self.root,
                    ":",
                    lambda: {name: text.decode() for name, text in read_files(self.root).items()},
                )
                texts = {name: text.decode() for name, text in files.items()}
                assert seen == texts, f"a command sees {differing(seen, texts)}"
            return files
        finally:
            child.close()


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    return {name: (one.get(name), other.get(name)) for name in {*one, *other} if one.get(name) != other.get(name)}


def read_child(place: Place, task: str, root: Path, name: str) -> bytes | None:
    """Return the content of a file as a subagent sees it; None if there is none."""
    child = open_child(place, task, [root])
    try:
        path = View(child.layer).locate(root / name)
        return path.read_bytes() if path is not None and path.exists() else None
    finally:
        child.close()


def with_child(place: Place, task: str, root: Path, work: Callable[[ChildLayer], None]) -> None:
    child = open_child(place, task, [root])
    try:
        work(child)
    finally:
        child.close()


def merged(base: bytes | None, theirs: bytes | None, own: bytes | None) -> tuple[bytes | None, bool]:
    """Return the merge of three versions, computed by git, and whether they are in conflict."""
    if own in (base, theirs):
        return theirs, False
    if base == theirs:
        return own, False
    if base is None or theirs is None or own is None:
        return theirs, True
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("theirs", "base", "own")]
        for path, content in zip(paths, (theirs, base, own), strict=True):
            path.write_bytes(content)
        done = subprocess.run(["git", "merge-file", "-p", *map(str, paths)], capture_output=True, check=False)
    return (theirs, True) if done.returncode else (done.stdout, False)


def check_interleaving(
    directory: Path, rng: random.Random, *, subagents: int = 9, steps: int = 40, kills: bool = True
) -> Mapping[str, int]:
    """Run one random history. Return how often each thing happened."""
    made = Round(directory, rng, subagents=subagents, kills=kills)
    for _ in range(steps):
        made.step()
    return made.counts
