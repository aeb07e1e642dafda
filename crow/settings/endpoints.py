"""The named tables of `config.toml`: `[providers.NAME]`, an endpoint, and `[models.NAME]`, a model at one.

Strategy: everything may be left out that a preset of that name says; what stands in a model's table is stronger than
what its provider's says. Knows neither files nor variables.
"""

# No postponed annotations here: evaluating them again would double what this module costs at every start.

from typing import Annotated

from pydantic import Field

from crow.settings.fields import Body, Expect, Headers, Key, Price, Section, Switch, Thought, Tokens, Url, Window

__all__ = ["NamedModel", "ProviderSettings"]

Wait = Annotated[float | None, Field(gt=0, allow_inf_nan=False), Expect("a number of seconds above 0, such as 30")]
Names = Annotated[tuple[str, ...], Field(strict=False), Expect('a list of model names, such as ["small", "large"]')]
Command = Annotated[
    Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None,
    Expect('a command as a list, such as ["pass", "show", "openrouter"]'),
]


class ProviderSettings(Section):
    """An endpoint, by a name of the user's choice."""

    base_url: Url | None = Field(
        default=None, description="The endpoint, without `/chat/completions`; unset: that of the preset of this name."
    )
    api_key: Key = Field(default=None, description="The endpoint's key; better left to the environment or a command.")
    api_key_env: Annotated[str | None, Field(min_length=1), Expect('the name of a variable, such as "MY_API_KEY"')] = (
        Field(default=None, description="The environment variable that holds the key; unset: that of the preset.")
    )
    api_key_command: Command = Field(
        default=None, description="A command that prints the key; run when the first request needs it."
    )
    headers: Headers = Field(
        default_factory=dict, repr=False, description="Further HTTP headers; their values are kept as secrets."
    )
    extra_body: Body = Field(
        default_factory=dict, description="Further members of every request, in place of crow's own."
    )
    models: Names = Field(default=(), description="Models of this endpoint, offered for choice in the editor.")
    connect_timeout_s: Wait = Field(default=None, description="Seconds until there is a connection; unset: 15.")
    first_byte_timeout_s: Wait = Field(default=None, description="As in [limits], for this endpoint.")
    idle_timeout_s: Wait = Field(default=None, description="As in [limits], for this endpoint.")
    proxy: Url | None = Field(default=None, repr=False, description="The HTTP proxy to go through.")
    ca_file: Annotated[str | None, Field(min_length=1), Expect("the path of a PEM file")] = Field(
        default=None, description="Certificates of further authorities, such as a company's own."
    )

    def secrets(self) -> tuple[str, ...]:
        """What must appear in no log, error or export."""
        key = () if self.api_key is None else (self.api_key.get_secret_value(),)
        return (*key, *self.headers.values())


class NamedModel(Section):
    """A model under a name of the user's choice, which may be NAME or PROVIDER/NAME."""

    provider: Annotated[str | None, Field(min_length=1), Expect("the name of a [providers.NAME]")] = Field(
        default=None, description="Where it is; unset: what stands before the slash of its name, else [model]."
    )
    name: Annotated[str | None, Field(min_length=1), Expect('a model name, such as "gpt-5.2"')] = Field(
        default=None, description="What its endpoint calls it; unset: the table's own name, without the provider."
    )
    context_window: Window = Field(default=None, description="Size of the context window in tokens.")
    max_output_tokens: Tokens = Field(default=None, description="Limit of one answer in tokens.")
    thought_level: Thought = Field(default=None, description="How much the model thinks before it answers.")
    takes_images: Switch = Field(default=True, description="Whether the model can see images.")
    input_price: Price = Field(default=None, description="US dollars per million input tokens.")
    cached_price: Price = Field(default=None, description="US dollars per million cached input tokens.")
    output_price: Price = Field(default=None, description="US dollars per million output tokens.")
    extra_body: Body = Field(default_factory=dict, description="Further members of every request.")
