"""`crow doctor`: checks everything that a prompt needs, one thing after another."""

from __future__ import annotations

import asyncio
import difflib
import os
import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread

from crow import adapters
from crow.agent.compaction.window import DEFAULT_WINDOW
from crow.app import find_hooks
from crow.domain import errors
from crow.domain.messages import Answer, SystemMessage, Text, ToolSpec, UserMessage, WireName
from crow.domain.text import on_one_line, plural
from crow.llm import WIRE_TITLES, Model, Request, TextDelta, ThoughtLevel
from crow.llm.facts import WINDOW, LearnedWindow, describe_facts, describe_window, learned_window, utc_today
from crow.llm.listing import Offered, facts_of
from crow.programs import Programs, named_program
from crow.settings import OFFLINE, Loaded, Target, names_offered, target_of
from crow.settings.load import Paths
from crow.store import Store
from crow.store.importers import importable
from crow.store.sqlite.failures import REPAIR
from crow.store.sqlite.repair import repair as repair_file
from crow.tools import CommandAccess, Ports, SandboxStatus, Workspace
from crow.tools.no_session import NoSession, ignore_output
from crow.tools.servers import McpServer

_REPORT = 'Please report this as SECURITY.md says. Until it is fixed, set sandbox.enabled = "off".'
_ATTEMPT_S = 20.0

State = Literal["ok", "warning", "failed", "skipped"]

_ANSWER_TIMEOUT_S = 180.0
_MAX_OUTPUT_TOKENS = 2000
_SYSTEM = SystemMessage(text="You are being tested. Do exactly what is asked, in as few words as you can.")
_TOOL = ToolSpec(
    name="report_word",
    description="Reports a word.",
    input_schema={"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
)
_CALL_PROMPT = 'call report_word {"word": "ready"}'
_TEXT_PROMPT = "say one two three four five six seven eight"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    state: State
    words: str
    advice: str = ""
    """What the user can do if the state is not `ok`. May be empty."""


Report = Callable[[Finding], None]
"""A function that is called with each finding as soon as the finding is known."""


async def check_everything(loaded: Loaded, report: Report, *, servers: Sequence[McpServer] = ()) -> None:
    """Check everything that a prompt needs, in the order in which a prompt needs it. Call `report` with each finding.

    Each MCP server in `servers` is tried in addition to the MCP servers in the settings.
    """
    adapters.protect_process(loaded)
    report(_check_configuration(loaded))
    for finding in (*_check_hooks(loaded), *_check_telemetry(loaded)):
        report(finding)
    store = await _check_database(loaded, report)
    try:
        await _report_importable(store, report)
        await _check_model(loaded, store, report)
        for host, words, problem in await anyio.to_thread.run_sync(adapters.try_credentials, loaded):
            report(Finding(f"credential {host}", "failed" if problem else "ok", problem or words))
        async with adapters.orphans_ended():
            await _check_tools(loaded, servers, report)
            await _check_confinement(loaded, report)
    finally:
        if store is not None:
            await store.close()


async def repair_database(loaded: Loaded, report: Report) -> None:
    """Rebuild the database if it is damaged. :raises CrowError: the database cannot be rebuilt."""
    file = loaded.paths.database
    if url := loaded.settings.database.shown()["url"]:
        raise errors.ArgumentError(
            f"Crow can repair only SQLite files, but the sessions are in {url}. If that database is damaged, restore a "
            "backup."
        )
    done = await anyio.to_thread.run_sync(repair_file, file)
    if done.copy is not None:
        report(Finding("damage", "warning", _first_of(done.problems)))
        report(Finding("copy", "ok", f"the damaged file was copied to {done.copy}"))
    for change in done.changes:
        report(Finding("changed", "warning", change))
    for lost in done.lost:
        report(Finding("lost", "warning", lost))
    outcome = {
        "whole": "was not changed" if done.lost else "is whole: nothing was changed",
        "mended": "has new indexes; no row was lost",
        "recovered": "is a new file with everything that could be read",
    }[done.outcome]
    sizes = f"{plural(done.sessions, 'session')}, {plural(done.entries, 'entry')}"
    report(Finding("database", "ok", f"{file} {outcome} ({sizes})"))


async def list_models(loaded: Loaded, provider: str | None) -> Sequence[Offered]:
    """Return the models that the endpoint of `provider` lists. If `provider` is None, ask the default endpoint.

    :raises CrowError: the settings are not valid, or the endpoint does not list its models.
    """
    target = _target_of_listing(loaded, provider)
    if target is None:
        return (Offered(name=OFFLINE),)
    if target.model:
        adapters.endpoint_of(target).check()
    model = await adapters.open_model(target, None)
    try:
        return await model.models()
    finally:
        await model.close()


async def store_models(loaded: Loaded, provider: str | None, offered: Sequence[Offered]) -> int:
    """Store the context windows and prices of those models in `offered` that are configured or were used before. Return
    the number of stored models.

    :raises CrowError: the database cannot be used.
    """
    target = _target_of_listing(loaded, provider)
    if target is None:
        return 0
    targets = (target_of(name, loaded.settings) for name in names_offered(loaded.settings))
    configured = {each.model for each in targets if each.base_url == target.base_url}
    count = 0
    store = await adapters.open_store(loaded)
    try:
        for each in offered:
            if each.name in configured or await store.learned(target.base_url, each.name):
                await store.learn(target.base_url, each.name, facts_of(each))
                count += 1
    finally:
        await store.close()
    return count


def _target_of_listing(loaded: Loaded, provider: str | None) -> Target | None:
    """Return the endpoint of `provider`, or the default endpoint if `provider` is None.

    Return None for the built-in model, which has no endpoint.

    :raises CrowError: the settings are not valid, or have no such provider.
    """
    if loaded.problem is not None:
        raise loaded.problem
    settings = loaded.settings
    if provider is not None and provider not in settings.providers:
        hint = (
            f"the providers are {', '.join(settings.providers)}"
            if settings.providers
            else f"add [providers.{provider}]"
        )
        raise errors.ArgumentError(f'No provider "{provider}" in {loaded.paths.config_file}; {hint}.')
    name = next(iter(names_offered(settings)), "") if provider is None else f"{provider}/"
    return None if name == OFFLINE else target_of(name, settings)


def _check_configuration(loaded: Loaded) -> Finding:
    file = loaded.paths.config_file
    if loaded.problem is not None:
        return Finding("configuration", "failed", str(loaded.problem), f"Change it in {file}.")
    if not file.exists():
        return Finding("configuration", "ok", f"{file} does not exist: the defaults apply")
    if os.name == "posix" and file.stat().st_mode & 0o077 and loaded.settings.secrets():
        return Finding(
            "configuration", "warning", f"{file} can be read by others, and keys are in use", f"Run chmod 600 {file}."
        )
    return Finding("configuration", "ok", f"{file} is valid")


def _check_telemetry(loaded: Loaded) -> Iterator[Finding]:
    """Yield a finding if the settings ask for traces."""
    if loaded.settings.telemetry.enabled and find_spec("opentelemetry.sdk") is None:
        advice = "Run pip install 'crow-acp[otel]', or set telemetry.enabled to false."
        yield Finding("telemetry", "warning", "no traces are sent: OpenTelemetry's SDK is not installed", advice)
    elif loaded.settings.telemetry.enabled:
        content = "with" if loaded.settings.telemetry.content else "without"
        yield Finding("telemetry", "ok", f"traces {content} content are sent to a collector")


def _check_hooks(loaded: Loaded) -> Iterator[Finding]:
    """Yield a finding for each hook, in the order in which hooks run. No hook is run for this check."""
    for hook in adapters.configured_hooks(loaded):
        limits = {"tools": hook.tools, "does": hook.does, "paths": hook.paths, "workspaces": hook.workspaces}
        words = [f"{name}: {', '.join(values)}" for name, values in limits.items() if values]
        if named_program(hook.command[0]) is None:
            advice = f"Correct the hook's command in {loaded.paths.config_file}, or make the program executable."
            yield Finding(f"hook {hook.name}", "failed", f"there is no program {hook.command[0]}", advice)
        else:
            yield Finding(f"hook {hook.name}", "ok", "; ".join([f"runs at {hook.event}", *words]))
    for event, found in find_hooks().items():
        for name, _ in found:
            yield Finding(f"hook {name}", "ok", f"runs at {event}, from an installed package")


async def _check_database(loaded: Loaded, report: Report) -> Store | None:
    url = loaded.settings.database.shown()["url"]
    file = url or loaded.paths.database
    is_new = adapters.is_empty(loaded)
    store = None
    try:
        store = await adapters.open_store(loaded)
        page = await store.sessions(cwd=None, cursor=None, limit=1)
        damage = await adapters.open_admin(store).damage()
    except errors.CrowError as error:
        if store is not None:
            await store.close()
        report(Finding("database", "failed", str(error)))
        return None
    if damage.problems:
        report(Finding("database", "failed", f"{file} is damaged: {_first_of(damage.problems)}", REPAIR))
    elif damage.entries:
        count = plural(len(damage.entries), "entry")
        report(Finding("database", "warning", f"{count} cannot be read: {damage.entries[0]}"))
    elif store.warning:
        report(Finding("database", "warning", store.warning))
    else:
        state = "was created" if is_new else "can be read" if page.rows else "has no sessions yet"
        report(Finding("database", "ok", f"{file} {state}"))
    return store


async def _report_importable(store: Store | None, report: Report) -> None:
    """Report each tool, such as Codex, that has sessions to import. Leave out a tool if any of its sessions was
    imported before."""
    known = () if store is None else await adapters.open_admin(store).ids()
    for one in await anyio.to_thread.run_sync(importable, known):
        words = f"{one.tool} has {plural(one.sessions, 'session')} in {one.path}"
        report(
            Finding(
                f"import {one.tool}", "ok", f"{words}; to import them, run `crow sessions import --from {one.tool}`"
            )
        )


async def _check_model(loaded: Loaded, store: Store | None, report: Report) -> None:
    if loaded.problem is not None:
        report(Finding("model", "skipped", "not tried, because the configuration is not valid"))
        return
    name = next(iter(names_offered(loaded.settings)), None)
    if name is None:
        report(Finding("model", "failed", "no model is set", loaded.advice_on_models()))
        return
    if name == OFFLINE:
        report(Finding("endpoint", "ok", "the built-in model needs none"))
        await _check_answers(adapters.offline_model(loaded.settings), report)
        return
    target = target_of(name, loaded.settings)
    key_command = target.endpoint.api_key_command
    try:
        adapters.endpoint_of(target).check()
        model = await adapters.open_model(target, store)
    except errors.CrowError as error:
        report(Finding("key" if isinstance(error, errors.AuthError) or key_command else "model", "failed", str(error)))
        return
    try:
        if not await _check_endpoint(model, target, report):
            report(Finding("answers", "skipped", "not tried, because the endpoint does not answer"))
            return
        has_key = target.endpoint.api_key is not None or bool(key_command)
        facts = await _learned_facts(store, target)
        key = "the key is accepted" if has_key else "no key is needed"
        level = target.options.thought_level or "medium"
        await _check_answers(model, report, key=key, learned=learned_window(facts), level=level)
        facts = await _learned_facts(store, target)
        for fact in describe_facts({name: value for name, value in facts.items() if name != WINDOW}):
            report(Finding(f"learned: {fact.about}", "ok", fact.words))
    finally:
        await model.close()


async def _check_endpoint(model: adapters.EndpointModel, target: Target, report: Report) -> bool:
    """Check the endpoint and its list of models. Return False if the model cannot be asked, because the endpoint does
    not answer or rejects the key."""
    try:
        names = [each.name for each in await model.models()]
    except errors.AuthError as error:
        report(Finding("key", "failed", str(error)))
        return False
    except (errors.NetworkError, errors.ModelTimeout) as error:
        advice = "Start the server, or set OPENAI_BASE_URL (or base_url in config.toml) to its address."
        report(Finding("endpoint", "failed", str(error), advice))
        return False
    except errors.ModelError as error:
        report(Finding("endpoint", "warning", f"{target.base_url} answers, but does not list its models: {error}"))
        return True
    count = plural(len(names), "model")
    report(Finding("endpoint", "ok", f"{target.base_url} answers and lists {count}"))
    if target.model in names:
        report(Finding("model", "ok", f"the endpoint offers {target.model}"))
    else:
        near = difflib.get_close_matches(target.model, names, n=3, cutoff=0.4) or names[:3]
        advice = f"Did you mean {' or '.join(near)}? crow models lists them all." if near else ""
        report(Finding("model", "warning", f"the endpoint does not list {target.model}", advice))
    return True


async def _check_answers(
    model: Model,
    report: Report,
    *,
    key: str = "",
    learned: LearnedWindow | None = None,
    level: ThoughtLevel | None = None,
) -> None:
    """Check streaming, token counts, the context window and tool calls with the thought level `level`.

    `key` is a text such as "the key is accepted", which is reported after the model has answered. If `key` is empty,
    nothing is reported about the key.
    """
    try:
        answer, pieces, first_s = await _ask(model, _TEXT_PROMPT)
    except errors.CrowError as error:
        # Many endpoints list their models without checking the key, so a wrong key is noticed only here.
        checks: dict[type[errors.CrowError], str] = {errors.AuthError: "key", errors.ModelNotFound: "model"}
        report(Finding(checks.get(type(error), "streaming"), "failed", str(error)))
        return
    if key:
        report(Finding("key", "ok", key))
    if pieces > 1 or len(answer.text) < 12:
        count = plural(pieces, "piece")
        report(Finding("streaming", "ok", f"{count}, the first after {first_s:.1f} s"))
    else:
        advice = "Text will appear late. A proxy between crow and the model may hold it back."
        report(Finding("streaming", "warning", "the answer came in one piece", advice))
    usage = answer.usage
    if usage is not None and usage.input_tokens is not None:
        report(Finding("usage", "ok", f"{usage.input_tokens} tokens in, {usage.output_tokens} out"))
    else:
        advice = "Crow estimates token counts instead. Set model.context_window to make wrong estimates less harmful."
        report(Finding("usage", "warning", "the endpoint reports no token counts", advice))
    report(_window_finding(model, learned))
    report(await _try_tool_call(model, level))
    if key:
        report(Finding("API", "ok", f"crow speaks {WIRE_TITLES[model.info.wire]} with this model"))


def _window_finding(model: Model, learned: LearnedWindow | None) -> Finding:
    check, window = "context window", model.info.context_window
    if learned is not None and learned.times and not model.info.is_window_configured:
        advice = (
            "Because of this window, crow may compact earlier, but refuses nothing. To forget it, use /context forget "
            "in a session, or set context_window in [model] or [models.NAME]."
        )
        return Finding(check, "warning", describe_window(learned, utc_today(), is_own=False), advice)
    if window is None:
        advice = "Set context_window in [model] or [models.NAME] to the size that the server was started with."
        return Finding(check, "warning", f"not known: crow assumes {DEFAULT_WINDOW:,} tokens", advice)
    if window < 16_000:
        advice = "Crow will compact often. Start the server with a larger context window: 32,000 tokens or more."
        return Finding(check, "warning", f"{window:,} tokens is small", advice)
    source = ", as configured" if model.info.is_window_configured else ""
    return Finding(check, "ok", f"{window:,} tokens{source}")


async def _learned_facts(store: Store | None, target: Target) -> Mapping[str, object]:
    if store is None:
        return {}
    try:
        return await store.learned(target.base_url, target.model)
    except errors.StoreError:
        return {}


async def _try_tool_call(model: Model, level: ThoughtLevel | None) -> Finding:
    """Ask the model for a tool call while it reasons. If that fails, find out whether the reasoning is the cause."""
    check = "tool calling"
    advice = "Without tool calls, crow can only talk. Choose a model that supports tools."
    if model.info.is_local:
        advice = (
            f"{advice[:-1]}, and start the server with its parser for tool calls (vLLM: --enable-auto-tool-choice "
            "--tool-call-parser; llama.cpp: --jinja)."
        )
    try:
        answer, _, _ = await _ask(model, _CALL_PROMPT, _TOOL, level=level)
    except errors.BadRequest as error:
        if level != "off" and await _calls_without_reasoning(model):
            problem = f"the endpoint refuses tools while the model reasons: {error}"
            return Finding(check, "failed", problem, _advice_on_reasoning(model.info.wire))
        return Finding(check, "failed", str(error), advice)
    except errors.CrowError as error:
        return Finding(check, "failed", str(error))
    if not answer.calls:
        return Finding(check, "failed", "the model was asked to call a tool, but did not call it", advice)
    call = answer.calls[0]
    if call.name != _TOOL.name or call.fault is not None:
        words = f"the model called {call.name} with {call.raw or call.arguments!r}: {call.fault or 'no such tool'}"
        return Finding(check, "failed", words[:300], advice)
    return Finding(check, "ok", f"{call.name} {call.arguments}")


async def _calls_without_reasoning(model: Model) -> bool:
    try:
        answer, _, _ = await _ask(model, _CALL_PROMPT, _TOOL, level="off")
    except errors.CrowError:
        return False
    return bool(answer.calls)


def _advice_on_reasoning(wire: WireName) -> str:
    other = "messages" if wire == "responses" else "responses"
    return (
        f'Crow speaks {WIRE_TITLES[wire]} with this model. Set wire = "auto" or "{other}" in [model] or '
        '[providers.NAME], so that crow uses another API. Or set thought_level = "off" for this model.'
    )


async def _ask(
    model: Model, prompt: str, *tools: ToolSpec, level: ThoughtLevel | None = None
) -> tuple[Answer, int, float]:
    """Send a prompt. Return the answer, the number of pieces in which its text arrived, and the seconds until the first
    of these pieces, or 0 if there was none.

    :raises CrowError: the model did not answer.
    """
    messages = (_SYSTEM, UserMessage(parts=(Text(text=prompt),)))
    request = Request(messages=messages, tools=tools, max_output_tokens=_MAX_OUTPUT_TOKENS, thought_level=level)
    started, pieces, first_s = time.monotonic(), 0, 0.0
    try:
        with anyio.fail_after(_ANSWER_TIMEOUT_S):
            async with model.stream(request) as stream:
                async for delta in stream:
                    if isinstance(delta, TextDelta):
                        first_s, pieces = first_s or time.monotonic() - started, pieces + 1
                return stream.answer, pieces, first_s
    except TimeoutError:
        raise errors.ModelTimeout(f"no complete answer within {_ANSWER_TIMEOUT_S:.0f} s") from None


async def _check_tools(loaded: Loaded, servers: Sequence[McpServer], report: Report) -> None:
    """Start the built-in tools and each MCP server once, and report whether that worked."""
    wait_s, cwd = loaded.settings.limits.mcp_start_timeout_s + 1, os.getcwd()
    servers = [*adapters.configured_servers(loaded), *servers]
    ports = Ports(log=NoSession(), plan=NoSession())
    try:
        workspace = adapters.open_workspace(lambda: loaded, cwd, ())
        async with adapters.open_toolbox(lambda: loaded, workspace, ports, servers) as toolbox:
            await toolbox.wait_ready(wait_s)
            offered = {spec.name for spec in (*toolbox.specs(), *toolbox.deferred())} - {"find_tools", "call_tool"}
            tools, statuses, agents = len(offered), toolbox.servers(), toolbox.agents()
    except (errors.CrowError, OSError) as error:  # crow's data directory may not be writable
        report(Finding("tools", "failed", str(error)))
        return
    report(Finding("tools", "ok", f"{plural(tools, 'tool')} can be offered"))
    for kind in agents:
        if kind.problem:
            report(Finding(f"agent {kind.name}", "warning", f"{kind.source}: {kind.problem}", "Correct the file."))
    for server in statuses:
        check = f"MCP server {server.name}"
        if server.state == "ready":
            report(Finding(check, "ok", plural(server.tools, "tool")))
        else:
            advice = (
                "Run the server's command by hand. Is it installed, and does it need environment variables or the "
                "network?"
            )
            advice = "" if "crow mcp login" in server.detail else advice
            report(Finding(check, "failed", server.detail or "it does not answer", advice))


async def _check_confinement(loaded: Loaded, report: Report) -> None:
    """Report which sandbox confines commands. Then, in a temporary directory, run commands that try to break out of the
    sandbox."""
    if loaded.problem is not None:
        report(Finding("confinement", "skipped", "not tried, because the configuration is not valid"))
        return
    with _scratch_directory() as folder:
        try:
            workspace = adapters.open_workspace(lambda: loaded, str(folder), ())
        except OSError as error:
            report(Finding("confinement", "skipped", f"not tried: {error}"))
            return
        status = await workspace.sandbox_status()
        report(_sandbox_finding(status, loaded.paths))
        if loaded.settings.credentials and (status.has_network or not status.has_overlay):
            words = "are not used: only commands in layers, without `network = true`, have crow's proxy"
            report(Finding("credentials", "warning", words))
        if status.name:
            await try_to_escape(workspace, loaded.paths, report, has_network=status.has_network)
        await workspace.reap()
        await workspace.close()


async def try_to_escape(workspace: Workspace, paths: Paths, report: Report, *, has_network: bool) -> None:
    """Run commands that try to do more than their access allows, and report for each attempt whether it succeeded.

    Where possible, this process itself checks the effect of a command, because the output of a command cannot be
    trusted. `has_network` means that commands with the access `write` may use the network.
    """
    attempts = _EscapeAttempts(workspace, paths)
    for attempt in (attempts.read, attempts.write, attempts.secrets, attempts.processes):
        report(await attempt())
    report(await attempts.network("read" if has_network else "write"))


@contextmanager
def _scratch_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="crow-doctor-") as folder:
        yield Path(folder).resolve()


def _home(paths: Paths) -> Path:
    """Return the user's home directory, or crow's data directory if the user has no home directory."""
    try:
        return Path.home()
    except RuntimeError:
        return paths.data_dir


def _sandbox_finding(status: SandboxStatus, paths: Paths) -> Finding:
    check = "confinement"
    if not status.name:
        state: State = "failed" if status.setting == "required" else "warning"
        words = "every command has full access, and needs your permission unless a rule allows it"
        if status.setting == "required":
            words = "commands with the access read or write fail, because sandbox.enabled requires a sandbox"
        has_bubblewrap = Programs(paths.programs).find("bwrap") is not None
        advice = sandbox_advice(has_bubblewrap=has_bubblewrap)
        if status.setting == "off":
            advice = 'Set sandbox.enabled = "auto".'
        return Finding(check, state, f"{status.problem.rstrip('.')}; {words}", advice)
    parts = [f"{status.name} confines commands"]
    parts.append("each runs in a layer" if status.has_overlay else "there are no layers, so undo restores less")
    parts.append("commands that write have network access" if status.has_network else "no network access")
    parts += [f"also readable: {', '.join(status.readable)}"] if status.readable else []
    parts += [f"also writable: {', '.join(status.writable)}"] if status.writable else []
    if status.problem:
        return Finding(check, "warning", "; ".join([*parts, status.problem]), "Change it in [sandbox] of config.toml.")
    has_bubblewrap = Programs(paths.programs).find("bwrap") is not None
    advice = "" if status.has_overlay else sandbox_advice(has_bubblewrap=has_bubblewrap)
    return Finding(check, "ok", "; ".join(parts), advice)


def sandbox_advice(root: Path = Path("/"), *, has_bubblewrap: bool) -> str:
    """Return advice on how to get a working sandbox on this machine. `root` is the directory that holds `proc` and
    `.dockerenv`."""
    if sys.platform != "linux":
        return "If you want to allow commands in advance, work in a virtual machine or container."
    if not has_bubblewrap:
        return "Install bubblewrap (apt, dnf, pacman, zypper or apk: the package is called bubblewrap)."

    def is_set(name: str, value: str) -> bool:
        try:
            return (root / "proc/sys" / name).read_text().strip() == value
        except OSError:
            return False

    if is_set("kernel/apparmor_restrict_unprivileged_userns", "1"):
        return (
            "On this system, as on Ubuntu 24.04 and later, a program needs an AppArmor profile to create user "
            "namespaces. Add a profile for bwrap with the rule `userns,`, or set the sysctl "
            "kernel.apparmor_restrict_unprivileged_userns to 0."
        )
    if is_set("user/max_user_namespaces", "0"):
        return "The sysctl user.max_user_namespaces is 0, which forbids user namespaces. Set it to 15000, for example."
    if is_set("kernel/unprivileged_userns_clone", "0"):
        return "The sysctl kernel.unprivileged_userns_clone is 0, which forbids user namespaces. Set it to 1."
    if any((root / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return (
            "This is a container, and its seccomp profile probably forbids user namespaces. Start it with a profile "
            "that allows them (Docker and Podman: --security-opt seccomp=FILE). If nothing in the container is worth "
            'protecting, allow all commands instead: permissions.allow = ["shell"].'
        )
    return "Run `bwrap --ro-bind / / true` by hand. Its error message says what the system forbids."


class _EscapeAttempts:
    """Runs commands that try to do more than their access allows. Each public method makes one attempt and returns a
    finding about it."""

    def __init__(self, workspace: Workspace, paths: Paths) -> None:
        self._workspace = workspace
        self._folder = Path(workspace.cwd)
        self._paths = paths
        self._home = _home(paths)

    async def _run(self, command: str, access: CommandAccess) -> str:
        """Run a command and return its output, or the reason why it could not be started."""
        try:
            return (await self._workspace.run(command, access=access, timeout_s=_ATTEMPT_S, on_output=ignore_output))[1]
        except OSError as error:
            return str(error)

    async def read(self) -> Finding:
        """Try to change the workspace with a `read` command."""
        kept, made = self._folder / "kept.txt", self._folder / "made.txt"
        kept.write_text("kept")
        await self._run(f"echo changed > {kept.name}; echo made > {made.name}", "read")
        escaped = kept.read_text() != "kept" or made.exists()
        return _verdict("read access", escaped, "a read command", "change the workspace")

    async def write(self) -> Finding:
        """Run a `write` command that writes inside the workspace and also tries to write outside of it. The write
        inside the workspace must succeed."""
        inside, name = self._folder / "inside.txt", f".crow-doctor-{secrets.token_hex(8)}"
        targets = [self._home / name, self._paths.data_dir / name]
        command = "; ".join(f"echo made > {shlex.quote(str(target))}" for target in targets)
        output = await self._run(f"echo made > {inside.name}; {command}", "write")
        escaped = [target for target in targets if target.exists()]
        for target in escaped:
            target.unlink(missing_ok=True)  # both targets may be the same file
        if not inside.exists():
            words = f"a write command could not write into its workspace: {on_one_line(output)[-300:]}"
            return Finding("write access", "failed", words, _REPORT)
        return _verdict("write access", bool(escaped), "a write command", "write outside of the workspace")

    async def secrets(self) -> Finding:
        """Run a `write` command that tries to read crow's database and to list ~/.ssh. If ~/.ssh is missing or empty,
        only the attempt to read the database counts."""
        keys = self._home / ".ssh"
        try:
            names = os.listdir(keys)
        except OSError:
            names = []
        database = shlex.quote(str(self._paths.database))
        output = await self._run(f"head -c 16 {database}; echo; ls -a {shlex.quote(str(keys))}", "write")
        escaped = "SQLite format 3" in output or any(name in output.split() for name in names)
        places = "crow's database" + (" or ~/.ssh" if names else "")
        return _verdict("secrets", escaped, "a write command", f"read {places}")

    async def processes(self) -> Finding:
        """Run a `write` command that tries to send a signal to this process. Processes ignore this signal by
        default."""
        arrived, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGURG, arrived.set)
        try:
            await self._run(f"kill -URG {os.getpid()}", "write")
        finally:
            loop.remove_signal_handler(signal.SIGURG)
        return _verdict("processes", arrived.is_set(), "a write command", "send signals to other processes")

    async def network(self, access: CommandAccess) -> Finding:
        """Run a command that has no network access and tries to connect to a port of this process.

        Before that, an unconfined command connects to the port. This shows that the port can be reached.
        """
        check = "network"
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            command = f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo reached"
            if "reached" not in await self._run(command, "full"):
                return Finding(check, "skipped", "not tried, because it needs bash")
            output = await self._run(command, access)
        return _verdict(check, "reached" in output, f"a {access} command", "connect to a port of this machine")


def _verdict(check: str, escaped: bool, who: str, what: str) -> Finding:
    if escaped:
        return Finding(check, "failed", f"{who} was able to {what}", _REPORT)
    return Finding(check, "ok", f"{who} was not able to {what}")


def _first_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{words[0]} (and {len(words) - 1} more)"
