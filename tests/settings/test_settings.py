"""Sources of settings, their validation and its error messages."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from crow.adapters import hidden_keys
from crow.domain.errors import ConfigError
from crow.settings import Loaded, Settings, fallback_of, load_settings
from crow.settings.credentials import read_credential
from crow.settings.database_urls import database_passwords
from crow.settings.load import setting_keys
from crow.settings.types import Section
from crow.settings.values import DatabaseSettings, expectation


def annotation(key: str) -> object:
    """The type of the setting with this dotted key."""
    section, _, name = key.partition(".")
    table = Settings.model_fields[section].annotation
    return table.model_fields[name].annotation if name and table is not None else table


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def load(home: Path, toml: str = "", flags: dict[str, str] | None = None, **env: str) -> Loaded:
    if toml:
        (home / "config.toml").write_text(toml, "utf-8")
    return load_settings(flags or {}, {"CROW_HOME": str(home), **env})


def problem(home: Path, toml: str = "", flags: dict[str, str] | None = None, **env: str) -> str:
    loaded = load(home, toml, flags, **env)
    assert loaded.problem is not None
    assert loaded.settings == Settings()
    return str(loaded.problem)


def test_without_a_file_the_defaults_apply(home: Path) -> None:
    loaded = load(home)
    assert loaded.problem is None
    assert loaded.settings == Settings()
    assert set(loaded.sources.values()) == {"default"}


def test_flag_beats_environment_beats_file_beats_default(home: Path) -> None:
    toml = 'model.name = "from-file"\nlog.level = "error"\nmodel.base_url = "http://file/v1"\ncompaction.auto = false'
    loaded = load(home, toml, {"model.name": "from-flag"}, CROW_MODEL="from-env", CROW_LOG="debug")
    settings = loaded.settings
    assert (settings.model.name, settings.log.level, settings.model.base_url, settings.compaction.auto) == (
        "from-flag",
        "debug",
        "http://file/v1",
        False,
    )
    assert {key: source for key, source in loaded.sources.items() if source != "default"} == {
        "model.name": "flag --model",
        "log.level": "environment CROW_LOG",
        "model.base_url": "config.toml",
        "compaction.auto": "config.toml",
    }


def test_empty_flags_and_variables_count_as_not_given(home: Path) -> None:
    loaded = load(home, 'model.name = "x"', {"model.name": ""}, CROW_MODEL=" ", OPENAI_BASE_URL="", OPENAI_API_KEY="")
    assert (loaded.problem, loaded.settings.model.name, loaded.settings.model.api_key) == (None, "x", None)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('[model]\ncontext_window = "128k"', 'model.context_window is "128k"; expected a whole number of tokens'),
        ("[model]\ncontext_window = true", "model.context_window is true; expected a whole number of tokens"),
        ("[model]\ncontext_window = 10", "model.context_window is 10; expected a whole number of tokens"),
        ("[model]\nname = 5", "model.name is 5; expected a model name"),
        ('[model]\nbase_url = "localhost:1"', 'model.base_url is "localhost:1"; expected an http or https URL'),
        ("[model]\ninput_price = -1", "model.input_price is -1; expected US dollars per million tokens"),
        (
            "[compaction]\nthreshold = 85",
            "compaction.threshold is 85; expected a fraction of the window from 0.1 to 0.95",
        ),
        (
            "[compaction]\nthreshold = 1.5",
            "compaction.threshold is 1.5; expected a fraction of the window from 0.1 to 0.95, such as 0.85",
        ),
        ('[compaction]\nthreshold = "97%"', 'compaction.threshold is "97%"; expected a fraction of the window'),
        ('[compaction]\nwindow = "half"', 'compaction.window is "half"; expected a fraction of the model\'s window'),
        ("[store]\npath = 3", "store.path is 3; expected the path of a file"),
        (
            '[permissions]\nmode = "yolo"',
            'permissions.mode is "yolo"; expected "ask", "accept-edits", "plan" or "auto"',
        ),
        ("[limits]\nidle_timeout_s = 0", "limits.idle_timeout_s is 0; expected a number of seconds above 0"),
        ("[limits]\nsteps_per_turn = 2026-01-01", 'limits.steps_per_turn is "2026-01-01"; expected a whole number'),
        ('models = "large"', 'models is "large"; expected a list of model names'),
        ("models = [1]", "models is [1]; expected a list of model names"),
        ("model = 3", "model is 3; expected a table: [model]"),
        ("[model]\ncontxt_window = 3", "there is no setting model.contxt_window; did you mean model.context_window?"),
        ('[modle]\nname = "x"', "there is no setting modle.name; did you mean model.name?"),
        (
            "[zzz]",
            "there is no setting zzz; expected one of models, providers, mcp_servers, credentials, hooks, checks, ",
        ),
        ("hooks = 3", "hooks is 3; expected tables [[hooks]], each with event and command"),
        ("[[hooks]]", 'hooks[1] must be a table with "event" and "command"'),
        ('[[hooks]]\nevent = "turn_end"\ncommand = []', "hooks[1].command is <hidden: it may be a secret>; expected"),
        (
            '[[hooks]]\nevent = "turn_end"\ncommand = ["a"]\n' * 2 + 'does = ["x"]',
            'hooks[2].does is ["x"]; expected a list of "read", "write", "execute", "fetch" and "external"',
        ),
        ('[[hooks]]\nevnt = "turn_end"\ncommand = ["a"]', "there is no setting hooks[1].evnt; did you mean"),
        ("[limits]\ncost_per_turn = 0", "limits.cost_per_turn is 0; expected US dollars above 0, such as 2.5"),
        ('[limits]\ncost_per_session = "5"', 'limits.cost_per_session is "5"; expected US dollars above 0'),
        ("[titles]\nmodel = 1", "titles.model is 1; expected a model name"),
        (
            '[model]\nname = "a"\n[models.b]\nfallback = "c"',
            'models.b.fallback is "c"; expected one of a, b, offline',
        ),
        (
            '[model]\nname = "a"\nfallback = "x"\n[providers.p]\nbase_url = "http://localhost/v1"\nmodels = ["q"]',
            'model.fallback is "x"; expected one of a, p/q, offline, p/MODEL',
        ),
        ('[models.b]\nfallback = "b"', 'models.b.fallback is "b"; the fallbacks go round in a circle: b → b'),
        (
            '[models.a]\nfallback = "b"\n[models.b]\nfallback = "c"\n[models.c]\nfallback = "b"',
            'models.b.fallback is "c"; the fallbacks go round in a circle: b → c → b',
        ),
        (
            '[credentials."git.test"]',
            'credentials."git.test" must be a table with one of "from_git = true", "token_env" ',
        ),
        (
            '[credentials."git.test"]\nfrom_git = true\ntoken_env = "A"',
            'credentials."git.test" must be a table with one of',
        ),
        ('[credentials."Git.Test"]\nfrom_git = true', 'credentials."Git.Test" names no host; expected a host name in '),
        ('[credentials."10.0.0.5"]\nfrom_git = true', 'credentials."10.0.0.5" names no host; expected a host name in '),
        ('[credentials."https://a.test"]\nfrom_git = true', 'credentials."https://a.test" names no host; expected a '),
        ('[credentials."*.test"]\nfrom_git = true', 'credentials."*.test" names no host; expected a host name in '),
        (
            '[credentials."a.test"]\ntoken_command = "x"',
            'credentials."a.test".token_command is "x"; expected a command',
        ),
        (
            '[credentials."a.test"]\nfrom_git = true\nheader = "A: b"',
            'credentials."a.test".header is "A: b"; expected the name of a header',
        ),
        ("credentials = 3", "credentials is 3; expected a table for each host: [credentials.HOST]"),
        ("name =", "not valid TOML: "),
        *(
            (f'model.base_url = "http://{rest}"', "model.base_url is <hidden: it may be a secret>; expected an http or")
            for rest in (":pass@host/v1", "host/v1?")
        ),
        (
            'model.base_url = "http://host/v1#top"',
            'model.base_url is "http://host/v1#top"; expected an http or https URL',
        ),
        (
            '[model]\nname = "a"\nfallback = "p"\n[providers.p]\nbase_url = "http://localhost/v1"',
            'model.fallback is "p"; expected one of a, offline, p/MODEL',
        ),
    ],
)
def test_an_error_names_the_file_the_key_the_value_and_what_would_work(home: Path, toml: str, words: str) -> None:
    assert problem(home, toml).startswith(f"{home / 'config.toml'}: {words}")


def test_a_fallback_may_be_any_model_that_the_settings_name(home: Path) -> None:
    toml = (
        '[model]\nname = "a"\n[models.b]\nfallback = "a"\n[models.c]\nfallback = "p/anything"\n'
        '[models.d]\nfallback = "offline"\n[providers.p]\nbase_url = "http://localhost/v1"\n'
    )
    for name in ("", "another"):  # a flag that replaces the default model makes no other setting invalid
        loaded = load(home, toml, {"model.name": name})
        assert loaded.problem is None
        assert [fallback_of(each, loaded.settings) for each in "abcd"] == ["", "a", "p/anything", "offline"]


def test_all_invalid_settings_are_named_at_once(home: Path) -> None:
    words = problem(home, "[model]\nname = 1\n[log]\nlevel = 2", CROW_MODEL="").splitlines()
    assert [line.split(";")[0].removeprefix(str(home)) for line in words] == [
        "/config.toml: model.name is 1",
        "/config.toml: log.level is 2",
    ]


def test_an_error_outside_the_file_names_the_variable_or_flag(home: Path) -> None:
    assert problem(home, OPENAI_BASE_URL="nowhere").startswith(
        'environment OPENAI_BASE_URL: model.base_url is "nowhere";'
    )
    assert problem(home, flags={"permissions.mode": "x"}).startswith('flag --mode: permissions.mode is "x"; expected')


@pytest.mark.parametrize(
    "toml",
    [
        '[model]\napi_key = "sk-sécret"',
        "[model]\napi_key = 1234567890",
        '[model]\nheaders = { Authorization = ["sk-secret"] }',
        '[model]\nbase_url = "https://user:sk-secret@host/v1"',
        '[model]\nbase_url = "https://host/v1?key=sk-secret"',
    ],
)
def test_an_error_shows_no_secret(home: Path, toml: str) -> None:
    words = problem(home, toml)
    assert "<hidden: it may be a secret>" in words
    assert "sk-s" not in words
    assert "1234567890" not in words


def test_settings_show_no_key_when_printed(home: Path) -> None:
    settings = load(home, '[model]\nheaders = { A = "hidden-1" }', OPENAI_API_KEY="hidden-2").settings
    assert "hidden" not in repr(settings)
    assert settings.model.secrets() == ("hidden-2", "hidden-1")


def test_values_are_marked_as_secret_if_their_names_say_so(home: Path) -> None:
    toml = """
        model.extra_body = { reasoning = { effort = "high", api_key = "hidden-1" }, access_token = "hidden-2", n = 1 }
        providers.openai.extra_body = { secret = "hidden-3" }
        share.command = ["gh", "--token=hidden-4"]
        """
    values = load(home, toml).values()
    assert "hidden" not in str(values)
    assert values["model.extra_body"] == {
        "reasoning": {"effort": "high", "api_key": SecretStr("hidden-1")},
        "access_token": SecretStr("hidden-2"),
        "n": 1,
    }
    assert values["share.command"] == ("gh", SecretStr("--token=hidden-4"))


def test_a_wrong_encoding_an_unreadable_file_and_a_missing_file_are_named(home: Path) -> None:
    file = home / "config.toml"
    file.write_bytes(b"\xff")
    assert problem(home) == f"{file}: byte 0 is not UTF-8; save the file as UTF-8"
    file.unlink()
    file.mkdir()
    assert problem(home).startswith(f"{file}: cannot be read: ")
    elsewhere = home / "other.toml"
    assert problem(home, CROW_CONFIG=str(elsewhere)).startswith(f"environment CROW_CONFIG: {elsewhere} does not exist")
    elsewhere.write_text('model.name = "x"')
    loaded = load(home, CROW_CONFIG=str(elsewhere))
    assert (loaded.settings.model.name, loaded.sources["model.name"]) == ("x", "other.toml")


def test_the_key_comes_from_the_variable_named_in_the_file(home: Path) -> None:
    toml = '[model]\napi_key_env = "OTHER_KEY"'
    loaded = load(home, toml, OTHER_KEY=" other \n", OPENAI_API_KEY="wrong")
    assert loaded.settings.model.secrets() == ("other",)
    assert loaded.sources["model.api_key"] == "environment OTHER_KEY"
    assert load(home, toml, OPENAI_API_KEY="wrong").settings.model.api_key is None


def test_the_key_in_the_file_is_not_sent_to_another_endpoint(home: Path) -> None:
    toml = '[model]\nbase_url = "https://one/v1"\napi_key = "k"\nheaders = { A = "h" }'
    assert load(home, toml).settings.model.secrets() == ("k", "h")
    assert load(home, toml, OPENAI_BASE_URL="https://one/v1/").settings.model.secrets() == ("k", "h")
    assert load(home, toml, OPENAI_BASE_URL="https://two/v1").settings.model.secrets() == ()
    assert load(home, toml, {"model.base_url": "https://two/v1"}, OPENAI_API_KEY="e").settings.model.secrets() == ("e",)


def test_sizes_and_prices_in_the_file_do_not_apply_to_another_model(home: Path) -> None:
    toml = '[model]\nname = "a"\ncontext_window = 9000\ninput_price = 1.5\nheaders = { A = "h" }'
    assert load(home, toml, CROW_MODEL="a").settings.model.context_window == 9000
    other = load(home, toml, CROW_MODEL="b").settings.model
    assert (other.name, other.context_window, other.input_price, other.headers) == ("b", None, None, {"A": "h"})


def test_with_name_keeps_the_endpoint_and_unsets_the_model_options(home: Path) -> None:
    toml = '[model]\nname = "a"\nbase_url = "http://h/v1/"\napi_key = "k"\ncontext_window = 9000\ntakes_images = false'
    model = load(home, toml).settings.model
    assert model.with_name("a") is model
    other = model.with_name("b")
    assert (other.name, other.base_url, other.secrets()) == ("b", "http://h/v1", ("k",))
    assert (other.context_window, other.takes_images) == (None, True)


def test_the_summary_prompt_is_read_relative_to_the_settings_file(home: Path) -> None:
    (home / "summary.md").write_text("Sum up in {words} words.", "utf-8")
    assert load(home, 'compaction.prompt_file = "summary.md"').summary_prompt == "Sum up in {words} words."
    assert load(home, f'compaction.prompt_file = "{home / "summary.md"}"').summary_prompt == "Sum up in {words} words."


def test_a_missing_or_empty_summary_prompt_is_named(home: Path) -> None:
    assert problem(home, 'compaction.prompt_file = "nowhere.md"') == (
        f'{home / "config.toml"}: compaction.prompt_file is "nowhere.md" (No such file or directory); '
        "expected the path of a readable UTF-8 text file"
    )
    (home / "summary.md").write_text(" \n", "utf-8")
    assert problem(home, 'compaction.prompt_file = "summary.md"') == (
        f'{home / "config.toml"}: compaction.prompt_file is "summary.md" (it is empty); '
        "expected the path of a readable UTF-8 text file"
    )


@pytest.mark.parametrize(
    ("toml", "key"),
    [
        ('models = {"" = {"" = ""}}', 'models."".""'),
        ('[mcp_servers.x]\ncommand = "x"\n"" = 1', 'mcp_servers.x.""'),
        ('[[hooks]]\n"" = 1', 'hooks[1].""'),
        ('"" = 1', '""'),
    ],
)
def test_an_empty_key_is_named_as_toml_writes_it(home: Path, toml: str, key: str) -> None:
    assert f"there is no setting {key}; expected one of " in problem(home, toml)


def test_everything_is_below_crow_home_which_is_made_absolute(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    paths = load_settings({}, {"CROW_HOME": "here"}).paths
    here = home / "here"
    assert (paths.config_file, paths.data_dir, paths.database, paths.log_file) == (
        here / "config.toml",
        here,
        here / "crow.db",
        here / "crow.log",
    )
    assert not here.exists()


def test_without_crow_home_the_directories_of_the_platform_are_used(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(home))
    paths = load_settings({}, os.environ | {"CROW_HOME": ""}).paths
    assert {paths.config_file.name, paths.database.name, paths.log_file.name} == {"config.toml", "crow.db", "crow.log"}
    assert all(home in path.parents for path in (paths.config_file, paths.database, paths.log_file))
    assert list(home.iterdir()) == []


def test_without_a_home_a_private_directory_is_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(home))
    own = home / f"crow-{os.getuid()}"
    for _ in range(2):
        paths = load_settings({}, {"HOME": ""}).paths
        assert paths.config_file == own / "config.toml"
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o777)  # as somebody else might have made it
    (own / "config.toml").write_text('model.base_url = "http://theirs/v1"')
    loaded = load_settings({}, {"HOME": ""})
    assert loaded.paths.data_dir != own
    assert loaded.settings == Settings()
    shutil.rmtree(own)
    own.write_text("somebody else's file")
    assert load_settings({}, {"HOME": ""}).paths.data_dir.is_dir()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
    st.sampled_from(sorted(setting_keys())),
)
def test_any_value_of_any_setting_is_accepted_or_named_in_the_error(
    tmp_path_factory: pytest.TempPathFactory, value: object, key: str
) -> None:
    home = tmp_path_factory.mktemp("home", numbered=True)
    toml = _toml(value)
    loaded = load(home, f"{key} = {toml}")
    assert loaded.problem is None or key in str(loaded.problem) or "not valid TOML" in str(loaded.problem)


def _toml(value: object) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(name)} = {_toml(inner)}" for name, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case None:
            return '""'
        case float():
            return repr(value)
        case _:
            return json.dumps(value)


def test_the_headers_for_a_collector_are_hidden(home: Path) -> None:
    headers = "x-team=nest-token%3D1,short=1,Authorization=Bearer%20egg-token"
    keys = load(home, OTEL_EXPORTER_OTLP_HEADERS=headers, OTEL_EXPORTER_OTLP_TRACES_HEADERS="a=b").keys
    assert {"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"} <= keys.variables
    assert set(keys.values) == {"nest-token=1", "egg-token"}, "what is too short would be masked everywhere"


def test_the_keys_of_all_endpoints_are_known_even_if_unused(home: Path) -> None:
    toml = """
        model = { base_url = "http://file/v1", api_key_env = "NEST_KEY", api_key = "in-file" }
        [providers.openrouter]
        models = ["m"]
        [providers.work]
        base_url = "http://office/v1"
        api_key_env = "WORK_KEY"
        api_key = "for-work"
        """
    loaded = load(
        home, toml, NEST_KEY="nest", WORK_KEY="work", XAI_API_KEY=" x ", OPENAI_BASE_URL="http://elsewhere/v1"
    )
    assert loaded.settings.model.api_key is None, "the key of the file is for the endpoint of the file"
    assert {"NEST_KEY", "WORK_KEY", "OPENAI_API_KEY", "OPENROUTER_API_KEY", "XAI_API_KEY"} <= loaded.keys.variables
    assert set(loaded.keys.values) == {"in-file", "for-work", "nest", "work", "x"}
    assert "for-work" not in repr(loaded)
    broken = load(home, "model = 3", XAI_API_KEY="x")
    assert broken.problem is not None
    assert "XAI_API_KEY" in broken.keys.variables


def test_secrets_in_headers_and_of_servers_are_known(home: Path) -> None:
    toml = """
        [model]
        headers = { X-Api-Key = "key-in-header", X-Title = "crow at work", Cookie = "a=one; b=two" }
        [providers.work]
        base_url = "http://office/v1"
        headers = { Proxy-Authorization = "Basic dXNlcjpwYXNz" }
        [mcp_servers.web]
        url = "http://web/mcp"
        headers = { Authorization = "Bearer ${TOKEN}", Accept = "application/json" }
        [mcp_servers.docs]
        command = "docs"
        env = { API_TOKEN = "${TOKEN}-2", PASSWORD = "two words", KEY_FILE = "/etc/key", ROOT = "${workspace}" }
        """
    keys = load(home, toml, TOKEN="t0").keys
    assert keys.values == ("key-in-header", "a=one; b=two", "dXNlcjpwYXNz")
    assert keys.others == ("t0", "t0-2", "two words")


def test_a_credential_is_shown_without_its_value_and_its_variable_is_kept(home: Path) -> None:
    toml = '[credentials."git.test:8443"]\ntoken_env = "MINE"\nuser = "dev"\naccess = "read"'
    loaded = load(home, toml, MINE="the-value")
    assert {key: value for key, value in loaded.values().items() if key.startswith("credentials")} == {
        'credentials."git.test:8443".token_env': "MINE",
        'credentials."git.test:8443".user': "dev",
        'credentials."git.test:8443".access': "read",
    }
    assert loaded.keys.others == ("the-value",)
    assert "the-value" not in repr(loaded)
    keys = hidden_keys(loaded)
    assert keys.withholds("MINE", "the-value")
    assert replace(keys, passed=("MINE",)).withholds("MINE", "the-value")
    assert not keys.hides("MINE", "the-value"), "the user's own programs may have it"


@pytest.mark.parametrize(("lines", "expected"), [
    ('token_env = "MINE"', "Bearer the-value"),
    ('token_env = "MINE"\nuser = "dev"', "Basic ZGV2OnRoZS12YWx1ZQ=="),
    ('token_env = "MINE"\nheader = "X-Api-Key"', "the-value"),
    ('token_command = ["/bin/echo", "token the-value"]', "token the-value"),
])  # fmt: skip
def test_the_forms_of_a_credential(home: Path, monkeypatch: pytest.MonkeyPatch, lines: str, expected: str) -> None:
    monkeypatch.setenv("MINE", "the-value")
    settings = load(home, f'[credentials."a.test"]\n{lines}').settings.credentials["a.test"]
    assert read_credential("a.test", settings, None)[1] == expected


@pytest.mark.parametrize(("lines", "words"), [
    ("from_git = true", "there is no git that crow can trust"),
    ('token_env = "UNSET"', "the environment variable UNSET is not set"),
    ('token_env = "LINES"', "the secret from LINES is not one line of plain ASCII"),
    ('token_command = ["/bin/true"]', "token_command printed nothing"),
    ('token_command = ["/nowhere"]', "there is no program /nowhere"),
])  # fmt: skip
def test_what_is_no_credential_is_named(home: Path, monkeypatch: pytest.MonkeyPatch, lines: str, words: str) -> None:
    monkeypatch.setenv("LINES", "a\nX: b")
    settings = load(home, f'[credentials."a.test"]\n{lines}').settings.credentials["a.test"]
    with pytest.raises(ConfigError) as raised:
        read_credential("a.test", settings, None)
    assert str(raised.value) == words


# the database

URL = "postgresql://me:se%40cret%21@db.example:5433/team?sslmode=require&sslpassword=also-secret"


@pytest.mark.parametrize("place", ["file", "environment"])
def test_the_passwords_of_the_database_are_secrets(home: Path, place: str) -> None:
    is_file = place == "file"
    loaded = load(home, f'database.url = "{URL}"' if is_file else "", CROW_DATABASE_URL="" if is_file else URL)
    assert loaded.settings.database.url is not None
    assert loaded.settings.database.url.get_secret_value() == URL
    hidden = {URL, "se%40cret%21", "se@cret!", "also-secret"}
    assert set(loaded.settings.secrets()) == set(loaded.keys.values) == hidden
    assert "CROW_DATABASE_URL" in loaded.keys.variables
    shown = loaded.values()["database.url"]
    assert shown == "postgresql://me:…@db.example:5433/team?sslmode=require&sslpassword=…"
    assert not any(secret in repr(loaded) for secret in hidden)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://db/team", "postgresql://db/team"),
        ("postgres://me@db/team", "postgres://me@db/team"),
        ("postgresql:///team?host=/run/pg", "postgresql:///team?host=/run/pg"),
        ("postgresql://me:a/b?c#d@e@db/team", "postgresql://me:…@db/team"),
        ("postgresql://db/team?PASSWORD=secret&a=b", "postgresql://db/team?PASSWORD=…&a=b"),
        ("postgresql://db/team?user=me&password=p@ss", "postgresql://db/team?user=me&password=…"),
        ("postgresql://me:pw@db/team?password=p@ss", "postgresql://me:…@db/team?password=…"),
        ("postgresql://me:p@a/b@db/team?application_name=a@b", "postgresql://me:…@db/team?application_name=a@b"),
        ("postgresql://me:a?b=c@db/team", "postgresql://me:…@db/team"),
        ("postgresql://db:5432/team?password=p@ss&user=me", "postgresql://db:…&user=me"),
    ],
)
def test_the_url_of_a_database_is_shown_without_passwords(home: Path, url: str, shown: str) -> None:
    assert load(home, CROW_DATABASE_URL=url).values()["database.url"] == shown


def test_a_password_with_an_at_sign_among_the_options_is_secret() -> None:
    assert database_passwords("postgresql://db/team?user=me&password=p%40s@s") == ("p%40s@s", "p@s@s")
    assert database_passwords("postgresql://me:a@b@db/team?password=p@ss&x=@") == ("a@b", "p@ss")


@given(st.text("ab:/?#&=@%5432 "), st.text("ab:/?@ "))
def test_no_password_of_a_database_is_shown(user: str, password: str) -> None:
    hidden = f"<{password}>"
    for url in (f"postgresql://{user}?x=1&password={hidden}", f"postgresql://me:{hidden}@db/team?password={hidden}"):
        settings = DatabaseSettings.model_validate({"url": SecretStr(url)})
        assert {"<", ">"}.isdisjoint(str(settings.shown()["url"]))
        assert hidden in settings.secrets()


def all_tables(kind: type[Section] = Section) -> Iterator[type[Section]]:
    for each in kind.__subclasses__():
        yield each
        yield from all_tables(each)


@pytest.mark.parametrize("table", dict.fromkeys(all_tables()))
def test_each_setting_says_what_is_expected(table: type[Section]) -> None:
    for name, setting in table.model_fields.items():
        is_table = isinstance(setting.annotation, type) and issubclass(setting.annotation, Section)
        assert is_table or expectation(setting), name


def test_an_empty_user_of_a_credential_is_refused_with_words(home: Path) -> None:
    toml = '[credentials."github.com"]\ntoken_env = "T"\nuser = ""'
    assert 'credentials."github.com".user is ""; expected a user name, such as' in problem(home, toml)


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("key", [key for key in setting_keys() if "float" in str(annotation(key))])
def test_no_number_is_infinite(home: Path, key: str, value: str) -> None:
    shown = {"inf": "Infinity", "nan": "NaN"}[value]
    assert f"{key} is {shown}; expected" in problem(home, f"{key} = {value}")


@pytest.mark.parametrize("port", ["99999", "0", "x", "-1"])
def test_a_url_with_an_impossible_port_is_refused(home: Path, port: str) -> None:
    assert "model.base_url is " in problem(home, f'model.base_url = "http://localhost:{port}/v1"')


def test_an_empty_key_is_refused_unless_the_environment_has_one(home: Path) -> None:
    assert "model.api_key is <hidden" in problem(home, 'model.api_key = ""')
    assert load(home, 'model.api_key = ""', OPENAI_API_KEY="k").problem is None


@pytest.mark.parametrize("value", ["mysql://me:sk-secret@db/team", "team.db?sk-secret", "postgresql:sk-secret"])
def test_a_database_url_with_another_scheme_is_refused_without_showing_it(home: Path, value: str) -> None:
    loaded = load(home, CROW_DATABASE_URL=value)
    words = str(loaded.problem)
    assert words.startswith(
        "environment CROW_DATABASE_URL: database.url is <hidden: it may be a secret>; expected the URL"
    )
    assert "sk-secret" not in words
    assert "sk-secret" not in str(load(home, f'database.direct_url = "{value}"').problem)


def test_a_mistake_elsewhere_does_not_change_where_sessions_are_stored(home: Path) -> None:
    loaded = load(home, f'model.name = 1\ndatabase.url = "{URL}"')
    assert loaded.problem is not None
    assert loaded.settings.database.url is not None
    assert loaded.settings.database.url.get_secret_value() == URL


def test_the_variable_with_the_password_is_hidden_if_the_url_has_none(home: Path) -> None:
    loaded = load(home, CROW_DATABASE_URL="postgresql://me@db/team", PGPASSWORD="sk-secret")
    assert ("PGPASSWORD" in loaded.keys.variables, "sk-secret" in loaded.keys.values) == (True, True)
    assert "PGPASSWORD" not in load(home, CROW_DATABASE_URL=URL).keys.variables
    assert "PGPASSWORD" not in load(home).keys.variables


@pytest.mark.parametrize(
    ("toml", "threshold", "window"),
    [
        ("threshold = 0.6", 0.6, None),
        ('threshold = "60%"\nwindow = "12.5%"', 0.6, 0.125),
        ("threshold = 100_000\nwindow = 200_000", 100_000, 200_000),
        ("window = 1", 0.85, 1.0),
    ],
)
def test_threshold_and_window_are_shares_or_tokens(
    home: Path, toml: str, threshold: float, window: float | None
) -> None:
    compaction = load(home, f"[compaction]\n{toml}").settings.compaction
    assert (compaction.threshold, compaction.window) == (threshold, window)
    assert (type(compaction.threshold), type(compaction.window)) == (type(threshold), type(window))


def test_the_database_may_have_a_place_of_its_own(home: Path) -> None:
    assert load(home, '[store]\npath = "/srv/crow/all.db"').paths.database == Path("/srv/crow/all.db")
    loaded = load(home, '[store]\npath = "../other/all.db"')
    assert loaded.paths.database == loaded.paths.config_file.parent.parent / "other" / "all.db"
    broken = load(home, '[store]\npath = "/srv/crow/all.db"\n[model]\nname = 3')
    assert broken.problem is not None
    assert broken.paths.database == Path("/srv/crow/all.db")
