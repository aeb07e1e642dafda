"""What principals may ask of a server, and where its tools and commands stay."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crow.agent.permissions.decisions import Ask, Refuse, decide
from crow.agent.permissions.rules import user_rules
from crow.domain.entries import Announcement
from crow.domain.errors import ArgumentError, ConfigError
from crow.protocol.params import OpenRequest
from crow.serve.policy import ServePolicy, check_server
from crow.settings.values import ServeSettings
from crow.store.principals import PrincipalStore
from crow.store.sqlite.store import SqliteStore
from crow.tools import Coverage, PlannedCall, SandboxStatus, Touched
from crow.tools.sandbox.policy import Policy, PrivateDirectories, SandboxOptions
from crow.tools.servers import HttpServer, StdioServer
from crow.tools.workspace import DiskWorkspace
from tests.store.scenes import new_session

CONFINED = SandboxStatus(name="bubblewrap 0.8.0")


@pytest.fixture
async def view(tmp_path: Path) -> AsyncIterator[PrincipalStore]:
    """The store as `bob` sees it."""
    store = await SqliteStore.open(tmp_path / "crow.db")
    yield PrincipalStore(store, "bob")
    await store.close()


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """A directory with a workspace each for `ann` and `bob`."""
    for name in ("ann", "bob"):
        (tmp_path / "work" / name / "project").mkdir(parents=True)
    return tmp_path / "work"


def settings_for(roots: Path, **more: Any) -> ServeSettings:
    return ServeSettings(roots=(f"{roots}/{{principal}}",), **more)


async def test_workspaces_are_below_the_roots_after_links_are_resolved(view: PrincipalStore, roots: Path) -> None:
    policy = ServePolicy(settings_for(roots), "bob", is_confining=True)
    (roots / "bob" / "escape").symlink_to(roots / "ann")
    (roots / "bob" / "inside").symlink_to(roots / "bob" / "project")
    for path in ("project", "", "inside", "project/../project", "not/there/yet"):
        await policy.check_params("session/new", {"cwd": str(roots / "bob" / path)}, view)
    refusals = set()
    for path in (
        str(roots / "ann" / "project"),
        str(roots),
        str(roots / "bob" / "escape"),
        str(roots / "bob" / "escape" / "project"),
        f"{roots}/bob/../ann",
        f"{roots}/bobby",
        "/",
        "/etc",
        "/no/such/place",
        "relative",
        "",
        f"{roots}/bob\0/etc",
        "x" * 100_000,
        "\ud800",
    ):
        for params in ({"cwd": path}, {"cwd": str(roots / "bob"), "additionalDirectories": [str(roots / "bob"), path]}):
            for method in ("session/new", "session/load", "session/resume", "session/fork"):
                with pytest.raises(ArgumentError, match="expected a directory below") as refused:
                    await policy.check_params(method, params, view)
        refusals.add(str(refused.value).split(";")[1])
    assert len(refusals) == 1


async def test_parameters_of_the_wrong_type_are_left_to_those_who_refuse_them(
    view: PrincipalStore, roots: Path
) -> None:
    policy = ServePolicy(settings_for(roots), "bob", is_confining=True)
    strange: list[Any] = [
        None,
        [],
        5,
        {},
        {"cwd": 5},
        {"cwd": None, "additionalDirectories": {"a": 1}, "sessionId": []},
    ]
    for params in strange:
        await policy.check_params("session/load", params, view)
        await policy.check_params("session/set_mode", params, view)


async def test_who_loads_a_shared_session_may_name_its_directory_and_no_other(
    view: PrincipalStore, roots: Path
) -> None:
    here, other = str(roots / "ann" / "project"), str(roots / "ann")
    ann = PrincipalStore(view.inner, "ann")
    await ann.create_session(new_session("a1", cwd=here))
    policy = ServePolicy(settings_for(roots), "bob", is_confining=True)
    for session, is_shared in (("a1", False), ("a1", True), ("a9", True)):
        if is_shared:
            await ann.share_session("a1", "bob", "read")
        params = {"cwd": here, "sessionId": session}
        if session == "a1" and is_shared:
            await policy.check_params("session/load", params, view)
        else:
            with pytest.raises(ArgumentError):
                await policy.check_params("session/load", params, view)
        for method, cwd in (("session/load", other), ("session/fork", here)):
            with pytest.raises(ArgumentError):
                await policy.check_params(method, params | {"cwd": cwd}, view)


async def test_auto_is_refused_where_nothing_confines(view: PrincipalStore, roots: Path) -> None:
    asked = (
        ("session/set_mode", {"sessionId": "s", "modeId": "auto"}),
        ("session/set_config_option", {"sessionId": "s", "configId": "mode", "value": "auto"}),
    )
    for method, params in asked:
        await ServePolicy(settings_for(roots), "bob", is_confining=True).check_params(method, params, view)
        with pytest.raises(ArgumentError, match="nothing confines commands"):
            await ServePolicy(settings_for(roots), "bob", is_confining=False).check_params(method, params, view)
    harmless = {"sessionId": "s", "configId": "thought_level", "value": "auto"}
    await ServePolicy(settings_for(roots), "bob", is_confining=False).check_params(
        "session/set_config_option", harmless, view
    )


def test_servers_of_clients_are_refused_unless_the_operator_allows_them(roots: Path) -> None:
    request = OpenRequest(cwd=str(roots), directories=(), servers=())
    servers = (
        StdioServer(name="shell", command="/bin/sh"),
        HttpServer(name="cloud", url="http://169.254.169.254/latest"),
    )
    for server in servers:
        asked = replace(request, servers=(server,))
        with pytest.raises(ArgumentError, match=server.name):
            ServePolicy(settings_for(roots), "bob", is_confining=True).check(asked)
        ServePolicy(settings_for(roots, client_servers=True), "bob", is_confining=True).check(asked)
    ServePolicy(settings_for(roots), "bob", is_confining=True).check(request)


def test_a_server_with_tokens_does_not_start_without_safe_settings(roots: Path) -> None:
    check_server(settings_for(roots), "ask", SandboxStatus())
    check_server(ServeSettings(roots=(str(roots),)), "auto", CONFINED)
    for settings, mode, sandbox, problem in (
        (ServeSettings(), "ask", CONFINED, "needs serve.roots"),
        (ServeSettings(roots=("work",)), "ask", CONFINED, "not an absolute path"),
        (ServeSettings(roots=("/",)), "ask", CONFINED, "the whole machine"),
        (ServeSettings(roots=("/{principal}",)), "ask", CONFINED, "the whole machine"),
        (ServeSettings(roots=(f"{roots}/of-{{principal}}",)), "ask", CONFINED, "beside other text"),
        (ServeSettings(roots=(f"{roots}/none/{{principal}}",)), "ask", CONFINED, "is not a directory"),
        (settings_for(roots), "auto", SandboxStatus(problem="no bubblewrap"), "nothing confines"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_server(settings, mode, sandbox)


def call(**more: Any) -> PlannedCall:
    return PlannedCall(announcement=Announcement(title="t", kind="execute"), **more)


def test_what_leaves_the_workspace_or_the_sandbox_is_refused_and_not_asked_about() -> None:
    """Who answers the question is the one whom the server must be protected from."""
    outside = call(access="read", touched=Touched(is_outside=True, rule_paths=("/etc/hosts",)))
    full = call(access="execute", command_access="full", coverage=Coverage(argument="make install"))
    unknown = call(access="execute", coverage=Coverage(argument="make install"))
    for mode in ("ask", "accept-edits", "auto", "plan"):
        for name, one in (("read_file", outside), ("shell", full), ("shell", unknown)):
            assert isinstance(decide(name, one, mode, (), is_bounded=True), Refuse)
    by_session = [replace(rule, is_users=False) for rule in user_rules(["shell", "read_file(/etc/**)"], ())]
    for name, one in (("read_file", outside), ("shell", full)):
        assert isinstance(decide(name, one, "ask", by_session, is_bounded=True), Refuse)
        assert isinstance(decide(name, one, "ask", ()), Ask)
    by_operator = user_rules(["shell(make *)", "read_file(/etc/**)"], ())
    for name, one in (("read_file", outside), ("shell", full)):
        assert not isinstance(decide(name, one, "ask", by_operator, is_bounded=True), Refuse)
    confined = call(access="execute", command_access="write", coverage=Coverage(argument="make"))
    assert isinstance(decide("shell", confined, "ask", (), is_bounded=True), Ask)


async def test_tools_cannot_touch_anything_outside_a_bounded_workspace(tmp_path: Path, roots: Path) -> None:
    skills = tmp_path / "config" / "skills"
    skills.mkdir(parents=True)
    workspace = DiskWorkspace(roots / "bob", is_bounded=True, own_readable=(skills,))
    secret = roots / "ann" / "secret"
    secret.write_text("hers")
    (roots / "bob" / "link").symlink_to(secret)
    for path in (secret, workspace.resolve("link"), workspace.resolve("../ann/secret"), Path("/etc/hosts")):
        assert (workspace.protection(path), workspace.read_protection(path)) == ("never", "never")
        with pytest.raises(PermissionError):
            await workspace.write_text(path, "mine")
        with pytest.raises(PermissionError):
            await workspace.restore(path, None)
    assert secret.read_text() == "hers"
    inside = workspace.resolve("project/new")
    assert (workspace.protection(inside), workspace.read_protection(inside)) == ("none", "none")
    assert workspace.read_protection(skills / "a") == "none"
    assert DiskWorkspace(roots / "bob").read_protection(secret) == "none"


def test_commands_see_no_other_workspace_of_the_server(tmp_path: Path, roots: Path) -> None:
    private = PrivateDirectories(
        temporary=tmp_path / "t", caches=tmp_path / "c", blank=tmp_path / "b", trust=tmp_path / "x"
    )
    (roots / ".git").mkdir()
    (roots / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    here = Path(os.path.realpath(roots / "bob" / "project"))
    policy = Policy((here,), SandboxOptions(masked=(roots,)))
    for access in ("read", "write"):
        confinement = policy.confinement(access, private)
        assert Path(os.path.realpath(roots)) in confinement.masked
        shown = (*confinement.readable, *confinement.writable, *confinement.throwaway)
        assert here in shown
        below = [path for path in shown if path.is_relative_to(os.path.realpath(roots))]
        assert {path for path in below if not path.is_relative_to(here)} == set()
