"""Everything that can be set, with its bounds, its default and its meaning.

Strategy: one frozen model per table of `config.toml`; each field says in `Expect` how an error sentence about it ends,
and in its description what it does (`schemas/config.schema.json` is made from both the types and these). Knows
nothing of files, flags and variables: `gather` does.
"""

# No postponed annotations here: evaluating them again would double what this module costs at every start.

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field

from crow.settings.endpoints import NamedModel, ProviderSettings
from crow.settings.fields import (
    Body,
    Expect,
    Headers,
    Key,
    Price,
    Rules,
    Seconds,
    Section,
    Switch,
    Thought,
    Tokens,
    Url,
    Window,
)
from crow.settings.servers import McpServerSettings

__all__ = [
    "ABOUT_THE_ENDPOINT",
    "ABOUT_THE_MODEL",
    "OFFLINE",
    "CompactionSettings",
    "EditorSettings",
    "Expect",
    "LimitSettings",
    "LogSettings",
    "ModelSettings",
    "PermissionSettings",
    "Section",
]

OFFLINE = "offline"
"""The model name that stands for the built-in model, which needs no endpoint."""

ABOUT_THE_ENDPOINT = ("api_key", "api_key_env", "headers")
"""Settings of `[model]` that mean nothing at another base URL."""

ABOUT_THE_MODEL = (
    "context_window",
    "max_output_tokens",
    "takes_images",
    "input_price",
    "cached_price",
    "output_price",
    "thought_level",
    "extra_body",
)
"""Settings of `[model]` that mean nothing for a model of another name."""


class ModelSettings(Section):
    """The model and the endpoint that serves it."""

    name: Annotated[str | None, Field(min_length=1), Expect('a model name, such as "gpt-5.2", or "offline"')] = Field(
        default=None,
        description='The model, as its endpoint calls it; "offline" is the built-in one. Environment: CROW_MODEL.',
    )
    base_url: Url = Field(
        default="https://api.openai.com/v1",
        description="The endpoint, without `/chat/completions`. Environment: OPENAI_BASE_URL.",
    )
    api_key: Key = Field(
        default=None, description="The endpoint's key; better left to the environment: see api_key_env."
    )
    api_key_env: Annotated[str, Field(min_length=1), Expect('the name of a variable, such as "OPENROUTER_API_KEY"')] = (
        Field(default="OPENAI_API_KEY", description="The environment variable that holds the key.")
    )
    context_window: Window = Field(
        default=None,
        description="Size of the context window in tokens; unset: as the endpoint tells, or as learned from it.",
    )
    max_output_tokens: Tokens = Field(
        default=None,
        description="Limit of one answer in tokens; unset: as the endpoint has it. At most a quarter of the window.",
    )
    takes_images: Switch = Field(default=True, description="Whether the model can see images.")
    input_price: Price = Field(
        default=None, description="US dollars per million input tokens, to show what sessions cost."
    )
    cached_price: Price = Field(
        default=None, description="US dollars per million input tokens that the provider had cached."
    )
    output_price: Price = Field(default=None, description="US dollars per million output tokens.")
    thought_level: Thought = Field(
        default=None, description="How much the model thinks before it answers; unset: as the endpoint has it."
    )
    extra_body: Body = Field(
        default_factory=dict, description="Further members of every request, in place of crow's own."
    )
    headers: Headers = Field(
        default_factory=dict,
        repr=False,
        description="Further HTTP headers for the endpoint; their values are kept as secrets.",
    )

    def secrets(self) -> tuple[str, ...]:
        """What must appear in no log, error or export."""
        key = () if self.api_key is None else (self.api_key.get_secret_value(),)
        return (*key, *self.headers.values())

    def named(self, name: str) -> Self:
        """The same endpoint with another model: what was set for this model alone (sizes, prices) is unset."""
        if name == self.name:
            return self
        unset = {
            field: type(self).model_fields[field].get_default(call_default_factory=True) for field in ABOUT_THE_MODEL
        }
        return self.model_copy(update=unset | {"name": name})


class CompactionSettings(Section):
    """When and how a long conversation is made shorter."""

    auto: Switch = Field(
        default=True, description="Whether crow compacts by itself; false means never, but on `/compact`."
    )
    threshold: Annotated[
        float, Field(ge=0.1, le=0.95), Expect("a part of the window from 0.1 to 0.95, such as 0.85")
    ] = Field(default=0.85, description="The part of the context window at which compaction starts.")
    keep_tokens: Annotated[int, Field(ge=0), Expect("a whole number of tokens, such as 20000")] = Field(
        default=20_000, description="How many of the newest tokens stay as they are, at most."
    )
    target: Annotated[float, Field(ge=0.1, le=0.9), Expect("a part of the room from 0.1 to 0.9, such as 0.5")] = Field(
        default=0.5,
        description="The part of the room (the threshold less tools and system message) that compaction aims at.",
    )
    compact_model: Annotated[
        str | None, Field(min_length=1), Expect("the name of a model of the same endpoint, such as a smaller one")
    ] = Field(
        default=None,
        description="The model that writes a summary when the session's own did not; unset: the session's own again.",
    )
    prompt_file: Annotated[str | None, Field(min_length=1), Expect("the path of a readable UTF-8 text file")] = Field(
        default=None,
        description=(
            "A file with what the model is asked for a summary, instead of crow's own words; `{words}` in it becomes "
            "the limit in words. A relative path is taken from the directory of config.toml."
        ),
    )


class PermissionSettings(Section):
    """What runs without asking."""

    mode: Annotated[
        Literal["ask", "accept-edits", "plan", "auto"], Expect('"ask", "accept-edits", "plan" or "auto"')
    ] = Field(default="ask", description="The mode in which a session starts.")
    allow: Rules = Field(
        default=(), description='What runs unasked: a tool, or one with an argument, such as "shell(git status)".'
    )
    deny: Rules = Field(default=(), description="What never runs, in any mode; stronger than every allow.")
    fetch_private: Switch = Field(
        default=False, description="Whether fetch may ask private addresses, such as those of this machine."
    )


class LimitSettings(Section):
    """Bounds on what could go on for ever."""

    steps_per_turn: Annotated[int, Field(ge=1), Expect("a whole number above 0, such as 500")] = Field(
        default=500, description="Model answers in one turn."
    )
    mcp_start_timeout_s: Seconds = Field(default=10.0, description="Seconds that an MCP server may take to start.")
    mcp_call_timeout_s: Seconds = Field(default=600.0, description="Seconds that a call of an MCP tool may take.")
    offered_tools: Annotated[int, Field(ge=0), Expect("a whole number, such as 100")] = Field(
        default=100, description="Tools of MCP servers offered one by one; of more, the rest is found by find_tools."
    )
    first_byte_timeout_s: Seconds = Field(default=300.0, description="Seconds until an answer begins.")
    idle_timeout_s: Seconds = Field(default=120.0, description="Seconds of silence within an answer.")


class EditorSettings(Section):
    """What is left to the editor."""

    terminals: Switch = Field(
        default=False, description="Whether commands run in the editor's terminals, where it has any."
    )
    answer_timeout_s: Seconds = Field(
        default=30.0, description="Seconds that the editor may take for an answer about a file or a terminal."
    )
    user_timeout_s: Seconds = Field(
        default=86_400.0, description="Seconds that a question to the user stands: a permission, a form, a link."
    )


class LogSettings(Section):
    """The log file."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Expect('"debug", "info", "warning" or "error"')] = (
        Field(default="warning", description="The least that is logged. Environment: CROW_LOG.")
    )


class Settings(Section):
    """Everything that can be set in crow's config.toml."""

    models: Annotated[
        Annotated[tuple[str, ...], Field(strict=False)] | Mapping[str, NamedModel],
        Expect('a list of model names, such as ["small", "large"], or tables [models.NAME]'),
    ] = Field(
        default=(),
        description="Further models, offered for choice in the editor: names, or tables that say more of each.",
    )
    providers: Annotated[Mapping[str, ProviderSettings], Expect("tables: [providers.NAME]")] = Field(
        default_factory=dict, description="Further endpoints: a model there is called NAME/MODEL."
    )
    model: ModelSettings = Field(default_factory=ModelSettings)
    compaction: CompactionSettings = Field(default_factory=CompactionSettings)
    permissions: PermissionSettings = Field(default_factory=PermissionSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    editor: EditorSettings = Field(default_factory=EditorSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    mcp_servers: Annotated[
        Mapping[Annotated[str, Field(min_length=1, max_length=64)], McpServerSettings],
        Expect("a table for each server: [mcp_servers.NAME] with command or url"),
    ] = Field(default_factory=dict, description="MCP servers of every session, by name.")

    def secrets(self) -> tuple[str, ...]:
        """What must appear in no log, error or export."""
        providers = (secret for each in self.providers.values() for secret in each.secrets())
        servers = (secret for each in self.mcp_servers.values() for secret in each.secrets())
        return (*self.model.secrets(), *providers, *servers)
