"""Defines presets for well-known endpoints, and finds the endpoint that a model name refers to."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from pydantic import ValidationError

from crow.domain.errors import ArgumentError, ConfigError
from crow.domain.messages import WireName
from crow.programs import CommandFailed, named_program, output_of
from crow.settings.values import OFFLINE, ModelOptions, ModelSettings, NamedModel, ProviderSettings, Settings

_KEY_COMMAND_TIMEOUT_S = 30.0
_ALL_WIRES: tuple[WireName, ...] = ("chat", "responses", "messages")
_CLAUDE = re.compile(r"\bclaude|anthropic", re.IGNORECASE)
_VERSION = re.compile(r"(?:\A|/)v\d+\Z")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Facts about an endpoint, from its public pages."""

    base_url: str = ""
    """The URL. Empty if it differs from user to user."""
    url_pattern: str = ""
    """The URL, with words in capitals in place of the parts that differ from user to user."""
    key_env: str | None = None
    """The environment variable that holds the key."""
    thinking: Literal["effort", "reasoning", "switch", "switch_effort", "enable_thinking"] = "effort"
    """The request field that sets the thought level."""
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The request field that limits the output."""
    cache: Literal["key", "marker"] | None = None
    """What crow adds to a request so that the endpoint caches the prompt: a cache key, a marker, or nothing."""
    takes_files: bool = False
    """Whether models get PDF files."""
    host: str = ""
    """A regular expression for the end of the endpoint's host names, if its URL differs from user to user."""
    messages_path: str = ""
    """The path of the Messages API at the host, if it is not below the URL."""
    wires: tuple[WireName, ...] = ()
    """The APIs of the endpoint, best first. If empty, crow finds out which one works."""


# Each entry's values are from the page linked above or beside it. Values that no page states are left out. Context
# windows and prices are not here: they change, and endpoints list them.
PRESETS: Mapping[str, Preset] = {
    # https://github.com/openai/openai-python/blob/main/README.md and, for the limit and the cache,
    # https://github.com/openai/openai-python/blob/main/src/openai/types/chat/completion_create_params.py
    "openai": Preset(
        base_url="https://api.openai.com/v1",
        key_env="OPENAI_API_KEY",
        limit_field="max_completion_tokens",
        cache="key",
        takes_files=True,
        wires=("responses", "chat"),
    ),
    # https://learn.microsoft.com/en-us/azure/foundry/openai/api-version-lifecycle
    "azure": Preset(
        url_pattern="https://RESOURCE.openai.azure.com/openai/v1",
        host=r"\.azure\.com",
        key_env="AZURE_OPENAI_API_KEY",
        limit_field="max_completion_tokens",
        cache="key",
        takes_files=True,
        wires=("responses", "chat"),
    ),
    # https://platform.claude.com/docs/en/api/messages, https://platform.claude.com/docs/en/api/openai-sdk
    "anthropic": Preset(
        base_url="https://api.anthropic.com/v1",
        key_env="ANTHROPIC_API_KEY",
        takes_files=True,
        wires=("messages", "chat"),
    ),
    # https://openrouter.ai/docs/quickstart
    # https://openrouter.ai/docs/use-cases/reasoning-tokens
    # https://openrouter.ai/docs/client-sdks/python/api-reference/components/caching
    "openrouter": Preset(
        base_url="https://openrouter.ai/api/v1",
        key_env="OPENROUTER_API_KEY",
        thinking="reasoning",
        cache="marker",
        takes_files=True,
        wires=("chat", "responses", "messages"),
    ),
    # https://docs.aws.amazon.com/bedrock/latest/userguide/bedrock-mantle.html
    # https://docs.aws.amazon.com/bedrock/latest/userguide/inference-messages-api.html
    "bedrock": Preset(
        url_pattern="https://bedrock-mantle.REGION.api.aws/v1",
        host=r"\bbedrock-(mantle\..+\.api\.aws|runtime\..+\.amazonaws\.com)",
        messages_path="/anthropic/v1",
        key_env="AWS_BEARER_TOKEN_BEDROCK",
        wires=("responses", "chat", "messages"),
    ),
    # https://docs.cloud.google.com/vertex-ai/generative-ai/docs/start/openai
    "vertex": Preset(
        url_pattern="https://aiplatform.googleapis.com/v1/projects/PROJECT/locations/global/endpoints/openapi",
        host=r"\baiplatform\.googleapis\.com",
        wires=("chat",),
    ),
    # https://api-docs.deepseek.com/
    "deepseek": Preset(base_url="https://api.deepseek.com", key_env="DEEPSEEK_API_KEY", thinking="switch_effort"),
    # https://platform.kimi.ai/docs/api/overview
    "kimi": Preset(base_url="https://api.moonshot.ai/v1", key_env="MOONSHOT_API_KEY", thinking="switch"),
    # https://docs.z.ai/llms-full.txt (URL), https://docs.openclaw.ai/providers/zai (variable)
    # https://docs.z.ai/guides/capabilities/thinking
    "glm": Preset(base_url="https://api.z.ai/api/paas/v4", key_env="ZAI_API_KEY", thinking="switch"),
    # https://docs.agno.com/reference/models/dashscope (URL), https://docs.agno.com/concepts/models/dashscope (variable)
    # https://www.alibabacloud.com/help/en/model-studio/deep-thinking
    "qwen": Preset(
        base_url="https://dashscope-intl.aliyuncs.com/compatible-mode/v1",
        key_env="DASHSCOPE_API_KEY",
        thinking="enable_thinking",
    ),
    # https://ai.google.dev/gemini-api/docs/openai
    "gemini": Preset(
        base_url="https://generativelanguage.googleapis.com/v1beta/openai", key_env="GEMINI_API_KEY", wires=("chat",)
    ),
    # https://console.groq.com/docs/openai
    "groq": Preset(base_url="https://api.groq.com/openai/v1", key_env="GROQ_API_KEY"),
    # https://docs.x.ai/api/integrations
    # https://docs.x.ai/developers/model-capabilities/text/best-practices
    "xai": Preset(base_url="https://api.x.ai/v1", key_env="XAI_API_KEY", cache="key", wires=("responses", "chat")),
    # https://docs.mistral.ai/resources/migration-guides
    # https://developers.llamaindex.ai/python/framework-api-reference/llms/mistralai
    "mistral": Preset(base_url="https://api.mistral.ai/v1", key_env="MISTRAL_API_KEY"),
    # https://docs.together.ai/docs/inference/openai-compatibility
    "together": Preset(base_url="https://api.together.ai/v1", key_env="TOGETHER_API_KEY"),
    # https://readme.fireworks.ai/docs/openai-compatibility
    # https://docs.pipecat.ai/api-reference/server/services/llm/fireworks
    "fireworks": Preset(base_url="https://api.fireworks.ai/inference/v1", key_env="FIREWORKS_API_KEY"),
    "ollama": Preset(base_url="http://localhost:11434/v1"),  # https://docs.ollama.com/api/openai-compatibility
    "lmstudio": Preset(base_url="http://localhost:1234/v1"),  # https://lmstudio.ai/docs/api/openai-api
    # https://docs.vllm.ai/en/stable/serving/openai_compatible_server/
    "vllm": Preset(base_url="http://localhost:8000/v1"),
    # https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
    "llamacpp": Preset(base_url="http://localhost:8080/v1"),
    "sglang": Preset(base_url="http://127.0.0.1:30000/v1"),  # https://mintlify.com/sgl-project/sglang/quickstart
    # https://huggingface.co/docs/text-generation-inference/en/basic_tutorials/consuming_tgi
    "tgi": Preset(base_url="http://localhost:8080/v1"),
}
"""The presets. Each key is a NAME for `[providers.NAME]`."""


def preset_at(base_url: str) -> Preset:
    """Return the preset for the endpoint's host. An unknown host gets an empty preset."""
    host = urlsplit(base_url).hostname or ""
    for preset in PRESETS.values():
        if urlsplit(preset.base_url).hostname == host or (preset.host and re.search(rf"{preset.host}\Z", host)):
            return preset
    return Preset()


def messages_url_at(base_url: str) -> str:
    """Return the URL of the Messages API of an endpoint, or an empty string if that is the endpoint's own URL."""
    path, parts = preset_at(base_url).messages_path, urlsplit(base_url)
    return urlunsplit((parts.scheme, parts.netloc, path, "", "")) if path else ""


def pattern_named(answer: str) -> str:
    """Return the URL pattern of the preset that the user's `answer` names, or an empty string if there is none."""
    preset = PRESETS.get(answer.strip().lower())
    return preset.url_pattern if preset is not None else ""


def url_named(answer: str) -> str:
    """Return the URL of the preset that `answer` names. Return any other answer, such as a URL, unchanged."""
    preset = PRESETS.get(answer.strip().lower())
    return preset.base_url if preset is not None and preset.base_url else answer


def wires_at(base_url: str, model: str) -> tuple[WireName, ...]:
    """Return the APIs to try for a model, best first."""
    wires = preset_at(base_url).wires or _ALL_WIRES
    is_anthropic = "anthropic" in urlsplit(base_url).path.lower().split("/")
    # Many endpoints serve Anthropic's API below a path of this name. Other endpoints that have this API cache Claude's
    # prompts and return its thoughts only through it.
    if is_anthropic or (_CLAUDE.search(model) and "messages" in wires and preset_at(base_url).cache is None):
        return ("messages", *(wire for wire in wires if wire != "messages"))
    return wires


ApiType: TypeAlias = Literal["openai", "anthropic", "azure"]
"""The kinds of endpoints that a client may set, as the protocol names them."""

_API_WIRES: Mapping[ApiType, tuple[WireName, ...]] = {
    "openai": ("chat", "responses"),
    "anthropic": ("messages",),
    "azure": ("responses", "chat"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The endpoint and the model that a model name refers to."""

    model: str
    """The model's name at the endpoint."""
    endpoint: ProviderSettings
    """The endpoint. It always has a URL and the time limits for answers."""
    options: ModelOptions
    """The settings of the model."""
    key_hint: str
    """The beginning of a sentence that tells the user how to set a key."""
    provider: str | None = None
    """The NAME of `[providers.NAME]`, or None for the endpoint in `[model]`."""
    needs_key: bool = True
    """If false, the endpoint is used without a key even if it is not local."""
    api_type: ApiType | None = None
    """The kind of the endpoint, if the client has set it."""

    @property
    def base_url(self) -> str:
        """The URL of the endpoint."""
        return self.endpoint.base_url or ""

    @property
    def wires(self) -> tuple[WireName, ...]:
        """The APIs to try, best first. If the user has chosen an API, only that one is tried. If the client has set the
        endpoint, only the APIs of the endpoint's kind are tried."""
        chosen = self.options.wire or self.endpoint.wire
        wires = wires_at(self.base_url, self.model) if chosen == "auto" else (chosen,)
        if self.api_type is None:
            return wires
        spoken = _API_WIRES[self.api_type]
        if self.api_type == "azure" and chosen == "auto":
            return spoken
        return tuple(wire for wire in wires if wire in spoken) or spoken

    @property
    def takes_files(self) -> bool:
        """Whether the model gets PDF files."""
        if self.options.takes_files is not None:
            return self.options.takes_files
        is_claude = _CLAUDE.search(self.model) is not None and self.wires[0] == "messages"
        return is_claude or preset_at(self.base_url).takes_files


def names_offered(settings: Settings) -> tuple[str, ...]:
    """Return the model names that the user can choose from, with the default first. The result is empty if no name is
    set."""
    names = [settings.model.name, *settings.models]
    for provider, table in settings.providers.items():
        names.extend(f"{provider}/{model}" for model in table.models)
    return tuple(dict.fromkeys(name for name in names if name))


def target_of(name: str, settings: Settings) -> Target:
    """Return the target of a model name. The name can be that of a table `[models.NAME]` or have the form
    PROVIDER/MODEL. Any other name is a model of the endpoint in `[model]`."""
    table = settings.models.get(name) if isinstance(settings.models, Mapping) else None
    prefix, slash, rest = name.partition("/")
    names_provider = bool(slash) and prefix in settings.providers
    if table is None and name == settings.model.name and settings.model.base_url != _OPENAI:
        # the name belongs to the endpoint in `[model]`, even if it begins like a provider's name
        names_provider = False
    provider = (table.provider if table else None) or (prefix if names_provider else None)
    options: ModelOptions
    if provider is not None:
        is_default = name == settings.model.name
        options = table or (settings.model if is_default else NamedModel.model_construct())
        endpoint = settings.providers[provider]
        base_url = endpoint.base_url or PRESETS[provider].base_url
        table_key = dotted_key("providers", provider)
        variable = endpoint.api_key_env or PRESETS.get(provider, Preset()).key_env
        key_hint = f"Set {variable or f'{table_key}.api_key_env or {table_key}.api_key_command'}"
    else:
        default = settings.model.with_name(name)
        options = table or default
        base_url, key_hint = default.base_url, f"Set {default.api_key_env}"
        wire = settings.model.wire or "auto"
        endpoint = ProviderSettings.model_construct(api_key=default.api_key, headers=default.headers, wire=wire)
    filled = {
        "base_url": base_url,
        "first_byte_timeout_s": endpoint.first_byte_timeout_s or settings.limits.first_byte_timeout_s,
        "idle_timeout_s": endpoint.idle_timeout_s or settings.limits.idle_timeout_s,
    }
    return Target(
        model=(table.name if table else None) or (rest if names_provider else name),
        endpoint=endpoint.model_copy(update=filled),
        options=options,
        key_hint=key_hint,
        provider=provider,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """An endpoint that the client set for a provider. Its URL and headers replace the URL, key and headers in the
    user's settings."""

    base_url: str
    """The URL as the client wrote it."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The headers of all requests, instead of a key."""
    api_type: ApiType = "openai"
    """The kind of the endpoint."""

    @property
    def url(self) -> str:
        """The URL for crow's requests. Clients of Anthropic's API add `/v1` to the URL themselves, and Azure serves the
        API below a path of its own."""
        path = urlsplit(self.base_url).path.strip("/")
        if self.api_type == "anthropic" and not _VERSION.search(path):
            return f"{self.base_url}/v1"
        return f"{self.base_url}/openai/v1" if self.api_type == "azure" and not path else self.base_url

    def apply(self, target: Target) -> Target:
        """Return a copy of the target with this endpoint."""
        unset = {"api_key": None, "api_key_env": None, "api_key_command": None}
        endpoint = target.endpoint.model_copy(update=unset | {"base_url": self.url, "headers": self.headers})
        return replace(target, endpoint=endpoint, needs_key=False, api_type=self.api_type)


class Gateways:
    """The endpoints that the client set, and the providers that it disabled, by provider id. Crow keeps them only in
    memory."""

    def __init__(self) -> None:
        self._by_id: dict[str, Gateway | None] = {}
        """Maps the id of a provider to its endpoint, or to None if the provider is disabled. Providers without an
        entry have the endpoint in the user's settings."""

    def set(self, provider_id: str, gateway: Gateway, settings: Settings) -> None:
        """Set the endpoint of a provider.

        :raises ArgumentError: there is no such provider, or the URL is invalid. The message omits the URL, which may
            hold a password.
        """
        known = _provider_ids(settings)
        if provider_id not in known:
            raise ArgumentError(f"providerId {json.dumps(provider_id)[:200]} is unknown; expected {', '.join(known)}.")
        try:
            checked = ProviderSettings(base_url=gateway.base_url)
        except ValidationError:
            problem = "expected an http or https URL without user name, password and query"
            raise ArgumentError(f"baseUrl: {problem}, such as http://localhost:11434/v1.") from None
        self._by_id[provider_id] = replace(gateway, base_url=checked.base_url or "")

    def disable(self, provider_id: str, settings: Settings) -> None:
        """Disable a provider; ignore an unknown id. :raises ArgumentError: the provider is required."""
        if provider_id == MAIN_PROVIDER:
            raise ArgumentError(f'The provider "{MAIN_PROVIDER}" is required and cannot be disabled.')
        if provider_id in _provider_ids(settings):
            self._by_id[provider_id] = None

    def is_disabled(self, target: Target) -> bool:
        """Return whether the client has disabled the provider of a model."""
        return self._by_id.get(_provider_id(target.provider), target) is None

    def route(self, target: Target) -> Target:
        """Return the target with the endpoint that the client set for its provider. If the client set none, return the
        target unchanged.

        :raises ConfigError: the provider is disabled.
        """
        if self.is_disabled(target):
            problem = f'The editor has disabled the provider "{_provider_id(target.provider)}"'
            raise ConfigError(f"{problem}. Choose another model, or enable the provider in the editor.")
        gateway = self._by_id.get(_provider_id(target.provider))
        return target if gateway is None else gateway.apply(target)

    def current(self, settings: Settings) -> dict[str, tuple[ApiType, str] | None]:
        """Return the kind and the URL of each provider's endpoint, by provider id. For a disabled provider, return
        None instead."""
        found: dict[str, tuple[ApiType, str] | None] = {}
        for provider_id, own in _provider_ids(settings).items():
            gateway = self._by_id.get(provider_id)
            if gateway is not None:
                found[provider_id] = gateway.api_type, gateway.base_url
            elif provider_id in self._by_id:
                found[provider_id] = None
            else:
                found[provider_id] = _api_type_at(own), own
        return found


def _api_type_at(base_url: str) -> ApiType:
    """Return the kind of an endpoint in the user's settings."""
    if preset_at(base_url) is PRESETS["azure"]:
        return "azure"
    return "anthropic" if wires_at(base_url, "")[0] == "messages" else "openai"


def provider_target(provider: str | None, settings: Settings) -> Target:
    """Return the target of a provider, without a model. If `provider` is None, the target is the endpoint in
    `[model]`."""
    if provider is None:
        return target_of("", settings)
    return target_of("", settings.model_copy(update={"models": {"": NamedModel.model_construct(provider=provider)}}))


MAIN_PROVIDER = "main"
"""The id of the endpoint in `[model]`."""


def _provider_id(provider: str | None) -> str:
    """Return the id by which clients know `[providers.NAME]`. None stands for the endpoint in `[model]`."""
    if provider is None:
        return MAIN_PROVIDER
    return f"providers.{provider}" if provider == MAIN_PROVIDER else provider


def _provider_ids(settings: Settings) -> dict[str, str]:
    """Return the user's own URL of each provider, by id."""
    urls = {_provider_id(None): settings.model.base_url}
    for name, provider in settings.providers.items():
        urls[_provider_id(name)] = provider.base_url or PRESETS[name].base_url
    return urls


def fallback_of(name: str, settings: Settings) -> str:
    """Return the fallback of the model `name`: the name of the model that answers if the endpoint of this model is
    down. Return an empty string if the model has no fallback."""
    return target_of(name, settings).options.fallback or ""


def edit_tool_of(name: str, settings: Settings) -> str:
    """Return the tool with which the model `name` edits files: `edit_file` or `apply_patch`."""
    target = target_of(name, settings)
    return target.options.edit_tool or ("apply_patch" if _WRITES_PATCHES.search(target.model) else "edit_file")


def fallback_problem(name: str, settings: Settings, also: Sequence[str] = ()) -> str:
    """Return the problem with the fallback of a model, as the end of a sentence, or an empty string if there is none.
    `also` are more names that a fallback may have, such as that of a default model that a flag has replaced."""
    fallback = fallback_of(name, settings)
    if not fallback:
        return ""
    known = (*names_offered(settings), *also, OFFLINE)
    provider, _, model = fallback.partition("/")
    if fallback not in known and not (model and provider in settings.providers):
        providers = "".join(f", {provider}/MODEL" for provider in settings.providers)
        return f"expected one of {', '.join(dict.fromkeys(known))}{providers}"
    chain = [name]
    while fallback and fallback not in chain:
        chain.append(fallback)
        fallback = fallback_of(fallback, settings)
    return f"the fallbacks go round in a circle: {' → '.join([*chain, fallback])}" if fallback == name else ""


def dotted_key(*parts: str) -> str:
    """Return a TOML key such as `part.part`. A part is quoted if TOML requires it."""
    return ".".join(part if _BARE_KEY.match(part) else json.dumps(part, ensure_ascii=False) for part in parts)


def run_key_command(command: Sequence[str]) -> str:
    """Return the first word that `command` prints. This function blocks until the command ends.

    A program without a directory is looked up in the absolute directories on PATH.

    :raises ConfigError: the command fails or prints nothing.
    """
    name = f"api_key_command `{' '.join(command)}`"
    program = named_program(command[0])
    if program is None:
        raise ConfigError(f"{name} cannot be started: {os.strerror(errno.ENOENT)}.")
    try:
        words = output_of([program, *command[1:]], timeout_s=_KEY_COMMAND_TIMEOUT_S).split()
    except CommandFailed as error:
        raise ConfigError(f"{name} {error}.") from error
    if not words:
        raise ConfigError(f"{name} printed no key.")
    return words[0]


_WRITES_PATCHES = re.compile(
    r"(?:\A|[/:_-])(?:gpt-?(?:4\.[1-9]|[5-9]|\d\d|oss)|o[34](?![a-z0-9])|codex)", re.IGNORECASE
)
"""Matches the names of models that are trained to edit files with patches."""

_OPENAI = ModelSettings.model_fields["base_url"].default
