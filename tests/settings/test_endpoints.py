"""Providers and named models, and the endpoint that each model name means."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from crow.adapters import endpoint_of
from crow.domain.errors import ArgumentError, AuthError, ConfigError
from crow.llm.dialect import Dialect
from crow.llm.endpoint import Endpoint, EndpointTimeouts
from crow.settings import Loaded, Settings, edit_tool_of, load_settings, names_offered, target_of
from crow.settings.endpoints import (
    PRESETS,
    ApiType,
    Gateway,
    Gateways,
    Preset,
    messages_url_at,
    preset_at,
    provider_target,
    run_key_command,
    url_named,
    wires_at,
)

FILE = """
[model]
name = "small"
base_url = "http://localhost:11434/v1"
context_window = 9000

[providers.openrouter]
models = ["anthropic/claude-x"]
headers = { X-Title = "crow" }
idle_timeout_s = 20

[providers.work]
base_url = "https://models.example/v1/"
api_key_command = ["print-key"]
connect_timeout_s = 5
proxy = "http://proxy.example:3128"
ca_file = "/etc/work.pem"
extra_body = { user = "me" }

[models."work/large"]
name = "large-2026"
context_window = 64000
max_output_tokens = 4000
thought_level = "high"
takes_images = false
input_price = 1.0
output_price = 4.0
extra_body = { temperature = 0.1 }

[models.cheap]
provider = "openrouter"
name = "some/model"
"""


def load(home: Path, toml: str, **env: str) -> Loaded:
    (home / "config.toml").write_text(toml, "utf-8")
    return load_settings({}, {"CROW_HOME": str(home), **env})


def endpoint(home: Path, name: str, toml: str = FILE, **env: str) -> Endpoint:
    loaded = load(home, toml, **env)
    assert loaded.problem is None, loaded.problem
    return endpoint_of(target_of(name, loaded.settings))


def problem(home: Path, toml: str) -> str:
    return str(load(home, toml).problem).removeprefix(f"{home / 'config.toml'}: ")


def test_offered_names_are_those_in_the_file_with_the_default_first(tmp_path: Path) -> None:
    assert names_offered(load(tmp_path, FILE).settings) == (
        "small",
        "work/large",
        "cheap",
        "openrouter/anthropic/claude-x",
    )


def test_the_options_in_model_belong_to_the_default_model_also_of_another_provider(tmp_path: Path) -> None:
    default = '[model]\nname = "openrouter/some"\nthought_level = "high"\ncontext_window = 9000\n'
    file = f'{default}wire = "messages"\n[providers.openrouter]\n'
    found = [endpoint(tmp_path, name, file) for name in ("openrouter/some", "openrouter/other")]
    assert [(each.model, each.thought_level, each.context_window) for each in found] == [
        ("some", "high", 9000),
        ("other", None, None),
    ]
    assert [each.dialect.wire for each in found] == ["messages", "chat"]


@pytest.mark.parametrize(
    ("name", "edit_tool"),
    [
        *((name, "apply_patch") for name in ("gpt-5.2", "openai/gpt-5-mini", "gpt-4.1-nano", "o3", "o4-mini", "GPT-6")),
        *((name, "apply_patch") for name in ("gpt-oss:20b", "openai/gpt-oss-120b", "gpt-5-codex", "codex-mini-latest")),
        *((name, "edit_file") for name in ("gpt-4o", "gpt-4", "gpt-3.5-turbo", "o1", "claude-opus-5", "qwen3-coder")),
        *((name, "edit_file") for name in ("glm-4.7", "foo3", "offline", "phi-4", "minigpt-50m", "o365")),
    ],
)
def test_models_that_are_trained_on_patches_get_apply_patch(tmp_path: Path, name: str, edit_tool: str) -> None:
    assert edit_tool_of(name, load(tmp_path, f'[model]\nname = "{name}"').settings) == edit_tool


def test_a_setting_names_the_edit_tool_of_a_model(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        '[model]\nname = "gpt-5"\nedit_tool = "edit_file"\n[models.mine]\nname = "x"\nedit_tool = "apply_patch"\n'
        '[models.alias]\nname = "o3"\n',
    ).settings
    assert [edit_tool_of(name, settings) for name in ("gpt-5", "mine", "alias", "gpt-5-mini")] == [
        *("edit_file", "apply_patch", "apply_patch", "apply_patch")
    ]
    assert 'expected "edit_file" or "apply_patch"' in problem(tmp_path, '[model]\nedit_tool = "sed"')


def test_a_provider_and_a_named_model_make_one_endpoint(tmp_path: Path) -> None:
    assert endpoint(tmp_path, "work/large") == Endpoint(
        base_url="https://models.example/v1",
        model="large-2026",
        api_key="pending",
        key_hint="Set providers.work.api_key_env or providers.work.api_key_command",
        context_window=64000,
        max_output_tokens=4000,
        dialect=Dialect(takes_images=False, marks_failures=True, wires=("chat", "responses", "messages")),
        input_price=1.0,
        output_price=4.0,
        timeouts=EndpointTimeouts(connect_s=5.0),
        extra_body={"user": "me", "temperature": 0.1},
        thought_level="high",
        proxy="http://proxy.example:3128",
        ca_file="/etc/work.pem",
    )


def test_a_preset_fills_in_the_url_and_the_variable_of_the_key(tmp_path: Path) -> None:
    made = endpoint(tmp_path, "openrouter/anthropic/claude-x", OPENROUTER_API_KEY="sk-or-1")
    assert (made.base_url, made.model, made.api_key) == (
        "https://openrouter.ai/api/v1",
        "anthropic/claude-x",
        "sk-or-1",
    )
    assert (made.dialect.thinking, made.dialect.cache, made.headers) == ("reasoning", "marker", (("X-Title", "crow"),))
    assert made.timeouts == EndpointTimeouts(idle_s=20.0)
    cheap = endpoint(tmp_path, "cheap")
    assert (cheap.base_url, cheap.model) == ("https://openrouter.ai/api/v1", "some/model")
    with pytest.raises(AuthError, match="OPENROUTER_API_KEY"):
        cheap.check()
    # The variable of a preset applies to the provider of its name only, so another provider is not told to set it.
    toml = '[providers.mine]\nbase_url = "https://api.openai.com/v1"'
    with pytest.raises(AuthError, match=r"Set providers\.mine\.api_key_env or providers\.mine\.api_key_command"):
        endpoint(tmp_path, "mine/gpt", toml, OPENAI_API_KEY="sk-unused").check()


def test_any_other_name_is_a_model_of_the_default_endpoint(tmp_path: Path) -> None:
    small, other = endpoint(tmp_path, "small"), endpoint(tmp_path, "library/other:7b")
    assert (small.base_url, small.model, small.context_window) == ("http://localhost:11434/v1", "small", 9000)
    assert (other.base_url, other.model, other.context_window) == (
        "http://localhost:11434/v1",
        "library/other:7b",
        None,
    )
    named = 'model.name = "openai/gpt"\nmodel.base_url = "https://openrouter.ai/api/v1"\n[providers.openai]'
    assert endpoint(tmp_path, "openai/gpt", named).base_url == "https://openrouter.ai/api/v1"
    assert endpoint(tmp_path, "openai/other", named).base_url == "https://api.openai.com/v1"


def test_every_value_of_a_named_table_has_its_source(tmp_path: Path) -> None:
    loaded = load(tmp_path, FILE, OPENROUTER_API_KEY="sk-or-1")
    sources = {key: source for key, source in loaded.sources.items() if key.startswith("providers.openrouter")}
    assert sources == {
        "providers.openrouter.models": "config.toml",
        "providers.openrouter.headers": "config.toml",
        "providers.openrouter.idle_timeout_s": "config.toml",
        "providers.openrouter.api_key": "environment OPENROUTER_API_KEY",
    }
    assert loaded.values()['models."work/large".name'] == "large-2026"
    assert "sk-or-1" in loaded.settings.secrets()
    assert "sk-or-1" not in repr(loaded)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[providers.mine]\n", "providers.mine has no base_url; set one, or use the name of a preset: openai, "),
        ("[providers.openai]\nbase_ulr = 1", "there is no setting providers.openai.base_ulr; did you mean "),
        ('[providers.openai]\nproxy = "x"', 'providers.openai.proxy is "x"; expected an http or https URL'),
        (
            "[providers.openai]\nidle_timeout_s = 0",
            "providers.openai.idle_timeout_s is 0; expected a number of seconds",
        ),
        (
            "[providers.openai]\napi_key = 7",
            "providers.openai.api_key is <hidden: it may be a secret>; expected the key",
        ),
        ('[providers.openai]\napi_key_command = "x"', 'providers.openai.api_key_command is "x"; expected a command as'),
        ("providers = 3", "providers is 3; expected tables: [providers.NAME]"),
        ("providers.openai = 3", "providers.openai is 3; expected a table: [providers.openai]"),
        (
            '[models."a/b"]\nthought_level = "x"',
            'models."a/b".thought_level is "x"; expected "off", "low", "medium" or',
        ),
        ('[models.a]\nprovider = "gone"', 'models.a.provider is "gone"; add [providers.gone]'),
        ("[models.a]\ncontext_window = 10", "models.a.context_window is 10; expected a whole number of tokens"),
    ],
)
def test_an_error_in_a_named_table_names_the_table_the_key_and_the_value(tmp_path: Path, toml: str, words: str) -> None:
    assert problem(tmp_path, toml).startswith(words)


def test_a_key_command_prints_the_key_or_fails_with_its_reason() -> None:
    python = sys.executable
    assert run_key_command([python, "-c", "print('sk-1\\nmore')"]) == "sk-1"
    with pytest.raises(ConfigError, match="ended with code 3: no such entry"):
        run_key_command([python, "-c", "import sys; print('no such entry', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(ConfigError, match="printed no key"):
        run_key_command([python, "-c", ""])
    with pytest.raises(ConfigError, match="cannot be started: No such file"):
        run_key_command(["/nowhere/at-all"])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_found_by_the_host_of_its_url(name: str) -> None:
    preset = PRESETS[name]
    assert urlsplit(preset_at(preset.base_url).base_url).hostname == urlsplit(preset.base_url).hostname
    assert preset_at("https://unknown.example/v1") == Preset()


def test_a_gateway_replaces_address_key_and_headers_of_its_provider_only(tmp_path: Path) -> None:
    table = '[providers."a/b"]\nbase_url = "https://ab.example.com/v1"\napi_key = "sk-ab"\nproxy = "http://proxy:1"\n'
    settings = load(tmp_path, f'{table}headers = {{ "X-Own" = "own" }}\n[models.m]\nprovider = "a/b"\n').settings
    gateways = Gateways()
    assert gateways.route(target_of("m", settings)) == target_of("m", settings)
    gateway = Gateway(base_url="https://gw.example.com/v1/", headers={"authorization": "Bearer t"})
    gateways.set("a/b", gateway, settings)
    routed = endpoint_of(gateways.route(target_of("m", settings)))
    assert (routed.base_url, routed.api_key, routed.proxy) == ("https://gw.example.com/v1", None, "http://proxy:1")
    assert routed.headers == (("authorization", "Bearer t"),)
    routed.check()
    assert gateways.route(provider_target("a/b", settings)).base_url == "https://gw.example.com/v1"
    assert gateways.route(provider_target(None, settings)) == target_of("", settings)
    gateways.set("a/b", Gateway(base_url="https://gw.example.com/v1"), settings)
    assert not endpoint_of(gateways.route(target_of("m", settings))).sends_authorization
    gateways.disable("a/b", settings)
    assert gateways.current(settings) == {"main": ("openai", "https://api.openai.com/v1"), "a/b": None}
    with pytest.raises(ConfigError, match='The editor has disabled the provider "a/b"'):
        gateways.route(target_of("m", settings))
    with pytest.raises(ArgumentError, match='providerId "b" is unknown; expected main, a/b'):
        gateways.set("b", Gateway(base_url="https://gw.example.com/v1"), settings)


@pytest.mark.parametrize(
    ("base_url", "model", "wires"),
    [
        ("https://api.openai.com/v1", "gpt-x", ("responses", "chat")),
        ("https://nest.openai.azure.com/openai/v1", "gpt-x", ("responses", "chat")),
        ("https://api.x.ai/v1", "grok-x", ("responses", "chat")),
        ("https://api.anthropic.com/v1", "claude-x", ("messages", "chat")),
        ("https://generativelanguage.googleapis.com/v1beta/openai", "gemini-x", ("chat",)),
        ("https://openrouter.ai/api/v1", "anthropic/claude-x", ("chat", "responses", "messages")),
        ("https://bedrock-mantle.eu-west-1.api.aws/v1", "openai.gpt-oss-120b", ("responses", "chat", "messages")),
        ("https://bedrock-mantle.eu-west-1.api.aws/v1", "anthropic.claude-x", ("messages", "responses", "chat")),
        ("https://bedrock-runtime.eu-west-1.amazonaws.com/openai/v1", "gpt-x", ("responses", "chat", "messages")),
        ("https://us-east1-aiplatform.googleapis.com/v1/projects/p/endpoints/openapi", "google/x", ("chat",)),
        # Anybody can run a server on a machine of Amazon.
        ("https://ec2-1.eu-west-1.compute.amazonaws.com/v1", "qwen", ("chat", "responses", "messages")),
        ("https://aiplatform.googleapis.com/v1/projects/p/locations/global/endpoints/openapi", "google/x", ("chat",)),
        ("https://api.deepseek.com/anthropic/v1", "deepseek-x", ("messages", "chat", "responses")),
        ("http://localhost:4000/v1", "claude-x", ("messages", "chat", "responses")),
        ("http://localhost:8080/v1", "qwen", ("chat", "responses", "messages")),
    ],
)
def test_the_host_the_path_and_the_model_tell_which_apis_to_try(
    base_url: str, model: str, wires: tuple[str, ...]
) -> None:
    assert wires_at(base_url, model) == wires


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if not preset.base_url])
def test_the_url_pattern_of_a_preset_is_recognised(name: str) -> None:
    preset = PRESETS[name]
    url = preset.url_pattern.replace("RESOURCE", "nest").replace("REGION", "eu-west-1").replace("PROJECT", "p")
    assert preset_at(url) == preset
    assert wires_at(url, "gpt-x") == preset.wires


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("https://bedrock-mantle.eu-west-1.api.aws/v1", "https://bedrock-mantle.eu-west-1.api.aws/anthropic/v1"),
        ("https://bedrock-mantle.eu-west-1.api.aws/openai/v1", "https://bedrock-mantle.eu-west-1.api.aws/anthropic/v1"),
        ("https://api.anthropic.com/v1", ""),
        ("http://localhost:4000/v1", ""),
    ],
)
def test_bedrock_serves_the_messages_api_below_a_path_of_its_own(base_url: str, url: str) -> None:
    assert messages_url_at(base_url) == url


def test_a_wire_in_the_settings_is_the_only_one(tmp_path: Path) -> None:
    toml = (
        '[model]\nname = "a"\nbase_url = "http://127.0.0.1:1/v1"\nwire = "responses"\n'
        '[providers.p]\nbase_url = "http://127.0.0.1:2/v1"\nwire = "messages"\nmodels = ["b"]\n'
        '[models.c]\nprovider = "p"\nname = "c"\nwire = "auto"\n'
    )
    wires = {name: endpoint(tmp_path, name, toml).dialect.wires for name in ("a", "other", "p/b", "c")}
    assert wires == {
        "a": ("responses",),
        "other": ("responses",),
        "p/b": ("messages",),
        "c": ("chat", "responses", "messages"),
    }


def test_a_wire_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    assert problem(tmp_path, '[model]\nwire = "soap"\n') == (
        'model.wire is "soap"; expected "auto", "chat", "responses" or "messages"'
    )


def test_the_name_of_a_preset_stands_for_its_url() -> None:
    assert [url_named(name) for name in ("Anthropic", "azure", "http://x/v1")] == [
        "https://api.anthropic.com/v1",
        "azure",
        "http://x/v1",
    ]


@pytest.mark.parametrize(
    ("api_type", "url", "used"),
    [
        ("anthropic", "https://gw.example.com", "https://gw.example.com/v1"),
        ("anthropic", "https://gw.example.com/claude/v1/", "https://gw.example.com/claude/v1"),
        ("azure", "https://r.openai.azure.com", "https://r.openai.azure.com/openai/v1"),
        ("openai", "https://gw.example.com", "https://gw.example.com"),
    ],
)
def test_a_gateway_has_the_url_that_its_kind_of_endpoint_needs(api_type: ApiType, url: str, used: str) -> None:
    gateways, settings = Gateways(), Settings()
    gateways.set("main", Gateway(base_url=url, api_type=api_type), settings)
    assert gateways.route(provider_target(None, settings)).base_url == used
    assert gateways.current(settings)["main"] == (api_type, url.rstrip("/"))


def test_models_of_known_endpoints_and_claude_get_files_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    files = {"claude-x": True, "other": False, "told": True, "none": False}
    tables = '[models."claude-x"]\nprovider = "gw"\n[models.other]\nprovider = "gw"\n[models.told]\nprovider = "gw"\n'
    more = 'takes_files = true\n[models.none]\ntakes_files = false\nprovider = "gw"\n'
    more += '[providers.gw]\nbase_url = "https://gw.example.com/v1"\n'
    found = {name: endpoint(tmp_path, name, tables + more).dialect.takes_files for name in ("m", *files)}
    assert found == {"m": True, **files}
