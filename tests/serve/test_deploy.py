"""The files in deploy/ name only commands, settings, variables and ports that crow knows, and agree with each other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from crow.cli.arguments import whole_parser
from crow.serve.server import CLOSE_S, tls_options
from crow.settings import load_settings
from crow.settings.load import _FROM_ENVIRONMENT
from crow.settings.values import ServeSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
KNOWN = {"CROW_HOME", "CROW_CONFIG", "OPENAI_API_KEY", *_FROM_ENVIRONMENT.values()}
PORT = ServeSettings().listen.rpartition(":")[2]
UNIT = (DEPLOY / "crow.service").read_text()
SOCKET = (DEPLOY / "crow.socket").read_text()
CONTAINER = (DEPLOY / "Containerfile").read_text()
COMPOSE_TEXT = (DEPLOY / "compose.yaml").read_text()
COMPOSE = yaml.safe_load(COMPOSE_TEXT)


def value(text: str, name: str) -> str:
    """The value of the first `name=value` line."""
    found = re.search(rf"^{name}=(.*)$", text, re.MULTILINE)
    assert found is not None, name
    return found[1]


def commands() -> list[str]:
    """Every call of crow in these files."""
    texts = (UNIT, CONTAINER.replace('", "', " "), COMPOSE_TEXT.replace('", "', " "))
    return [call for text in texts for call in re.findall(r"\bcrow ((?:serve|doctor|sessions)\b[^\n\"\])]*)", text)]


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_every_command_is_one_of_crow(command: str) -> None:
    whole_parser().parse_args(shlex.split(command))


def test_every_variable_is_one_that_crow_reads() -> None:
    for text in (UNIT, CONTAINER, COMPOSE_TEXT):
        assert set(re.findall(r"\b(?:CROW|OPENAI)_[A-Z_]+", text)) <= KNOWN


def test_the_container_starts_with_its_settings_and_a_token() -> None:
    variables = dict(re.findall(r"(CROW_\w+)=(\S+)", CONTAINER))
    copied = dict(re.findall(r"^COPY (\S+) (/\S+)$", CONTAINER, re.MULTILINE))
    assert copied["deploy/config.toml"] == variables["CROW_CONFIG"]
    loaded = load_settings({}, {"CROW_CONFIG": str(DEPLOY / "config.toml")})
    assert loaded.problem is None
    assert tls_options(loaded.settings.serve, DEPLOY) == {}
    (root,) = loaded.settings.serve.roots
    folder = root.removesuffix("/{principal}")
    mounts = [mount.partition(":")[2] for mount in COMPOSE["services"]["crow"]["volumes"]]
    assert set(mounts) == {folder, variables["CROW_HOME"]}
    assert f"-g crow {folder}" in CONTAINER


def test_everything_uses_the_usual_port_and_leaves_time_to_drain() -> None:
    assert value(SOCKET, "ListenStream") == f"127.0.0.1:{PORT}"
    assert f"EXPOSE {PORT}\n" in CONTAINER
    crow = COMPOSE["services"]["crow"]
    assert crow["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert crow["command"] == ["crow", "serve", "--listen", f"0.0.0.0:{PORT}"]
    assert set(re.findall(r":(\d{4,5})\b", CONTAINER)) == {PORT}
    needed_s = ServeSettings().drain_timeout_s + 2 * CLOSE_S
    assert int(value(UNIT, "TimeoutStopSec")) > needed_s
    assert int(crow["stop_grace_period"].removesuffix("s")) > needed_s


def test_the_service_keeps_its_data_where_it_may_write() -> None:
    assert value(UNIT, "Environment") == f"CROW_HOME=/var/lib/{value(UNIT, 'StateDirectory')}"
    assert value(UNIT, "ExecStart").split()[1:] == ["serve", "--listen", "systemd"]
    assert value(UNIT, "Requires") == "crow.socket"
