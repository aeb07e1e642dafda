"""A key that a command prints, such as that of a password manager. The only process that settings start."""

from __future__ import annotations

import difflib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import SecretStr, ValidationError

from crow.domain.errors import ConfigError
from crow.settings.values import (
    Expected,
    LimitSettings,
    ModelSettings,
    NamedModel,
    ProviderSettings,
    Section,
    Settings,
    SettingValue,
    all_metadata,
    shown,
    shown_key,
)

__all__ = [
    "PRESETS",
    "Named",
    "Preset",
    "SourcedValue",
    "Target",
    "key_from",
    "names_offered",
    "preset_at",
    "read_named",
    "target_of",
]

_LONGEST_S = 30.0


def key_from(command: Sequence[str]) -> str:
    """The first line that `command` prints. Blocks until it ends. :raises ConfigError: it fails or prints none."""
    shown = " ".join(command)
    try:
        done = subprocess.run(  # noqa: S603  the user's own file names it
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"api_key_command `{shown}` did not end within {_LONGEST_S:g} s.") from None
    except OSError as error:
        raise ConfigError(f"api_key_command `{shown}` cannot be started: {error.strerror or error}.") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ConfigError(
            f"api_key_command `{shown}` ended with code {done.returncode}: {said[-1] if said else 'it said nothing'}"
        )
    lines = done.stdout.decode("utf-8", "replace").split()
    if not lines:
        raise ConfigError(f"api_key_command `{shown}` printed no key.")
    return lines[0]


# FROM settings.target: What a model name means: the endpoint to ask, the name to ask for, and everything that is set
# of both.
#
# Strategy: a table `[models.NAME]` says it; else `PROVIDER/MODEL` where there is such a provider; else it is a model
# of
# `[model]`'s endpoint. What a model's table sets is stronger than its provider's, that than the preset's. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An endpoint and a model. Times in seconds, sizes in tokens, prices in USD per million tokens.

    `key_hint` begins the sentence that says where a key is to be put; `key_command` prints one.
    """

    name: str
    base_url: str
    model: str
    key: SecretStr | None = None
    key_command: tuple[str, ...] = ()
    key_hint: str = "Set OPENAI_API_KEY"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra_body: Mapping[str, object] = field(default_factory=dict, repr=False)
    context_window: int | None = None
    max_output_tokens: int | None = None
    takes_images: bool = True
    thought_level: Literal["off", "low", "medium", "high"] | None = None
    input_price: float | None = None
    cached_price: float | None = None
    output_price: float | None = None
    connect_timeout_s: float = 15.0
    first_byte_timeout_s: float
    idle_timeout_s: float
    proxy: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    preset: Preset | None = None


def names_offered(settings: Settings) -> tuple[str, ...]:
    """The model names to choose from, the default first; empty if none is set."""
    names = [settings.model.name, *settings.models]
    for provider, table in settings.providers.items():
        names.extend(f"{provider}/{model}" for model in table.models)
    return tuple(dict.fromkeys(name for name in names if name))


def target_of(name: str, settings: Settings) -> Target:
    """Where `name` is to be asked for."""
    named = settings.models.get(name) if isinstance(settings.models, Mapping) else None
    before, slash, after = name.partition("/")
    of_provider = bool(slash) and before in settings.providers
    if (
        named is None
        and name == settings.model.name
        and settings.model.base_url != ModelSettings.model_fields["base_url"].default
    ):
        # `[model]` says where its own model is, whatever its name looks like.
        of_provider = False
    table = named or NamedModel.model_construct()
    provider = table.provider or (before if of_provider else None)
    model = table.name or (after if of_provider else name)
    if provider is not None:
        return _at_provider(name, model, table, provider, settings)
    return _at_default(name, model, named, settings)


def _at_provider(name: str, model: str, table: NamedModel, provider: str, settings: Settings) -> Target:
    there = settings.providers[provider]
    preset = PRESETS.get(provider)
    base_url = there.base_url or (preset.base_url.value if preset is not None else "")
    preset = preset_at(base_url)
    return Target(
        name=name,
        base_url=base_url,
        model=model,
        key=there.api_key,
        key_command=there.api_key_command or () if there.api_key is None else (),
        key_hint=_hint(provider, there, preset),
        headers=there.headers,
        extra_body={**there.extra_body, **table.extra_body},
        context_window=table.context_window,
        max_output_tokens=table.max_output_tokens,
        takes_images=table.takes_images,
        thought_level=table.thought_level,
        input_price=table.input_price,
        cached_price=table.cached_price,
        output_price=table.output_price,
        connect_timeout_s=there.connect_timeout_s or 15.0,
        first_byte_timeout_s=there.first_byte_timeout_s or settings.limits.first_byte_timeout_s,
        idle_timeout_s=there.idle_timeout_s or settings.limits.idle_timeout_s,
        proxy=there.proxy,
        ca_file=there.ca_file,
        preset=preset,
    )


def _at_default(name: str, model: str, table: NamedModel | None, settings: Settings) -> Target:
    limits: LimitSettings = settings.limits
    there = settings.model.named(name)
    about = there if table is None else table
    preset = preset_at(there.base_url)
    return Target(
        name=name,
        base_url=there.base_url,
        model=model,
        key=there.api_key,
        key_hint=f"Set {there.api_key_env}",
        headers=there.headers,
        extra_body=about.extra_body,
        context_window=about.context_window,
        max_output_tokens=about.max_output_tokens,
        takes_images=about.takes_images,
        thought_level=about.thought_level,
        input_price=about.input_price,
        cached_price=about.cached_price,
        output_price=about.output_price,
        first_byte_timeout_s=limits.first_byte_timeout_s,
        idle_timeout_s=limits.idle_timeout_s,
        preset=preset,
    )


def _hint(provider: str, there: ProviderSettings, preset: Preset | None) -> str:
    variable = there.api_key_env or (preset.key_env.value if preset is not None and preset.key_env else None)
    place = shown_key("providers", provider)
    return f"Set {variable}" if variable is not None else f"Set {place}.api_key_env or {place}.api_key_command"


# FROM settings.named: Reads the named tables of the user's file: `[providers.NAME]` and `[models.NAME]`.
#
# Strategy: each table is checked by itself, so that an error names the table, the key and the value; every value
# keeps
# the place it came from. A provider's key is taken from its variable here, a command is left for the first request.


Table = TypeVar("Table", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The tables by name; `given` holds every value that was given, by its dotted key (`providers.NAME.key`)."""

    providers: Mapping[str, ProviderSettings] = field(default_factory=dict)
    models: Mapping[str, NamedModel] = field(default_factory=dict)
    given: Mapping[str, SettingValue] = field(default_factory=dict)


def read_named(providers: object, models: object, file: Path, env: Mapping[str, str]) -> Named:
    """The tables under `providers` and `models`, as TOML gives them. :raises ConfigError:"""
    given: dict[str, SettingValue] = {}
    endpoints = {
        name: _with_key(name, table, env, given)
        for name, table in _tables("providers", providers, ProviderSettings, file, given).items()
    }
    for name, table in endpoints.items():
        if table.base_url is None and name not in PRESETS:
            raise ConfigError(
                f"{file}: {shown_key('providers', name)} has no base_url; set one. Without it there are the presets "
                f"{', '.join(PRESETS)}."
            )
    named = _tables("models", models, NamedModel, file, given)
    for name, model in named.items():
        if model.provider is not None and model.provider not in endpoints:
            there = f"there are {', '.join(endpoints)}" if endpoints else f"add [providers.{model.provider}]"
            raise ConfigError(
                f"{file}: {shown_key('models', name)}.provider is {shown('provider', model.provider)}; {there}"
            )
    return Named(providers=endpoints, models=named, given=given)


def _tables(
    kind: str, tables: object, table_type: type[Table], file: Path, given: dict[str, SettingValue]
) -> dict[str, Table]:
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{file}: {kind} is {shown(kind, tables)}; expected tables: [{kind}.NAME]")
    read: dict[str, Table] = {}
    for name, table in tables.items():
        place = shown_key(kind, name)
        if not isinstance(table, Mapping):
            raise ConfigError(f"{file}: {place} is {shown(name, table)}; expected a table: [{place}]")
        read[name] = _table(place, table, table_type, file)
        given.update({f"{place}.{key}": SettingValue(value, file.name, str(file)) for key, value in table.items()})
    return read


def _table(place: str, table: Mapping[str, object], table_type: type[Table], file: Path) -> Table:
    fields = table_type.model_fields
    for key in table:
        if key not in fields:
            nearest = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"did you mean {place}.{nearest[0]}?" if nearest else f"there are {', '.join(fields)}"
            raise ConfigError(f"{file}: there is no setting {place}.{key}; {hint}")
    try:
        return table_type.model_validate(dict(table))
    except ValidationError as error:
        # The error's own text shows values, secrets too.
        wrong = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors())
    lines = []
    for key in wrong:
        words = next(item.words for item in all_metadata(fields[key]) if isinstance(item, Expected))
        lines.append(f"{file}: {place}.{key} is {shown(key, table[key])}; expected {words}")
    raise ConfigError("\n".join(lines))


def _with_key(
    name: str, table: ProviderSettings, env: Mapping[str, str], given: dict[str, SettingValue]
) -> ProviderSettings:
    """The table with the key of its variable, which is stronger than one in the file."""
    preset = PRESETS.get(name)
    variable = table.api_key_env or (preset.key_env.value if preset is not None and preset.key_env else None)
    secret = env.get(variable, "").strip() if variable is not None else ""
    if not secret:
        return table
    origin, key = f"environment {variable}", SecretStr(secret)
    given[f"{shown_key('providers', name)}.api_key"] = SettingValue(key, origin, origin)
    return table.model_copy(update={"api_key": key})


# FROM settings.presets: The usual endpoints: what their makers publish of them, each value beside the page that says
# so.
#
# Strategy: data alone. A value that no page states is left out, and then crow's general behaviour holds; what the
# user's
# file says is stronger. Sizes and prices of models are not here: they change, and endpoints list them.


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SourcedValue(Generic[T]):
    """A value and the public page that states it."""

    value: T
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One endpoint. `key_env`: the variable that its pages put the key into. `thinking`: where a request says how much
    to think. `limit_field`: what the output limit is called. `cache`: prompts are cached by a key, or where a marker
    asks for it."""

    base_url: SourcedValue[str]
    key_env: SourcedValue[str] | None = None
    thinking: SourcedValue[Literal["effort", "reasoning", "switch", "switch_effort", "enable_thinking"]] | None = None
    limit_field: SourcedValue[Literal["max_tokens", "max_completion_tokens"]] | None = None
    cache: SourcedValue[Literal["key", "marker"]] | None = None


_OPENAI = "https://github.com/openai/openai-python/blob/main/README.md"
_OPENAI_CHAT = "https://github.com/openai/openai-python/blob/main/src/openai/types/chat/completion_create_params.py"
_OPENROUTER = "https://openrouter.ai/docs/quickstart"
_DEEPSEEK = "https://api-docs.deepseek.com/"
_KIMI = "https://platform.kimi.ai/docs/api/overview"
_GEMINI = "https://ai.google.dev/gemini-api/docs/openai"
_GROQ = "https://console.groq.com/docs/openai"
_XAI = "https://docs.x.ai/api/integrations"
_MISTRAL = "https://docs.mistral.ai/resources/migration-guides"
_TOGETHER = "https://docs.together.ai/docs/inference/openai-compatibility"
_FIREWORKS = "https://docs.pipecat.ai/api-reference/server/services/llm/fireworks"
_QWEN = "https://www.alibabacloud.com/help/en/model-studio/deep-thinking"

PRESETS: dict[str, Preset] = {
    "openai": Preset(
        base_url=SourcedValue("https://api.openai.com/v1", _OPENAI),
        key_env=SourcedValue("OPENAI_API_KEY", _OPENAI),
        thinking=SourcedValue("effort", _OPENAI_CHAT),
        limit_field=SourcedValue("max_completion_tokens", _OPENAI_CHAT),
        cache=SourcedValue("key", _OPENAI_CHAT),
    ),
    "openrouter": Preset(
        base_url=SourcedValue("https://openrouter.ai/api/v1", _OPENROUTER),
        key_env=SourcedValue("OPENROUTER_API_KEY", _OPENROUTER),
        thinking=SourcedValue("reasoning", "https://openrouter.ai/docs/use-cases/reasoning-tokens"),
        cache=SourcedValue("marker", "https://openrouter.ai/docs/client-sdks/python/api-reference/components/caching"),
    ),
    "deepseek": Preset(
        base_url=SourcedValue("https://api.deepseek.com", _DEEPSEEK),
        key_env=SourcedValue("DEEPSEEK_API_KEY", _DEEPSEEK),
        thinking=SourcedValue("switch_effort", _DEEPSEEK),
    ),
    "kimi": Preset(
        base_url=SourcedValue("https://api.moonshot.ai/v1", _KIMI),
        key_env=SourcedValue("MOONSHOT_API_KEY", _KIMI),
        thinking=SourcedValue("switch", _KIMI),
    ),
    "glm": Preset(
        base_url=SourcedValue("https://api.z.ai/api/paas/v4", "https://docs.z.ai/llms-full.txt"),
        key_env=SourcedValue("ZAI_API_KEY", "https://docs.openclaw.ai/providers/zai"),
        thinking=SourcedValue("switch", "https://docs.z.ai/guides/capabilities/thinking"),
    ),
    "qwen": Preset(
        base_url=SourcedValue(
            "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "https://docs.agno.com/reference/models/dashscope"
        ),
        key_env=SourcedValue("DASHSCOPE_API_KEY", "https://docs.agno.com/concepts/models/dashscope"),
        thinking=SourcedValue("enable_thinking", _QWEN),
    ),
    "gemini": Preset(
        base_url=SourcedValue("https://generativelanguage.googleapis.com/v1beta/openai", _GEMINI),
        key_env=SourcedValue("GEMINI_API_KEY", _GEMINI),
    ),
    "groq": Preset(
        base_url=SourcedValue("https://api.groq.com/openai/v1", _GROQ),
        key_env=SourcedValue("GROQ_API_KEY", _GROQ),
    ),
    "xai": Preset(
        base_url=SourcedValue("https://api.x.ai/v1", _XAI),
        key_env=SourcedValue("XAI_API_KEY", _XAI),
    ),
    "mistral": Preset(
        base_url=SourcedValue("https://api.mistral.ai/v1", _MISTRAL),
        key_env=SourcedValue(
            "MISTRAL_API_KEY", "https://developers.llamaindex.ai/python/framework-api-reference/llms/mistralai"
        ),
    ),
    "together": Preset(
        base_url=SourcedValue("https://api.together.ai/v1", _TOGETHER),
        key_env=SourcedValue("TOGETHER_API_KEY", _TOGETHER),
    ),
    "fireworks": Preset(
        base_url=SourcedValue(
            "https://api.fireworks.ai/inference/v1", "https://readme.fireworks.ai/docs/openai-compatibility"
        ),
        key_env=SourcedValue("FIREWORKS_API_KEY", _FIREWORKS),
    ),
    "ollama": Preset(
        base_url=SourcedValue("http://localhost:11434/v1", "https://docs.ollama.com/api/openai-compatibility"),
    ),
    "lmstudio": Preset(
        base_url=SourcedValue("http://localhost:1234/v1", "https://lmstudio.ai/docs/api/openai-api"),
    ),
    "vllm": Preset(
        base_url=SourcedValue(
            "http://localhost:8000/v1", "https://docs.vllm.ai/en/stable/serving/openai_compatible_server/"
        ),
    ),
    "llamacpp": Preset(
        base_url=SourcedValue(
            "http://localhost:8080/v1", "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md"
        ),
    ),
    "sglang": Preset(
        base_url=SourcedValue("http://127.0.0.1:30000/v1", "https://mintlify.com/sgl-project/sglang/quickstart"),
    ),
    "tgi": Preset(
        base_url=SourcedValue(
            "http://localhost:8080/v1",
            "https://huggingface.co/docs/text-generation-inference/en/basic_tutorials/consuming_tgi",
        ),
    ),
}
"""By the name that `[providers.NAME]` gives it."""


def preset_at(base_url: str) -> Preset | None:
    """The preset of the endpoint at `base_url`; those on this machine differ by port alone, and say nothing more."""
    host = urlsplit(base_url).hostname
    return next((preset for preset in PRESETS.values() if urlsplit(preset.base_url.value).hostname == host), None)
