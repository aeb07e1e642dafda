"""Bodies are the same after a round trip through JSON; damaged ones raise only `Unreadable`."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain import entries as domain
from crow.domain.entries import (
    Announcement,
    Attachment,
    Body,
    Diff,
    File,
    Mask,
    Note,
    Prompt,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.errors import ArgumentError
from crow.domain.messages import Image, Part, Text, ToolSpec
from crow.store import codec
from crow.store.codec import (
    KINDS,
    SHARED_BYTES,
    SPILL_BYTES,
    Unreadable,
    decode,
    decode_parts,
    encode,
    encode_parts,
    merged_metadata,
)
from tests.store.scenes import result, said
from tests.support.amounts import examples

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
BODIES = typing.get_args(Body)


def value(hint: Any) -> st.SearchStrategy[object]:
    """Any value of a type as the domain's dataclasses use them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(value(arguments[0]), max_size=3).map(tuple)
    if origin in (Mapping, typing.get_origin(Mapping[str, object])):
        return st.dictionaries(st.text(), JSON, max_size=3)
    if arguments:
        return st.one_of([value(argument) for argument in arguments])
    if dataclasses.is_dataclass(hint):
        return record(typing.cast(type, hint))
    return st.integers(-(2**63), 2**63 - 1) if hint is int else st.from_type(hint)


def record(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: value(hint) for name, hint in hints.items()})


def read_back(body: Body) -> Body:
    stored = encode(body)
    text = stored.text if stored.spilled is None else stored.blobs[stored.spilled]
    return decode(stored.kind, text, stored.blobs.get)


@pytest.mark.long
@pytest.mark.parametrize("cls", BODIES, ids=lambda cls: cls.__name__)
@settings(max_examples=examples(10), database=None)
@given(data=st.data())
def test_every_body_is_read_back_unchanged(cls: type, data: st.DataObject) -> None:
    body = data.draw(record(cls))
    assert read_back(body) == body
    assert encode(body).body is body


@given(parts=value(typing.get_type_hints(User)["parts"]))
@settings(max_examples=examples(20), database=None)
def test_parts_of_a_waiting_prompt_are_read_back_unchanged(parts: tuple[Part, ...]) -> None:
    assert decode_parts(encode_parts(parts)) == parts


@given(kind=st.sampled_from(sorted(KINDS.values())), junk=JSON)
@settings(max_examples=examples(20), database=None)
def test_any_json_is_a_body_or_unreadable(kind: str, junk: object) -> None:
    try:
        body = decode(kind, json.dumps(junk), lambda _: None)
    except Unreadable:
        return
    assert KINDS[type(body)] == kind


def test_each_body_has_one_kind_and_kinds_never_change() -> None:
    assert set(KINDS) == set(BODIES)
    assert list(KINDS.values()) == [
        "prompt",
        "user",
        "assistant",
        "started",
        "file",
        "tool",
        "checkpoint",
        "mask",
        "restore",
        "skill",
        "reminder",
        "remark",
        "command",
        "note",
        "custom",
        "turn_end",
        "request",
    ]


def test_a_mask_of_an_older_version_hides_everything_before_it() -> None:
    stored = '{"before":7,"tokens_before":9000,"tokens_after":4000}'
    assert decode("mask", stored, lambda _: None) == Mask(before=7, tokens_before=9_000, tokens_after=4_000)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"text": 1}', '{"text": "x"}', "[" * 100_000, b"\xff\xfe{"])
def test_a_damaged_body_is_unreadable(text: str | bytes) -> None:
    with pytest.raises(Unreadable, match="it is damaged"):
        decode("remark", text, lambda _: None)


def test_an_unknown_kind_is_unreadable() -> None:
    with pytest.raises(Unreadable, match="its kind 'hologram' is unknown to this version"):
        decode("hologram", "{}", lambda _: None)


def test_a_body_without_its_blob_is_unreadable() -> None:
    stored = encode(File(call=domain.CallRef(assistant=1, index=0), path="/a", before=b"x", after_hash=""))
    with pytest.raises(Unreadable, match=r"the blob for .* is missing"):
        decode("file", stored.text, lambda _: None)


def test_fields_of_other_versions_are_ignored_or_take_their_defaults() -> None:
    assert decode("turn_end", '{"stop":"end_turn","colour":"red"}', lambda _: None) == TurnEnd(stop="end_turn")
    assert decode("turn_end", '{"stop":"a later reason"}', lambda _: None) == TurnEnd(stop="error")
    for about in ("weather", "title"):  # older versions knew `title`, but never wrote it
        assert decode("note", f'{{"about":"{about}","value":"x"}}', lambda _: None) == Note(about="label", value="x")


def test_pictures_files_and_prompts_become_blobs() -> None:
    picture = Image(data="aGVsbG8=", mime_type="image/png")
    spec = ToolSpec(name="t", description="d", input_schema={"type": "object"})
    specs = '[{"name":"t","description":"d","input_schema":{"type":"object"},"freeform":null}]'
    cases: list[tuple[Body, list[bytes]]] = [
        (User(parts=(picture, Text(text="x")), message_id="u"), [b"hello"]),
        (dataclasses.replace(result(1), images=(picture,)), [b"hello"]),
        (dataclasses.replace(result(1), attachments=(Attachment(name="a", data="aGVsbG8="),)), [b"hello"]),
        (File(call=domain.CallRef(assistant=1, index=0), path="/a", before=b"\xff\0", after_hash=""), [b"\xff\0"]),
        (Prompt(system="Sýs", tools=(spec,), cwd="/", model="m"), ["Sýs".encode(), specs.encode()]),
    ]
    for body, blobs in cases:
        assert list(encode(body).blobs.values()) == blobs
        assert read_back(body) == body
    odd = dataclasses.replace(result(1), attachments=(Attachment(name="a", uri="u", data="no base64!"),))
    assert read_back(odd) == odd


@pytest.mark.parametrize("character", ["x", "字"])
def test_only_a_large_body_becomes_a_blob(character: str) -> None:
    size = len(character.encode())
    small, large = (said(character * (count // size)) for count in (SPILL_BYTES // 3, SPILL_BYTES))
    assert (encode(small).spilled, encode(small).text is None) == (None, False)
    assert encode(large).text is None
    assert read_back(large) == large


@pytest.mark.parametrize("character", ["x", "字"])
def test_equal_long_outputs_and_sides_of_diffs_are_the_same_blob(character: str) -> None:
    size = len(character.encode())
    short, long = (character * (count // size) for count in (SHARED_BYTES, SHARED_BYTES + 3))
    assert encode(result(1, short)).blobs == {}
    diff = Diff(path="/a", old_text=long, new_text=f"{long}.")
    shown = dataclasses.replace(result(7, long, index=3), announcement=Announcement(title="Edit", diffs=(diff,)))
    assert read_back(shown) == shown
    assert list(encode(shown).blobs.values()) == [long.encode(), f"{long}.".encode()]
    assert list(encode(result(1, long)).blobs) == list(encode(shown).blobs)[:1]
    assert encode(shown, shares_texts=False).blobs.keys() == {encode(shown, shares_texts=False).spilled} - {None}


@pytest.mark.parametrize(
    ("given_text", "stored_text"),
    [
        ("\ud800", "\ufffd"),
        ("a\udfffb", "a\ufffdb"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\0", "\0"),
    ],
)
def test_text_with_lone_surrogates_is_mended_in_the_returned_body_too(given_text: str, stored_text: str) -> None:
    for body, mended in (
        (result(1, given_text), result(1, stored_text)),
        (
            Prompt(system=given_text, tools=(), cwd="/", model="m"),
            Prompt(system=stored_text, tools=(), cwd="/", model="m"),
        ),
    ):
        assert encode(body).body == read_back(body) == mended


def test_numbers_that_json_lacks_become_null() -> None:
    body = dataclasses.replace(result(1), raw_output={"a": [float("inf"), {"b": float("nan")}], "c": 1.5})
    expected = dataclasses.replace(result(1), raw_output={"a": [None, {"b": None}], "c": 1.5})
    assert encode(body).body == read_back(body) == expected
    assert isinstance(encode(body).body, ToolResult)


def test_damaged_columns_read_as_empty() -> None:
    assert codec.from_json('{"a": 1}', {}) == {"a": 1}
    for damaged in (None, "", "{", "[]", "null", "[" * 100_000):
        assert codec.from_json(damaged, {}) == {}


OBJECTS = st.dictionaries(st.text(max_size=3), JSON, max_size=3)


@given(OBJECTS, OBJECTS)
def test_merged_metadata_has_the_patch_and_no_null_members(old: dict[str, object], patch: dict[str, object]) -> None:
    try:
        first = merged_metadata({}, old)
        merged = merged_metadata(first, patch)
    except ArgumentError:
        return
    assert merged_metadata(merged, patch) == merged
    assert merged_metadata(merged, {}) == merged
    assert merged_metadata(merged, dict.fromkeys(merged)) == {}
    assert {name for name, one in patch.items() if one is not None} <= merged.keys()
    assert None not in merged.values()


@pytest.mark.parametrize(("levels", "fits"), [(8, True), (9, False)])
def test_metadata_is_bounded_in_depth(levels: int, fits: bool) -> None:
    value: object = 1
    for _ in range(levels - 1):
        value = {"x": value}
    patch = {"x": value} if isinstance(value, dict) else {}
    if fits:
        assert merged_metadata({}, patch) == patch
    else:
        with pytest.raises(ArgumentError, match="more than 8 levels deep"):
            merged_metadata({}, patch)
