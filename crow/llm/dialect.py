"""The form in which one endpoint accepts requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from crow.domain.messages import WireName

_LimitField: TypeAlias = Literal["max_tokens", "max_completion_tokens"]
Thinking: TypeAlias = Literal["effort", "reasoning", "switch", "switch_effort", "enable_thinking"]
"""How a request states the thought level. `effort`: in the member `reasoning_effort`. `reasoning`: in the member of
this name. `switch`: in `thinking.type`. `switch_effort`: in `thinking.type` and `reasoning_effort`. `enable_thinking`:
in the member of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The form of requests to one endpoint: which parts requests have, and how these parts are written. A dialect
    starts as configured. When the endpoint rejects a part of a request by name, the dialect changes."""

    wires: tuple[WireName, ...] = ("chat",)
    """The wires that the endpoint may speak, best first. Requests use the first one."""
    left_out: frozenset[str] = frozenset()
    """Parts that requests do not contain on the wires `responses` and `messages`. See `_REMOVABLE`."""

    limit_field: _LimitField | None = "max_tokens"
    """The name of the member that limits the output."""
    usage_option: bool = True
    """Whether `stream_options.include_usage` is sent."""
    tool_choice: bool = True
    """Whether requests may forbid calls with `tool_choice`."""
    parallel_calls: bool | None = None
    """Whether the model may make parallel calls. If None, the endpoint decides. If False, an earlier message with
    several calls is sent as several messages with one call each."""
    empty_content: Literal["null", "omitted", "blank"] = "null"
    """The member `content` of a message that has calls but no text: null, no such member, or one blank."""
    reasoning: Literal["none", "own", "always"] = "own"
    """`own`: each thought is sent back in the field that it came in. `always`: messages without a thought also contain
    this field, with an empty text, because some endpoints require it. `none`: no thought is sent back."""
    system_role: Literal["system", "developer", "user"] = "system"
    """The role of the system message."""
    takes_images: bool = True
    """Whether images are sent. If not, a text says that they were left out."""
    takes_files: bool = False
    """Whether files in tool results are sent. If not, a text says that they were left out."""
    cache: Literal["key", "marker"] | None = None
    """`key`: requests contain a cache key. `marker`: requests ask for caching with a marker if the model needs one.
    None: requests say nothing about caching."""
    marks_failures: bool = False
    """Whether failed tool results are marked with `is_error` on Messages. False in the records of requests that older
    versions of crow sent, because those versions marked none."""
    thinking: Thinking | None = "effort"
    """How requests state the thought level. If None, they do not state it."""
    opaque: bool = True
    """Whether opaque members of answers are sent back on Chat Completions."""
    streams: bool = True
    """Whether the answer is streamed. If not, it comes in one piece."""
    refused: tuple[str, ...] = ()
    """The names of the parts that the endpoint rejected, oldest first."""

    @property
    def wire(self) -> WireName:
        """The wire that requests use."""
        return self.wires[0]

    @property
    def sends_images(self) -> bool:
        """Whether requests contain images."""
        return self.takes_images and "images" not in self.left_out

    @property
    def sends_files(self) -> bool:
        """Whether requests contain files."""
        return self.takes_files and "files" not in self.left_out

    def refusing(self, part: str) -> Dialect:
        """Return the dialect to use after the endpoint refused `part`, a name that `name_of` returned. Return this
        dialect if requests on its wire do not change without the part."""
        if is_wire(part):
            left = tuple(wire for wire in self.wires if wire_part(wire) != part) or self.wires
            changed = replace(self, wires=left)
        else:
            wire, _, plain = part.rpartition(".")
            changed = self._without(plain) if (wire or "chat") == self.wire else self
        return self if changed == self else replace(changed, refused=(*self.refused, part))

    def name_of(self, part: str) -> str:
        """Return the name under which a refusal of `part` is remembered. If a part can be refused twice, with different
        effects, each refusal has its own name. The name begins with the wire on which the part was refused, except for
        Chat Completions."""
        if part == "system_role" and self.system_role == "developer":
            part = "developer_role"
        if self.wire != "chat":
            return f"{self.wire}.{part}"
        return "thought_level" if part == "reasoning" and self.thinking == "reasoning" else part

    def _without(self, part: str) -> Dialect:
        if part in _REMOVABLE.get(self.wire, ()):
            return replace(self, left_out=self.left_out | {part})
        match part:
            case "system_role" if self.wire == "messages":
                return self
            case "system_role" if self.system_role == "system":
                return replace(self, system_role="developer")
            case "developer_role" | "system_role" if self.wire == "responses":
                return replace(self, system_role="user")
            case _ if self.wire != "chat":
                return self
            case "max_tokens" | "max_completion_tokens" if self.limit_field == part:
                other: _LimitField = "max_completion_tokens" if part == "max_tokens" else "max_tokens"
                return replace(self, limit_field=None if other in self.refused else other)
            case "prompt_cache_key" if self.cache == "key":
                return replace(self, cache=None)
            case "cache_marker" if self.cache == "marker":
                return replace(self, cache=None)
            case "null_content" if self.empty_content == "null":
                return replace(self, empty_content="omitted")
            case "no_content" if self.empty_content == "omitted":
                return replace(self, empty_content="blank")
            case "reasoning":
                # Earlier answers are also sent back with a field of this name. But it is more likely that the endpoint
                # refused the thought level.
                thinking = self.thinking == "reasoning"
                return replace(self, thinking=None) if thinking else replace(self, reasoning="none")
            case "developer_role" | "system_role":
                return replace(self, system_role="user")
        return replace(self, **_CHANGES.get(part, {}))


def wire_part(wire: WireName) -> str:
    """Return the name under which crow remembers that the endpoint does not support a wire at all."""
    return f"{wire}_wire"


def is_wire(part: str) -> bool:
    """Return whether this part is a whole wire."""
    return part.endswith("_wire")


def changes_messages(part: str) -> bool:
    """Return whether this part changes how messages are written. If such a part is left out or sent again, the endpoint
    cannot reuse its cache."""
    return is_wire(part) or part.rpartition(".")[2] in _MESSAGE_PARTS


_MESSAGE_PARTS = frozenset(
    {
        *("null_content", "no_content", "reasoning", "no_reasoning", "opaque", "images", "files"),
        *("parallel_calls", "system_role", "developer_role", "custom_tools", "strict", "earlier_thoughts", "is_error"),
    }
)

_REMOVABLE: dict[str, frozenset[str]] = {
    "responses": frozenset(
        {
            *("include", "summary", "thought_level", "prompt_cache_key", "cache_retention", "tool_choice", "strict"),
            *("parallel_tool_calls", "images", "files", "opaque", "stream", "output_limit", "custom_tools", "store"),
        }
    ),
    "messages": frozenset(
        {
            *("thought_level", "cache_marker", "tool_choice", "parallel_tool_calls", "images", "files", "opaque"),
            *("stream", "strict", "earlier_thoughts", "is_error"),
            *("adaptive_thinking", "thinking_budget", "thinking_off", "thinking_display", "effort"),
        }
    ),
}
"""The parts of a request that can be left out on these wires."""

_CHANGES: dict[str, dict[str, Any]] = {
    "stream_options": {"usage_option": False},
    "stream": {"streams": False, "usage_option": False},
    "tool_choice": {"tool_choice": False},
    "parallel_tool_calls": {"parallel_calls": None},
    "parallel_calls": {"parallel_calls": False},
    "no_reasoning": {"reasoning": "always"},
    "thought_level": {"thinking": None},
    "opaque": {"opaque": False},
    "images": {"takes_images": False},
    "files": {"takes_files": False},
}
"""Maps a refused part of a request to the dialect's new values. A part is not in this table if the new values depend on
the old ones."""
