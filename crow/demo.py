"""`crow demo`: starts a real `crow acp` process and sends it messages, as an editor does. The demo needs no key."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.text import Text

from crow.domain.errors import CrowError
from crow.runtime import own_command

_Json: TypeAlias = dict[str, Any]

_ANSWER_TIMEOUT_S = 60.0
_KILL_AT = 60
_SAVED = 20
"""At least this many numbers must survive the kill. The demo kills crow when 60 numbers have been shown. The offline
model counts 20 numbers per second, so the first 20 are then two seconds old. Text that is older than one second is on
disk."""

_README = "# Tea timer\n\nCounts down the minutes a tea needs, then rings the bell.\n"


class DemoFailed(CrowError):
    """The demo failed: crow did something that the demo does not expect."""


def run_demo() -> None:
    """Run the demo in a temporary directory, and print on stdout what happens.

    :raises DemoFailed: crow did not do what the demo expects.
    """
    with tempfile.TemporaryDirectory(prefix="crow-demo-") as scratch:
        _Demo(Path(scratch).resolve()).run()


class _CrowProcess:
    """A running `crow acp` process. For each update, `show` is called with the update. For each permission question,
    `show` is called with the tool call and the options."""

    def __init__(self, scratch: Path, show: Callable[[_Json], None]) -> None:
        self._show = show
        self._errors = scratch / "stderr.txt"
        self._request_id = 0
        own = {"CROW_HOME": str(scratch / "home"), "CROW_MODEL": "offline"}
        others = {name: value for name, value in os.environ.items() if not name.startswith(("CROW_", "OPENAI_"))}
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(  # noqa: S603  our own program
                own_command("acp"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=others | own,
                encoding="utf-8",
            )

    def __enter__(self) -> _CrowProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def request(self, method: str, params: _Json, *, until: Callable[[], bool] = lambda: False) -> _Json:
        """Send a request and return its result. `until` is called after each message from crow. If it returns True,
        return {} without waiting for the result.

        :raises DemoFailed: crow ended, did not answer in time, or answered with an error.
        """
        self._request_id += 1
        self._send({"id": self._request_id, "method": method, "params": params})
        watchdog = threading.Timer(_ANSWER_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                match json.loads(line):
                    case {"method": "session/update", "params": {"update": update}}:
                        self._show(update)
                    case {"method": "session/request_permission", "id": question_id, "params": question}:
                        self._show(question["toolCall"] | {"options": question["options"]})
                        chosen = next(each for each in question["options"] if each["kind"] == "allow_once")
                        outcome = {"outcome": "selected", "optionId": chosen["optionId"]}
                        self._send({"id": question_id, "result": {"outcome": outcome}})
                    case {"id": self._request_id, "error": {"message": words}}:
                        raise DemoFailed(f"{method}: {words}")
                    case {"id": self._request_id, "result": result}:
                        return result or {}
                if until():
                    return {}
        finally:
            watchdog.cancel()
        raise DemoFailed(f"crow ended during {method}: {self._errors.read_text('utf-8', 'replace')[-2000:]}")

    def _send(self, message: _Json) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # crow has ended: its output ends, too, and `request` reports that
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            self._process.stdin.flush()


class _Demo:
    """Plays the scenes of the demo: sends prompts to crow, and prints crow's answers. `scratch` is an empty
    directory."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._workspace = scratch / "tea"
        self._console = Console(highlight=False, emoji=False)
        self._session = ""
        self._scenes = 0
        self._text = ""
        self._titles: dict[str, str] = {}
        self._in_text = False

    def run(self) -> None:
        """Play every scene. :raises DemoFailed: crow did not do what the demo expects."""
        self._print("crow, with its built-in offline model: it follows fixed rules and is not a language model.")
        self._workspace.mkdir()
        (self._workspace / "README.md").write_text(_README, "utf-8")
        with _CrowProcess(self._scratch, self._show) as crow:
            self._scene(
                "A prompt", "An editor starts `crow acp` and sends it a prompt. Reading files needs no permission."
            )
            self._session = self._open(crow, "session/new", {})["sessionId"]
            self._prompt(crow, "read README.md")
            self._expect("Tea timer" in self._text, "the answer does not show the file")
            self._scene("A tool call with its diff", "Crow asks before it changes a file, and shows the change.")
            self._prompt(crow, "write notes.txt: Crow keeps everything.")
            self._prompt(crow, "edit notes.txt: everything -> every step")
            notes = self._workspace / "notes.txt"
            self._expect(notes.exists() and "every step" in notes.read_text("utf-8"), "notes.txt was not written")
            self._scene("kill -9 in the middle of a turn", "All text older than a second is on disk by then.")
            self._prompt(crow, "count to 200", until=lambda: f"{_KILL_AT}\n" in self._text)
        self._print("  ✗ killed", "bold red")
        self._text = ""
        with _CrowProcess(self._scratch, self._show) as crow:
            self._scene("A new process loads the session", "It replays the whole history; the next prompt works.")
            self._open(crow, "session/load", {"sessionId": self._session})
            numbers = self._text[self._text.rfind("1\n2\n") :].split()
            saved = len(list(itertools.takewhile(str.isdecimal, numbers)))
            self._print(f"  {_KILL_AT} numbers were shown before the kill, {saved} came back", "dim")
            self._expect(saved >= _SAVED, "text older than two seconds is missing")
            self._prompt(crow, "summarise")
            self._expect(bool(self._text.strip()), "the answer is empty")
        command = str(Path(sys.executable).with_name("crow"))
        server = {"agent_servers": {"Crow": {"type": "custom", "command": command, "args": ["acp"], "env": {}}}}
        self._print("\nTo use crow in Zed, put this into its settings.json (docs/editors.md has the other editors):\n")
        self._print(f"{json.dumps(server, indent=2)}\n\nThen run `crow login` to choose an endpoint and a model.")

    def _open(self, crow: _CrowProcess, method: str, params: _Json) -> _Json:
        crow.request("initialize", {"protocolVersion": 1, "clientCapabilities": {}})
        return crow.request(method, {"cwd": str(self._workspace), "mcpServers": [], **params})

    def _prompt(self, crow: _CrowProcess, text: str, *, until: Callable[[], bool] = lambda: False) -> None:
        self._print(f"you › {text}", "bold cyan")
        self._text = ""
        params = {"sessionId": self._session, "prompt": [{"type": "text", "text": text}]}
        result = crow.request("session/prompt", params, until=until)
        self._expect(result.get("stopReason", "end_turn") == "end_turn", f'"{text}" ended with {result}')

    def _scene(self, title: str, explanation: str) -> None:
        self._scenes += 1
        self._print("")
        self._console.rule(Text(f"{self._scenes}. {title}", style="bold"), align="left", style="dim")
        self._print(f"{explanation}\n", "dim")

    def _show(self, update: _Json) -> None:
        match update:
            case {"sessionUpdate": "user_message_chunk", "content": {"text": str(text)}}:
                self._print(f"you › {text}", "cyan")
            case {"sessionUpdate": "agent_message_chunk", "content": {"text": str(text)}}:
                self._text += text
                if not self._in_text:
                    self._console.print(Text("crow › ", style="bold magenta"), end="")
                self._in_text = True
                self._console.print(Text(text.replace("\n", " ")), end="", soft_wrap=True)
            case {"toolCallId": str(call)}:
                self._show_call(call, update)

    def _show_call(self, call: str, update: _Json) -> None:
        if call not in self._titles:
            self._titles[call] = update.get("title") or "a tool call"
            self._print(f"  ● {self._titles[call]}", "blue")
        if options := update.get("options"):
            for diff in (each for each in update.get("content") or () if each["type"] == "diff"):
                old, new = (diff.get("oldText") or "").splitlines(), diff["newText"].splitlines()
                for line in list(difflib.unified_diff(old, new, lineterm="", n=1))[2:]:
                    self._print(f"    {line}", {"+": "green", "-": "red"}.get(line[0], "dim"))
            for option in options:
                self._print(f"    ({'•' if option['kind'] == 'allow_once' else ' '}) {option['name']}")
        elif update.get("status") in ("completed", "failed"):
            self._print(f"  {'✓' if update['status'] == 'completed' else '✗'} {self._titles[call]}", "green")

    def _print(self, text: str, style: str = "") -> None:
        if self._in_text:
            self._console.print()
            self._in_text = False
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _expect(self, is_true: bool, complaint: str) -> None:
        if not is_true:
            raise DemoFailed(f"the demo failed in scene {self._scenes}: {complaint}")
