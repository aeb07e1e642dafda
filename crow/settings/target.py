"""What a model name means: the endpoint to ask, the name to ask for, and everything that is set of both.

Strategy: a table `[models.NAME]` says it; else `PROVIDER/MODEL` where there is such a provider; else it is a model of
`[model]`'s endpoint. What a model's table sets is stronger than its provider's, that than the preset's. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import SecretStr

from crow.settings.endpoints import NamedModel, ProviderSettings
from crow.settings.presets import PRESETS, Preset, preset_at
from crow.settings.text import shown_key
from crow.settings.values import LimitSettings, ModelSettings, Settings

__all__ = ["Target", "names_offered", "target_of"]


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
