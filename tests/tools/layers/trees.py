"""Random trees, destructive command lines, and pictures of trees to compare."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from crow.tools.layers import Changes, ChangeSet, Layer, Place, apply, find_set, invert, look, prepare, recover
from crow.tools.layers.changes import LookRules
from crow.tools.layers.place import discard

CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x20000
NOBODY = 65_534
PR_SET_DUMPABLE = 4
NAMES = ["a.py", "b.txt", "main.c", "with space", "tab\there", "new\nline", "ümlaut", "-rf", "$(x)", ".env", "x" * 200]
WORDS = ["alpha", "beta", "foo", "TODO", "bar();", "  indent", ""]

LINES = [
    "rm -rf src",
    "rm -rf ./* .g*",
    "rm -rf .git",
    "git reset --hard -q",
    "git clean -fdxq",
    "git clean -fdq && git checkout -q .",
    "git stash -qu || true",
    "find . -name '*.py' -delete",
    "find . -type f -not -path './.git/*' -delete",
    "find . -type d -empty -delete",
    "find . -type f -not -path './.git/*' -exec sed -i s/foo/baz/ {} +",
    "sed -i 's/$/ /' $(git ls-files | grep -v ' ' | head -3)",
    "find . -type f -not -path './.git/*' -exec chmod 600 {} +",
    "chmod -R a-w src; chmod 555 src",
    "chmod -R u+w . ; chmod 700 build",
    "mv src renamed",
    "mv untracked src/moved; mv .gitignore other; git mv src/later.py later.py; mv one-name two-name",
    "mv src lib; ln -s lib src",
    "mkdir -p gen; for i in 1 2 3 4 5 6 7 8 9; do mkdir -p gen/$i; echo $i > gen/$i/file; done",
    "mkdir -p node_modules/pkg/lib; for i in $(seq 40); do echo $i > node_modules/pkg/lib/$i.js; done",
    "rm -rf node_modules; mkdir -p node_modules/other; echo 1 > node_modules/other/index.js",
    "rm -rf build; mkdir build; cp -a src build/ || true",
    "git add -A; git commit -qm next",
    "git commit -q --allow-empty -m 1; git checkout -q -b o @~; git commit -q --allow-empty -m 2; git rebase -q main",
    "git checkout -q -b feature; git rm -rqf src; git commit -qm gone",
    "git gc -q --prune=now",
    "git reset -q --soft HEAD~1; git checkout -q -f HEAD~1 || true",
    "touch $(git ls-files | grep -v ' ')",
    "cp -a . ../copy 2>/dev/null; tar cf all.tar --exclude all.tar . && tar xf all.tar && rm all.tar",
    "rm -rf deep; mkdir -p deep/1/2/3/4/5/6; echo end > deep/1/2/3/4/5/6/end",
    "for f in $(git ls-files | grep -v ' '); do cat $f > t && mv t $f; done",
    "for f in $(git ls-files | grep -v ' '); do echo more >> $f; done",
    "ln -f one-name third-name; echo changed >> one-name",
    "rm -f one-name other-name; echo new > one-name",
    "rm -f link-in; echo file > link-in; ln -sfn /etc link-out",
    "rm -rf empty; echo file > empty",
    "rm -f a.py; mkdir a.py; echo in > a.py/in",
    "truncate -s 64M sparse; dd if=/dev/urandom of=sparse bs=4096 seek=9000 count=1 conv=notrunc status=none",
    "chmod 770 . src; chmod 700 build/* src/inner",
    "touch -d 2001-01-01 src old; chmod 755 old",
    "rm -rf .git && git init -q && git add -A && git -c user.email=a@b -c user.name=a commit -qm first",
]


def make_tree(root: Path, rng: random.Random) -> None:
    """Make a repository with tracked, changed, untracked and ignored files, links and odd modes."""
    root.mkdir()
    folders = [root, root / "src", root / "src" / "inner", root / "build", root / "node_modules", root / "empty"]
    for folder in folders[1:]:
        folder.mkdir()
    (root / ".gitignore").write_text("build/\nnode_modules/\n*.log\n.env\n")
    for folder in folders[:-1]:
        for name in rng.sample(NAMES, rng.randint(1, 4)):
            file = folder / name
            file.write_text("\n".join(rng.choices(WORDS, k=rng.randint(0, 30))))
            file.chmod(rng.choice([0o644, 0o600, 0o755, 0o444]))
    (root / "one-name").write_text("foo\n")
    os.link(root / "one-name", root / "other-name")
    (root / "link-in").symlink_to("src/inner")
    (root / "link-out").symlink_to("/nowhere/at/all")
    (root / "src" / "binary").write_bytes(rng.randbytes(3_000))
    (root / "holes").touch()
    os.truncate(root / "holes", 1 << 18)
    git(root, "init", "-q", "-b", "main", "--template=")
    with (root / ".git" / "config").open("a") as config:
        config.write("[user]\n\temail = a@b\n\tname = a\n[maintenance]\n\tauto = false\n")  # a process per commit
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (root / "src" / "later.py").write_text("foo later\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "second")
    (root / "src" / "later.py").write_text("foo changed\n")
    (root / "untracked").write_text("foo untracked\n")
    (root / "out.log").write_text("ignored\n")
    os.setxattr(root / "untracked", "user.note", b"kept")
    for number, folder in enumerate(reversed(folders)):
        os.utime(folder, ns=(0, 10**18 + number))
    (root / "build").chmod(rng.choice([0o755, 0o555, 0o700]))


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True)


def picture(top: str, *, has_links: bool = False) -> dict[str, list[str]]:
    """Return everything that counts about each path in a tree."""
    found: dict[str, list[str]] = {}
    names: dict[int, str] = {}
    for folder, folders, files in os.walk(top):
        folders.sort()  # the order decides by which of its names a linked file is called
        for path in (folder, *(os.path.join(folder, name) for name in (*folders, *sorted(files)))):
            status = os.lstat(path)
            key = (path[len(top) + 1 :] or ".").encode(errors="surrogateescape").decode("latin-1")
            mode = status.st_mode
            times = "" if stat.S_ISLNK(mode) else str(status.st_mtime_ns)
            facts = [oct(mode), times, str(status.st_uid)]
            if stat.S_ISLNK(mode):
                facts.append(os.readlink(path))
            elif stat.S_ISREG(mode):
                with open(path, "rb") as file:
                    facts.append(hashlib.file_digest(file, "sha256").hexdigest())
            if has_links and status.st_nlink > 1 and not stat.S_ISDIR(mode):
                facts.append(names.setdefault(status.st_ino, key))
            attributes = [name for name in os.listxattr(path, follow_symlinks=False) if "overlay" not in name]
            facts += [f"{name}={os.getxattr(path, name, follow_symlinks=False)!r}" for name in sorted(attributes)]
            found[key] = facts
    return found


def in_child(work: Callable[[], Any]) -> Any:
    """Do work in a forked process and return its result, which must be JSON."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            text = json.dumps({"result": work()})
        except BaseException:  # noqa: BLE001 - the parent raises it
            text = json.dumps({"error": traceback.format_exc()})
        finally:
            with open(writer, "w") as pipe:
                pipe.write(text)
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answer = json.loads(pipe.read() or '{"error": "the child died"}')
    os.waitpid(pid, 0)
    if "error" in answer:
        raise AssertionError(answer["error"])
    return answer["result"]


def as_nobody(work: Callable[[Path], Any]) -> Any:
    """Do work as the user `nobody`, with a new directory of its own."""
    directory = Path(tempfile.mkdtemp(prefix="crow-test-layers-", dir="/tmp"))
    os.chown(directory, NOBODY, NOBODY)

    def child() -> Any:
        os.environ |= {"HOME": str(directory), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        os.chdir("/")
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        return work(directory)

    try:
        return in_child(child)
    finally:
        discard(directory)


def in_layer(layer: Layer, root: Path, line: str, then: Callable[[], Any] = lambda: None) -> Any:
    """Run a shell line in a layer, and then call a function that sees what the line sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()

    def child() -> Any:
        # Libraries may start threads after a fork and join them; the kernel needs a moment to remove such a thread.
        while len(os.listdir("/proc/self/task")) > 1:
            os.sched_yield()
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)
        for each in layer.renew():
            options = f"userxattr,lowerdir=.,upperdir={each.upper},workdir={each.work}"
            os.chdir(each.root)
            if libc.mount(b"overlay", b".", b"overlay", 0, options.encode()) != 0:
                raise OSError(ctypes.get_errno(), options)
        os.chdir("/")
        os.chdir(root)
        subprocess.run(["sh", "-c", f"{line}"], check=False, capture_output=True)
        return then()

    return in_child(child)


def run_line(layer: Layer, root: Path, line: str) -> dict[str, list[str]]:
    """Run a shell line in a layer. Return a picture of what the layer's commands see afterwards."""
    made: dict[str, list[str]] = in_layer(layer, root, line, lambda: picture(str(root)))
    return made


def differences(one: dict[str, list[str]], other: dict[str, list[str]]) -> dict[str, tuple[object, object]]:
    return {key: (one.get(key), other.get(key)) for key in {*one, *other} if one.get(key) != other.get(key)}


def killed_after(lines: int, work: Callable[[], object]) -> bool:
    """Do work in a forked process that is killed after so many lines of crow's layers. Return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        left = lines

        def trace(frame: FrameType, _event: str, _argument: object) -> Any:
            nonlocal left
            if "/layers/" not in frame.f_code.co_filename:
                return None
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        code = 1
        try:
            sys.settrace(trace)
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def check_round(directory: Path, rng: random.Random, line: str, *, kills: bool) -> str:
    """Run a line in a layer, keep it, undo it, redo it and undo it again. Return how it went.

    With `kills`, a process is killed while it keeps and while it undoes."""
    root, place = directory / "tree", Place(directory / "data")
    make_tree(root, rng)
    before = picture(str(root), has_links=True)
    layer = place.open([root])
    seen = run_line(layer, root, line)
    assert differences(picture(str(root), has_links=True), before) == {}, (
        "the workspace changed before it was asked for"
    )
    outcome = ["clean"]
    changes = look(layer, LookRules())
    assert (changes.conflicts, changes.problem) == ([], "")
    latest = ""

    def keep() -> None:
        made = prepare(place, layer, changes)
        apply(made)

    def step(work: Callable[[], object], then: dict[str, list[str]], now: dict[str, list[str]]) -> bool:
        """Do work, perhaps in a process that is killed. Return whether it had its effect."""
        if not kills:
            work()
            done = True
        else:
            was_killed = killed_after(rng.randint(1, 3_000), work)
            recovered = recover(place)
            assert not any(each.problem for each in recovered), recovered
            done = not was_killed or any(each.is_kept for each in recovered) or newest(place) != latest
            outcome.append("killed" if was_killed else "not killed")
            outcome.extend("completed" if each.is_kept else "taken back" for each in recovered)
        expected = now if done else then
        differ = differences(picture(str(root), has_links=expected is before), expected)
        assert differ == {}, (line, done, differ)
        return done

    if not changes.operations:
        return "unchanged"
    if not step(keep, before, seen):
        return " ".join(outcome)
    layer.drop()
    for then, now in ((seen, before), (before, seen), (seen, before)):
        latest = newest(place)
        done = find_set(place, latest)
        assert done is not None

        if not step(partial(undo, place, done), then, now):
            break
    assert not [*root.glob(".crow-*")]
    assert sorted(os.listdir(place.directory / "open")) == []
    return " ".join(outcome)


def undo(place: Place, done: ChangeSet) -> None:
    made = invert(place, done)
    assert made.skipped == ()
    apply(made)


def newest(place: Place) -> str:
    """Return the id of the newest change set that was kept."""
    kept = [path.parent.name for path in place.changes.glob("*/kept")]
    return max(kept, default="")


def changes_of(layer: Layer, root: Path, line: str, rules: LookRules | None = None) -> Changes:
    """Run a line in a layer, and look at it."""
    in_layer(layer, root, line)
    return look(layer, rules)


class World:
    """A small workspace and a place for layers."""

    def __init__(self, directory: Path) -> None:
        self.place = Place(directory / "data")
        self.root = directory / "tree"
        self.outside = directory / "outside"
        for folder in (self.root / "src", self.root / "build", self.outside):
            folder.mkdir(parents=True)
        (self.root / "a").write_text("a\n")
        (self.root / "src" / "b").write_text("b\n")
        (self.outside / "secret").write_text("secret\n")
        self.layer = self.place.open([self.root])

    def reopen(self) -> None:
        self.layer.drop()
        self.layer = self.place.open([self.root])

    def keep(self, line: str) -> ChangeSet:
        made = prepare(self.place, self.layer, changes_of(self.layer, self.root, line))
        apply(made)
        return made

    def picture(self) -> dict[str, list[str]]:
        return picture(str(self.root))
