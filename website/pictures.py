"""Records crow in a terminal, and draws each recording as one animated SVG: `make pictures`.

A scene is a real run of the installed crow with the offline model, in a scratch directory. Keys are typed when the
screen shows the text that they answer. The picture follows the viewer's light or dark scheme, and loads nothing. Where
Chromium is installed, an exported page is pictured, too.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass, field
from fcntl import ioctl
from html import escape
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "pictures"

COLUMNS, ROWS = 96, 28
CELL_W, CELL_H = 8.4, 18.0
TIMEOUT_S = 60.0
HOLD_S = 4.0
"""The last screen stays this long before the picture begins again."""
PAUSE_S = 1.2
"""A longer pause in the recording is shown as this one."""

COLOURS = {
    "black": ("#24292f", "#484f58"),
    "red": ("#cf222e", "#ff7b72"),
    "green": ("#116329", "#3fb950"),
    "brown": ("#7d4e00", "#d29922"),
    "blue": ("#0969da", "#58a6ff"),
    "magenta": ("#8250df", "#bc8cff"),
    "cyan": ("#1b7c83", "#39c5cf"),
    "white": ("#6e7781", "#b1bac4"),
}
"""The colours of the terminal on a light and on a dark background."""


@dataclass(frozen=True)
class Scene:
    """A run to record."""

    name: str
    """The name of the file, without `.svg`."""
    title: str
    """A sentence for those who cannot see the picture."""
    command: tuple[str, ...]
    """The arguments of crow."""
    keys: tuple[tuple[str, str], ...] = ()
    """Pairs: a text that the screen must show, and what is typed then."""
    files: dict[str, str] = field(default_factory=dict)
    """Files of the workspace: their paths and contents."""


TEA = {"notes.txt": "Black tea: 3 minutes.\nGreen tea: 2 minutes.\n", "recipes/oolong.txt": "Four minutes.\n"}

SCENES = (
    Scene(
        "demo",
        "A recording of crow demo: crow is killed in the middle of an answer, and a new process goes on.",
        ("demo",),
    ),
    Scene(
        "chat",
        "A recording of crow chat: the model wants to change a file, crow shows the change and asks.",
        ("chat",),
        keys=(
            ("context 0%", "edit notes.txt: 3 minutes -> 4 minutes\r"),
            ("Allow this?", "y"),
            ("Receipt:", "say thank you\r"),
            ("\nthank you", "\x04"),
        ),
        files=TEA,
    ),
    Scene(
        "undo",
        "A recording of crow chat: a command deletes a folder, and /undo brings it back.",
        ("chat", "--mode", "accept-edits"),
        keys=(
            ("context 0%", "run rm -rf recipes\r"),
            ("Receipt:", "/undo files\r"),
            ("Took back", "read recipes/oolong.txt\r"),
            ("Four minutes", "\x04"),
        ),
        files=TEA,
    ),
)


@dataclass(frozen=True)
class Frame:
    """What the screen showed from one moment on."""

    at_s: float
    """Seconds since the start."""
    lines: tuple[str, ...]
    """The markup of each line."""


def record(scene: Scene) -> list[Frame]:
    """Run the scene, and return what the screen showed.

    :raises TimeoutError: the screen did not show what the scene waits for.
    """
    with tempfile.TemporaryDirectory(prefix="crow-picture-") as scratch:
        workspace = Path(scratch) / "tea"
        for name, text in scene.files.items():
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            (workspace / name).write_text(text, "utf-8")
        workspace.mkdir(exist_ok=True)
        process, terminal = pty.fork()
        if process == 0:
            os.chdir(workspace)
            env = {"PATH": os.environ["PATH"], "HOME": scratch, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
            env |= {"CROW_HOME": f"{scratch}/home", "CROW_MODEL": "offline", "COLORFGBG": "0;15"}
            program = str(ROOT / ".venv" / "bin" / "crow")
            os.execve(program, [program, *scene.command], env)  # noqa: S606 - this is the program to record
        ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        try:
            return _follow(scene, terminal)
        finally:
            os.close(terminal)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _follow(scene: Scene, terminal: int) -> list[Frame]:
    screen = pyte.HistoryScreen(COLUMNS, ROWS)
    screen.write_process_input = lambda data: os.write(terminal, data.encode())  # where the cursor is
    stream = pyte.ByteStream(screen)
    frames: list[Frame] = []
    keys = list(scene.keys)
    typed: list[bytes] = []
    began = heard = time.monotonic()
    while time.monotonic() - heard < TIMEOUT_S:
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # the end of the terminal
                break
            if not data:
                break
            heard = time.monotonic()
            stream.feed(data)
            lines = tuple(_without_places(line) for line in _markup(screen))
            if not frames or frames[-1].lines != lines:
                frames.append(Frame(time.monotonic() - began, lines))
        elif typed:
            os.write(terminal, typed.pop(0))
        elif keys:
            shown = "\n".join(line.rstrip() for line in screen.display)
            if keys[0][0] in shown and time.monotonic() - heard > 0.6:
                typed = [key.encode() for key in keys.pop(0)[1]]
    else:
        raise TimeoutError(f"{scene.name}: the screen does not show {keys[0][0] if keys else 'an end'!r}")
    return frames


def _without_places(line: str) -> str:
    """Return a line without what only this machine has: where crow is installed, and where the scratch directory is."""
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/crow-picture-\w+", "~", line.replace(f"{ROOT}/.venv/bin/", ""))


def _markup(screen: pyte.Screen) -> tuple[str, ...]:
    """Return each line of the screen as SVG text, without trailing blank space."""
    lines: list[str] = []
    for y in range(screen.lines):
        row = screen.buffer[y]
        spans: list[tuple[str, str]] = []
        for x in range(screen.columns):
            cell = row[x]
            style = " ".join(
                name
                for name, has in ((f"c{cell.fg}", cell.fg in COLOURS), ("b", cell.bold), ("u", cell.underscore))
                if has
            )
            if spans and spans[-1][0] == style:
                spans[-1] = (style, spans[-1][1] + cell.data)
            else:
                spans.append((style, cell.data))
        while spans and not spans[-1][1].strip():
            spans.pop()
        if spans:
            spans[-1] = (spans[-1][0], spans[-1][1].rstrip())
        lines.append("".join(f'<tspan class="{s}">{escape(t)}</tspan>' if s else escape(t) for s, t in spans))
    return tuple(lines)


def draw(scene: Scene, frames: list[Frame]) -> str:
    """Return the recording as an animated SVG. Each different line is written once."""
    shown: list[tuple[float, tuple[str, ...]]] = []
    clock = last_s = 0.0
    for frame in frames:
        clock += min(frame.at_s - last_s, PAUSE_S) if shown else 0.0
        last_s = frame.at_s
        if shown and clock - shown[-1][0] < 0.09:
            shown[-1] = (shown[-1][0], frame.lines)
        else:
            shown.append((clock, frame.lines))
    total = shown[-1][0] + HOLD_S
    rows = max(index + 1 for _, lines in shown for index, line in enumerate(lines) if line)
    width, height = COLUMNS * CELL_W + 32, rows * CELL_H + 28
    names: dict[str, str] = {}
    steps: list[str] = []
    for number, (since, lines) in enumerate(shown):
        until = shown[number + 1][0] if number + 1 < len(shown) else total
        uses = "".join(
            f'<use href="#{names.setdefault(line, f"l{len(names)}")}" y="{(row + 1) * CELL_H:g}"/>'
            for row, line in enumerate(lines)
            if line
        )
        start, end = 100 * since / total, 100 * until / total
        before, after = ("visible" if number == 0 else "hidden"), ("hidden" if end < 100 else "visible")
        keyframes = f"0%{{visibility:{before}}}{start:.2f}%{{visibility:visible}}{end:.2f}%{{visibility:{after}}}"
        steps.append(
            f"<g><style>#f{number}{{animation:k{number} {total:.1f}s step-end infinite}}"
            f"@keyframes k{number}{{{keyframes}}}</style>"
            f'<g id="f{number}" class="f">{uses}</g></g>'
        )
    texts = "".join(f'<text id="{name}" xml:space="preserve">{line}</text>' for line, name in names.items())
    light, dark = ("".join(f".c{name}{{fill:{pair[scheme]}}}" for name, pair in COLOURS.items()) for scheme in (0, 1))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
        f"<title>{escape(scene.title)}</title><style>"
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#24292f}"
        ".p{fill:#fff;stroke:#d0d7de}.b{font-weight:bold}.u{text-decoration:underline}.f{visibility:hidden}"
        f"#f{len(shown) - 1}{{visibility:visible}}"
        + light
        + "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.p{fill:#0d1117;stroke:#30363d}"
        + dark
        + "}"
        "</style>"
        f'<rect class="p" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>'
        f"<defs>{texts}</defs>"
        f'<g transform="translate(16 10)">{"".join(steps)}</g></svg>\n'
    )


PAGE_PROMPTS = (
    "plan: Read the notes; Change them; Check",
    "read notes.txt",
    "edit notes.txt: 3 minutes -> 4 minutes then run grep -c minutes notes.txt",
)
"""What is asked in the session whose page is pictured."""


def picture_page(chromium: str) -> None:
    """Export a session as a page, and write a picture of it."""
    with tempfile.TemporaryDirectory(prefix="crow-picture-") as scratch:
        workspace = Path(scratch) / "tea"
        workspace.mkdir()
        (workspace / "notes.txt").write_text(TEA["notes.txt"], "utf-8")
        env = {"PATH": os.environ["PATH"], "HOME": scratch, "CROW_HOME": f"{scratch}/home", "CROW_MODEL": "offline"}
        crow = str(ROOT / ".venv" / "bin" / "crow")

        def run(*arguments: str) -> None:
            subprocess.run(  # noqa: S603 - crow and Chromium
                arguments, cwd=workspace, env=env, check=True, stdin=subprocess.DEVNULL, capture_output=True
            )

        for prompt in PAGE_PROMPTS:
            run(crow, "run", "--session", "tea", "--mode", "accept-edits", prompt)
        run(crow, "sessions", "export", "tea", "--format", "html", "--redact", "-o", "page.html")
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,760")
        target = TARGET / "page.png"
        run(
            chromium,
            *options,
            f"--user-data-dir={scratch}/chromium",
            f"--screenshot={target}",
            f"file://{workspace}/page.html",
        )
    print(f"docs/pictures/page.png: {target.stat().st_size / 1000:,.0f} kB")


def main() -> None:
    wanted = sys.argv[1:]
    TARGET.mkdir(exist_ok=True)
    if chromium := shutil.which("chromium") or shutil.which("google-chrome"):
        picture_page(chromium)
    else:
        print("docs/pictures/page.png stays as it is: Chromium is not installed")
    for scene in SCENES:
        if not wanted or scene.name in wanted:
            picture = draw(scene, record(scene))
            (TARGET / f"{scene.name}.svg").write_text(picture, "utf-8")
            print(f"docs/pictures/{scene.name}.svg: {len(picture) / 1000:,.0f} kB")


if __name__ == "__main__":
    main()
