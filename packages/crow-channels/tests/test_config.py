"""The configuration: what it means, and how it complains."""

from __future__ import annotations

from pathlib import Path

import pytest

from crow_channels.__main__ import main
from crow_channels.app import make_chat
from crow_channels.config import read_config
from crow_channels.errors import ConfigError

VALID = """
state = "here.db"
[server]
url = "wss://crow.example/acp"
[principals.ann]
token_env = "CROW_TOKEN_ANN"
cwd = "/srv/crow/ann"
[chats.hook]
type = "webhook"
url = "https://chat.example/hook"
secret_env = "HOOK_SECRET"
[chats.hook.users]
"u1" = "ann"
[chats.hook.direct]
[chats.hook.channels.general]
answers = "anyone"
"""
ENVIRONMENT = {"CROW_TOKEN_ANN": "crow_x", "HOOK_SECRET": "s" * 20}


def written(directory: Path, text: str) -> Path:
    path = directory / "channels.toml"
    path.write_text(text)
    return path


def test_a_valid_file(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, VALID), ENVIRONMENT)
    assert config.state == tmp_path / "here.db"
    assert config.principals["ann"].token == "crow_x"
    chat = config.chats[0]
    assert chat.channels["general"].answers == "anyone"
    assert "auto" not in chat.channels["general"].modes
    assert config.secret_variables == {"CROW_TOKEN_ANN", "HOOK_SECRET"}
    assert make_chat(chat).limits.chars == 4000


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('url = "wss:', 'adress = "wss:', "server.adress is not a setting"),
        ("wss:", "ws:", "the tokens would travel unencrypted"),
        ("wss:", "https:", 'expected an address such as "ws://127.0.0.1:7431/acp"'),
        ('url = "wss://crow.example/acp"', "", "server needs either url"),
        ('cwd = "/srv/crow/ann"', 'cwd = "work"', "principals.ann.cwd is 'work'; expected an absolute path"),
        ('cwd = "/srv/crow/ann"', "", "principals.ann.cwd is missing"),
        ('"u1" = "ann"', '"u1" = "bob"', "chats.hook.users.u1 is 'bob'; expected one of the principals: ann"),
        ('answers = "anyone"', 'answers = "all"', "channels.general.answers is 'all'; expected one of asker, anyone"),
        ('answers = "anyone"', 'users = ["u2"]', "names 'u2', who is not among the users"),
        ('answers = "anyone"', 'principal = "bob"', "channels.general.principal is 'bob'"),
        ('answers = "anyone"', "shows_calls = 1", "shows_calls is 1; expected true or false"),
        ('answers = "anyone"', 'answer = "anyone"', "channels.general.answer is not a setting"),
        ('[chats.hook.direct]\n[chats.hook.channels.general]\nanswers = "anyone"\n', "", "neither channels nor direct"),
        ("[server]", "[server", "channels.toml: cannot be read"),
        ('state = "here.db"', "state = 1", "state is 1; expected a string"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_value(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in VALID
    with pytest.raises(ConfigError) as caught:
        read_config(written(tmp_path, VALID.replace(old, new)), ENVIRONMENT)
    assert problem in str(caught.value)
    assert str(caught.value).startswith("channels.toml: ")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('type = "webhook"', 'type = "slack"', "expected discord, webhook, or module:Class"),
        ('type = "webhook"', 'type = "no_such_module:Chat"', "which cannot be imported"),
        ('secret_env = "HOOK_SECRET"', "", "chats.hook.secret_env is missing"),
        ("https://chat", "ftp://chat", "expected http:// or https://"),
        ('type = "webhook"', 'type = "webhook"\nchars = nan', "chats.hook.chars is nan; expected a number"),
        ('type = "webhook"', 'type = "webhook"\nchars = 100', "must hold at least 400 characters"),
        ('type = "webhook"', 'type = "webhook"\nlisten = "7433"', "not HOST:PORT"),
        ('type = "webhook"', 'type = "webhook"\nport = 1', "chats.hook.port is not a setting of this chat"),
    ],
)
def test_a_mistake_in_the_settings_of_a_chat(tmp_path: Path, old: str, new: str, problem: str) -> None:
    config = read_config(written(tmp_path, VALID.replace(old, new)), ENVIRONMENT)
    with pytest.raises(ConfigError) as caught:
        make_chat(config.chats[0])
    assert problem in str(caught.value)


@pytest.mark.parametrize("secret", ["", "short"])
def test_a_secret_that_is_missing_or_short_is_refused(tmp_path: Path, secret: str) -> None:
    config = read_config(written(tmp_path, VALID), ENVIRONMENT | {"HOOK_SECRET": secret})
    with pytest.raises(ConfigError, match=r"HOOK_SECRET, which is not set|expected at least 16"):
        make_chat(config.chats[0])
    with pytest.raises(ConfigError, match="CROW_TOKEN_ANN, which is not set"):
        read_config(written(tmp_path, VALID), {})


def test_the_command_checks_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert main([str(written(tmp_path, VALID)), "--check"]) == 0
    assert main([str(written(tmp_path, "[server]"))]) == 2
    assert capsys.readouterr().err.endswith(
        'crow-channels: channels.toml: server needs either url, such as "ws://127.0.0.1:7431/acp", or command = '
        '["crow", "acp"].\n'
    )
