"""A small agent that keeps every rule of the protocol, and can break any one of them.

It reads and writes at once, without threads or waiting, so a test can run it in its own process. Started as a program
it speaks over stdin and stdout; its argument is the id of the rule to break.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from acp_check.rules.turns import SPOKEN
from acp_check.run import EndpointLog
from tests.connection import Json
from tests.scripts import WAIT, Disk, Prompt, Scripts

MODES = [{"id": "ask", "name": "Ask"}, {"id": "auto", "name": "Auto"}]
GATED = {"notice": "notices", "compaction_update": "compaction", "compaction_summary_chunk": "compaction"}


class Refusal(Exception):
    """An error to answer with."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


class Agent(Scripts):
    """The agent. `write` takes its output, `broken` are the ids of the rules that it breaks."""

    def __init__(self, write: Callable[[bytes], None], disk: Disk, endpoint: EndpointLog, *broken: str) -> None:
        super().__init__(write, disk, endpoint, *broken)
        self._open: set[str] = set()
        self._delayed: list[Any] = []

    def close(self) -> None:
        """Take the end of stdin."""
        if self.breaks("framing.last-newline"):
            self._write(b'{"jsonrpc":"2.0","method":"_bye"}')
        for prompt in self._prompts.values():
            if prompt.is_waiting and not self.breaks("cancel.leaves-model"):
                self._endpoint.left += 1
        self.is_dead = True

    def _response(self, message: Json) -> None:
        number = message.get("id")
        prompt = self._asked.pop(number, None) if isinstance(number, int | float | str) else None
        if prompt is None:
            self._die("jsonrpc.unknown-response")
            return
        self._step(prompt, message)

    def _notification(self, method: str, params: Json) -> None:
        if method == "session/cancel":
            self._cancel(str(params.get("sessionId")))
        elif method == "$/cancel_request":
            for prompt in list(self._prompts.values()):
                if prompt.number == params.get("requestId") and not self.breaks("cancel.request"):
                    self._cancel(prompt.session)
                elif prompt.number == params.get("requestId"):
                    self._prompts.pop(prompt.session)
                    self._refuse(prompt.number, -32603, "Aborted")
        else:
            self._die("jsonrpc.unknown-notification")
            if self.breaks("jsonrpc.notification-unanswered"):
                self._refuse(None, -32601, "Method not found")

    def _cancel(self, session: str) -> None:
        if self.breaks("cancel.own-session"):
            for other in list(self._prompts.values()):
                other.is_cancelled = True
        prompt = self._prompts.get(session)
        if prompt is None:
            if self.breaks("cancel.idle") and session in self._open:
                self._disk.settings[session]["cancel_next"] = True
            return
        prompt.is_cancelled = True
        if prompt.is_waiting:
            if not self.breaks("cancel.leaves-model"):
                self._endpoint.left += 1
            self._step(prompt, None)

    def _request(self, message: Json) -> None:
        number, method, params = message["id"], message["method"], message.get("params")
        if method.startswith("_acp_check/"):
            self._extension(number, method)
            return
        try:
            result = self._serve(number, method, params)
        except Refusal as error:
            self._refuse(number, error.code, str(error))
            return
        if result is not None and not (self.breaks("jsonrpc.answered") and method == "session/list"):
            self._respond(number, result, method)
            self._after(method, params or {}, result)

    def _extension(self, number: Any, method: str) -> None:
        name = method.removeprefix("_acp_check/")
        if name == "id":
            if self.breaks("jsonrpc.id-type") and number == 0:
                number = "0"
            elif self.breaks("jsonrpc.id-large") and number == (1 << 53) - 1:
                number = float(number) * 1.5
            elif self.breaks("jsonrpc.id-number-string") and number == "7":
                number = 7
            elif self.breaks("jsonrpc.id-unicode") and isinstance(number, str) and not number.isascii():
                number = number.encode("ascii", "replace").decode()
            elif (self.breaks("jsonrpc.id-zero") and number == 0) or (
                self.breaks("jsonrpc.id-string") and number == "request-a"
            ):
                return
        if name == "while_prompt" and self.breaks("jsonrpc.while-prompt"):
            self._delayed.append(number)
            return
        if name == "unknown" and self.breaks("jsonrpc.unknown-extension"):
            self._respond(number, {})
            return
        self._refuse(number, -32601, "Method not found")

    def _serve(self, number: Any, method: str, params: Any) -> Json | None:
        """The result of a request, or None if it is answered later."""
        if not isinstance(params, dict):
            raise Refusal(-32602, "params must be an object")
        match method:
            case "initialize":
                return self._initialize(params)
            case "authenticate":
                if params.get("methodId") != "login" and not self.breaks("auth.unknown-method"):
                    raise Refusal(-32602, "Unknown method of authentication")
                return {}
            case "session/new":
                return self._new(params)
            case "session/load" | "session/resume":
                return self._reopen(method, params)
            case "session/fork":
                return {"sessionId": params["sessionId"] if self.breaks("fork.new-id") else self._create(params["cwd"])}
            case "session/list":
                return self._list(params)
            case "session/delete":
                return self._delete(params)
            case "session/close":
                return self._close_session(params)
            case "session/prompt":
                self._prompt(number, params)
                return None
            case "session/set_mode":
                return self._set_mode(params)
            case "session/set_config_option":
                return self._set_option(params)
            case "logout" if self.breaks("session.unadvertised"):
                return {}
        if self.breaks("jsonrpc.unknown-method"):
            return {}
        raise Refusal(-32601, "Method not found")

    def _initialize(self, params: Json) -> Json:
        asked = params.get("protocolVersion")
        offered = params.get("clientCapabilities")
        self._offered = offered or {}
        if self.slips("framing.json"):
            self._write(b"starting ...\n")
        if self.slips("framing.object"):
            self._write(b'"ready"\n')
        if self.slips("framing.no-blank-lines"):
            self._write(b"\n")
        if self.breaks("initialize.first"):
            self._notify("_hello", {})
        if self.breaks("initialize.answered") and self._offered.get("terminal"):
            raise Refusal(-32603, "Cannot start")
        if self.breaks("initialize.older-version") and asked == 0:
            raise Refusal(-32602, "Too old")
        if self.breaks("initialize.minimal") and offered is None:
            raise Refusal(-32602, "clientCapabilities is missing")
        if self.breaks("initialize.future-capabilities") and "acpCheckFuture" in self._offered:
            raise Refusal(-32602, "Unknown capability")
        version: Any = 1
        if self.breaks("initialize.newer-version") and asked == 65535:
            version = 65535
        elif self.breaks("initialize.latest-version") and asked == 65535:
            version = 0
        elif self.breaks("initialize.version"):
            version = "1"
        elif self.breaks("initialize.same-version") and asked == 1:
            version = 2
        methods: list[Json] = [{"id": "login", "name": "Log in"}]
        if self.breaks("auth.method-ids"):
            methods.append({"id": "login", "name": "Another way"})
        if self.breaks("auth.terminal"):
            methods.append({"id": "terminal", "name": "In a terminal", "type": "terminal"})
        sessions: Json = {name: {} for name in ("list", "resume", "close", "delete", "fork", "additionalDirectories")}
        result: Json = {"protocolVersion": version, "authMethods": methods}
        if not self.breaks("initialize.agent-capabilities"):
            result["agentCapabilities"] = {
                "loadSession": True,
                "promptCapabilities": {"image": True, "audio": True, "embeddedContext": True},
                "sessionCapabilities": sessions,
            }
        if not self.breaks("initialize.agent-info"):
            result["agentInfo"] = {"name": "small", "version": "1"}
        return result

    def _create(self, cwd: str) -> str:
        self._disk.settings.setdefault("", {"count": 0})["count"] += 1
        session = f"session-{self._disk.settings['']['count']}"
        if self.breaks("session.unique-ids"):
            session = "session"
        self._disk.history.setdefault(session, [])
        self._disk.cwd[session] = cwd
        self._disk.settings[session] = {"mode": "ask", "speed": "slow"}
        self._open.add(session)
        return session

    def _new(self, params: Json) -> Json:
        cwd, servers = params.get("cwd"), params.get("mcpServers")
        if cwd is None and not self.breaks("jsonrpc.missing-params"):
            raise Refusal(-32603 if self.breaks("jsonrpc.invalid-params") else -32602, "cwd is missing")
        if cwd is not None and not isinstance(cwd, str) and not self.breaks("jsonrpc.wrong-params"):
            raise Refusal(-32602, "cwd must be text")
        for rule, is_wanted in (
            ("session.mcp-stdio", bool(servers)),
            ("session.additional-directories", "additionalDirectories" in params),
            ("extensibility.meta-accepted", "_meta" in params),
            ("session.new", not servers and "_meta" not in params and self._offered.get("terminal")),
        ):
            if is_wanted and self.breaks(rule):
                raise Refusal(-32603, "Not supported")
        session = self._create(str(cwd))
        if self.breaks("session.known-first"):
            self._update(session, sessionUpdate="available_commands_update", availableCommands=[])
        result = {"sessionId": session} | self._settings(session)
        if self.breaks("session.id"):
            result["sessionId"] = ""
        return result

    def _settings(self, session: str) -> Json:
        kept = self._disk.settings[session]
        modes: list[Json] = [*MODES, {"id": "ask", "name": "Again"}] if self.breaks("modes.unique-ids") else MODES
        current = "none" if self.breaks("modes.current") else kept["mode"]
        return {"modes": {"currentModeId": current, "availableModes": modes}, "configOptions": self._options(session)}

    def _options(self, session: str) -> list[Json]:
        kept = self._disk.settings[session]
        speeds = [{"value": each, "name": each} for each in ("slow", "fast")]
        if self.breaks("options.unique-values"):
            speeds.append({"value": "slow", "name": "again"})
        group = [{"value": mode["id"], "name": mode["name"]} for mode in MODES]
        groups: list[Json] = [{"group": "all", "name": "All", "options": group}]
        current = "none" if self.breaks("options.current") else kept["speed"]
        options: list[Json] = [
            {"id": "speed", "name": "Speed", "type": "select", "currentValue": current, "options": speeds},
            {
                "id": "mode",
                "name": "Mode",
                "category": "mode",
                "type": "select",
                "currentValue": kept["mode"],
                "options": groups,
            },
        ]
        if self.breaks("options.unique-ids"):
            options[1]["id"] = "speed"
        session_offer = self._offered.get("session") or {}
        if (session_offer.get("configOptions") or {}).get("boolean") is not None or self.breaks(
            "offered.boolean-options"
        ):
            options.append({"id": "loud", "name": "Loud", "type": "boolean", "currentValue": False})
        return options

    def _after(self, method: str, params: Json, result: Json) -> None:
        """What follows the response."""
        session = str(result.get("sessionId", params.get("sessionId")))
        if method in ("session/new", "session/load", "session/resume", "session/fork") and session in self._open:
            commands: list[Json] = [{"name": "plan", "description": "Makes a plan"}]
            if self.breaks("commands.names"):
                commands[0]["name"] = "/plan"
            if self.breaks("commands.unique-names"):
                commands *= 2
            self._update(session, sessionUpdate="available_commands_update", availableCommands=commands)
            if self.breaks("prompt.updates-of-turn"):
                self._say(session, "Welcome!", "m-welcome")
            if self.breaks("permission.in-turn"):
                self._call("session/request_permission", self._question(session, "call-0"), None)
            if method == "session/load" and self.breaks("load.replay-first"):
                self._say(session, SPOKEN, "m-late")
        elif method == "session/set_mode":
            mode = "none" if self.breaks("modes.known-updates") else params["modeId"]
            self._update(session, sessionUpdate="current_mode_update", currentModeId=mode)
            if not self.breaks("modes.in-sync"):
                options = [] if self.breaks("options.updates") else self._options(session)
                self._update(session, sessionUpdate="config_option_update", configOptions=options)

    def _known(self, session: Any) -> str:
        if not isinstance(session, str):
            raise Refusal(-32602, "sessionId must be text")
        if session not in self._disk.history:
            code = -32603 if self.breaks("session.unknown-code") else -32002
            raise Refusal(code, f"No session {session}")
        return session

    def _reopen(self, method: str, params: Json) -> Json:
        name = method.removeprefix("session/")
        if self.breaks(f"{name}.unknown") and params["sessionId"] not in self._disk.history:
            return {}
        session = self._known(params["sessionId"])
        if self.breaks(f"{name}.works"):
            raise Refusal(-32603, "The file is locked")
        self._open.add(session)
        history = self._disk.history[session]
        if method == "session/load" or self.breaks("resume.no-replay"):
            if self.breaks("load.order"):
                history = sorted(history, key=lambda body: body["sessionUpdate"] != "agent_message_chunk")
            for body in history:
                kind = body["sessionUpdate"]
                if (
                    (self.breaks("load.user-messages") and kind == "user_message_chunk")
                    or (self.breaks("load.agent-messages") and kind == "agent_message_chunk")
                    or (self.breaks("load.tool-calls") and kind.startswith("tool_call"))
                ):
                    continue
                if self.breaks("load.ended-calls") and kind == "tool_call":
                    body = body | {"status": "in_progress"}
                self._update("elsewhere" if self.slips("load.own-session") else session, **body)
        return self._settings(session)

    def _list(self, params: Json) -> Json:
        if self.breaks("list.works") and "cursor" not in params:
            raise Refusal(-32603, "Cannot list")
        if "cursor" in params and not self.breaks("list.bad-cursor"):
            raise Refusal(-32602, "Unknown cursor")
        cwd = params.get("cwd")
        rows: list[Json] = [
            {
                "sessionId": session,
                "cwd": "here" if self.breaks("list.absolute-cwd") else self._disk.cwd[session],
                "updatedAt": "yesterday" if self.breaks("list.times") else "2026-11-22T10:00:00Z",
            }
            for session in self._disk.prompted
            if cwd in (None, self._disk.cwd[session]) or self.breaks("list.cwd-filter")
        ]
        if self.breaks("list.contains"):
            rows = []
        if self.breaks("list.once"):
            rows *= 2
        if self.breaks("list.empty") and not rows:
            return {"sessions": [{"sessionId": "x", "cwd": cwd or "/"}]}
        return {"sessions": rows}

    def _delete(self, params: Json) -> Json:
        session = params["sessionId"]
        is_known = session in self._disk.history
        if (
            self.breaks("delete.works")
            or (self.breaks("delete.twice") and session in self._disk.settings and not is_known)
            or (self.breaks("delete.unknown") and session not in self._disk.settings)
        ):
            raise Refusal(-32002, "No such session")
        self._disk.history.pop(session, None)
        if not self.breaks("delete.unlisted"):
            self._disk.prompted.discard(session)
        return {}

    def _close_session(self, params: Json) -> Json:
        session = self._known(params["sessionId"])
        if self.breaks("close.works"):
            raise Refusal(-32603, "Cannot close")
        prompt = self._prompts.get(session)
        if prompt is not None and self.breaks("close.cancels"):
            self._prompts.pop(session)
            self._endpoint.left += 1
            self._respond(prompt.number, {"stopReason": "end_turn"}, "session/prompt")
        self._cancel(session)
        self._open.discard(session)
        return {}

    def _set_mode(self, params: Json) -> Json:
        session, mode = self._known(params["sessionId"]), params["modeId"]
        if mode not in [each["id"] for each in MODES]:
            if self.breaks("modes.unknown"):
                return {}
            raise Refusal(-32602, "Unknown mode")
        if self.breaks("modes.set"):
            raise Refusal(-32603, "Not now")
        self._disk.settings[session]["mode"] = mode
        return {}

    def _set_option(self, params: Json) -> Json:
        session, name, value = self._known(params["sessionId"]), params["configId"], params["value"]
        options = {each["id"]: each for each in self._options(session)}
        if name not in options and not self.breaks("options.unknown-id"):
            raise Refusal(-32602, "Unknown option")
        if value == "acp-check-none" and name in options and not self.breaks("options.unknown-value"):
            raise Refusal(-32602, "Unknown value")
        if self.breaks("options.set"):
            raise Refusal(-32603, "Not now")
        if value != "acp-check-none" and not self.breaks("options.value"):
            self._disk.settings[session][name] = value
        now = self._options(session)
        return {
            "configOptions": [each for each in now if each["id"] != name] if self.breaks("options.complete") else now
        }

    def _prompt(self, number: Any, params: Json) -> None:
        blocks, given = params.get("prompt"), params.get("sessionId")
        if self.breaks("session.unknown-prompt") and given not in self._disk.history:
            self._respond(number, {"stopReason": "end_turn"}, "session/prompt")
            return
        session = self._known(given)
        if not isinstance(blocks, list):
            raise Refusal(-32602, "prompt must be an array")
        text = str(blocks[0]["text"])
        purpose = str(re.findall(r"\((prompt-[a-z-]+)\)", text)[0])
        for rule, purposes in (
            ("prompt.text", ("prompt-say",)),
            ("prompt.resource-link", ("prompt-link",)),
            ("prompt.image", ("prompt-image",)),
            ("prompt.audio", ("prompt-audio",)),
            ("prompt.resource", ("prompt-resource",)),
            ("prompt.again", ("prompt-again",)),
            ("load.continues", ("prompt-after-load",)),
            ("resume.continues", ("prompt-after-resume",)),
            ("cancel.next-prompt", ("prompt-after-cancel",)),
        ):
            if self.breaks(rule) and purpose in purposes:
                raise Refusal(-32603, "Something went wrong")
        word = str(re.findall(r"acp-check:(\w+)", text)[0])
        self._endpoint.requests += 1
        self._disk.prompted.add(session)
        self._disk.history[session].append(
            {"sessionUpdate": "user_message_chunk", "content": {"type": "text", "text": text}, "messageId": f"u-{text}"}
        )
        if self.breaks("prompt.no-echo"):
            self._update(session, **self._disk.history[session][-1])
        script = getattr(self, f"_play_{word}")(session, purpose)
        self._prompts[session] = Prompt(number, session, script)
        self._step(self._prompts[session], None)

    def _step(self, prompt: Prompt, message: Json | None) -> None:
        """Run a prompt's script until it waits for something."""
        prompt.is_waiting = False
        try:
            wanted = prompt.script.send(message)
        except StopIteration as done:
            self._finish(prompt, done.value)
            return
        if wanted is WAIT:
            prompt.is_waiting = True
            if prompt.is_cancelled:
                self._step(prompt, None)
        else:
            method, params = wanted
            self._call(method, params, prompt)

    def _finish(self, prompt: Prompt, stop_reason: Any) -> None:
        self._prompts.pop(prompt.session, None)
        purpose = stop_reason if isinstance(stop_reason, tuple) else ("", stop_reason)
        name, reason = purpose
        if self._disk.settings[prompt.session].pop("cancel_next", False) or (
            self.breaks("cancel.own-session") and name == "prompt-other"
        ):
            reason = "cancelled"
        if prompt.is_cancelled:
            reason = "cancelled"
            if self.breaks("cancel.answered") and name == "prompt-cancel":
                return
            if self.breaks("cancel.no-error"):
                self._refuse(prompt.number, -32603, "The request was aborted")
                return
            if self.breaks("cancel.stop-reason") and name == "prompt-cancel":
                reason = "end_turn"
            if self.breaks("cancel.in-permission") and name == "prompt-cancel-permission":
                reason = "end_turn"
        elif self.breaks("prompt.not-cancelled") and name == "prompt-say":
            reason = "cancelled"
        if self.breaks("prompt.stop-reason"):
            reason = "done"
        late = self.breaks("prompt.updates-first") and not prompt.is_cancelled
        late = late or (self.breaks("cancel.updates-first") and prompt.is_cancelled)
        if (self.breaks("permission.answered") and name == "prompt-reject") or (
            self.breaks("permission.error") and name == "prompt-question-fails"
        ):
            return
        if self.breaks("fs.refused") and name == "prompt-client-fails":
            return
        if self.breaks("extensibility.meta-accepted") and name == "prompt-with-meta":
            self._refuse(prompt.number, -32602, "Unknown _meta")
            return
        self._respond(prompt.number, {"stopReason": reason}, "session/prompt")
        if late:
            self._say(prompt.session, "one more thing", "m-late")
        if prompt.is_cancelled:
            for number in self._delayed:
                self._refuse(number, -32601, "Method not found")
            self._delayed.clear()


def main() -> None:
    """Run the agent over stdin and stdout. `ACP_CHECK_DISK` names the file that outlives the process."""
    disk, file = Disk(), os.environ.get("ACP_CHECK_DISK", "")
    if file and os.path.exists(file):
        with open(file, encoding="utf-8") as stored:
            kept = json.load(stored)
        disk = Disk(kept["history"], kept["cwd"], set(kept["prompted"]), kept["settings"])

    def write(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    agent = Agent(write, disk, EndpointLog(), *sys.argv[1:])
    while not agent.is_dead and (data := os.read(0, 1 << 16)):
        agent.feed(data)
        if file:
            with open(file, "w", encoding="utf-8") as stored:
                json.dump({**vars(disk), "prompted": sorted(disk.prompted)}, stored)
    agent.close()


if __name__ == "__main__":
    main()
