"""Content blocks as parts and back."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from crow.domain.errors import ArgumentError
from crow.domain.messages import File, Image, Link, Part, Resource, Text
from crow.protocol.content import blocks, parts_from, without_repeated_prompts
from crow.protocol.sizes import PART_BYTES, json_bytes

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_every_kind_of_block_becomes_a_part() -> None:
    prompt = [
        text("look at"),
        {"type": "image", "data": PNG, "mimeType": "image/png", "uri": "file:///w/a.png"},
        {"type": "resource", "resource": {"uri": "file:///w/a.py", "text": "x = 1", "mimeType": "text/x-python"}},
        {"type": "resource_link", "uri": "/w/with%20space/b.py", "name": "b.py", "mimeType": "text/x-python"},
    ]
    assert parts_from(prompt) == (
        Text(text="look at"),
        Image(data=PNG, mime_type="image/png", uri="file:///w/a.png"),
        Resource(uri="file:///w/a.py", text="x = 1", mime_type="text/x-python"),
        Link(uri="/w/with%20space/b.py", name="b.py", mime_type="text/x-python"),
    )


def test_unusable_blocks_become_sentences() -> None:
    blob = base64.b64encode(bytes(300)).decode()
    prompt = [
        {"type": "audio", "data": blob, "mimeType": "audio/wav"},
        {"type": "resource", "resource": {"uri": "file:///w/a.pdf", "blob": blob, "mimeType": "application/pdf"}},
        {"type": "image", "data": blob, "mimeType": "image/tiff"},
    ]
    assert parts_from(prompt) == (
        Text(text="(An audio clip (audio/wav, 300 bytes) is attached; crow cannot play audio.)"),
        Text(text="(The file file:///w/a.pdf (application/pdf, 300 bytes) is attached; crow cannot read it.)"),
        Text(text="(A file (image/tiff, 300 bytes) is attached; crow cannot read it.)"),
    )


def test_blobs_become_images_or_text_by_their_content() -> None:
    source = base64.b64encode(b"x = 1").decode()
    prompt = [
        {"type": "resource", "resource": {"uri": "a.png", "blob": PNG, "mimeType": "image/png"}},
        {"type": "resource", "resource": {"uri": "a.py", "blob": source}},
        {"type": "image", "data": base64.b64encode(b"<svg/>").decode(), "mimeType": "image/svg+xml"},
    ]
    assert parts_from(prompt) == (
        Image(data=PNG, mime_type="image/png", uri="a.png"),
        Resource(uri="a.py", text="x = 1"),
        Resource(uri="attachment", text="<svg/>", mime_type="image/svg+xml"),
    )


def test_a_pdf_is_a_file_and_is_shown_again_unless_it_is_very_large() -> None:
    pdf, large = (base64.b64encode(b"%PDF-1.7\n" + bytes(size)).decode() for size in (9, 400_000))
    resource = {"uri": "file:///w/my%20nest.pdf", "blob": pdf, "mimeType": "application/pdf"}
    block = {"type": "resource", "resource": resource}
    (part,) = parts_from([block])
    assert part == File(name="my nest.pdf", data=pdf, mime_type="application/pdf", uri="file:///w/my%20nest.pdf")
    assert blocks(part) == (block,)
    (part,) = parts_from([{"type": "resource", "resource": {"uri": "x", "blob": large}}])
    assert blocks(part) == (text("(the file x (application/pdf, 400,011 bytes): too large to show again)"),)


@pytest.mark.parametrize(
    ("data", "mime_type"),
    [
        (PNG.rstrip("="), "image/png"),
        (PNG[:10] + "\n" + PNG[10:], "IMAGE/PNG"),
        (f"data:image/png;base64,{PNG}", "application/octet-stream"),
    ],
)
def test_sloppy_base64_is_normalised(data: str, mime_type: str) -> None:
    assert parts_from([{"type": "image", "data": data, "mimeType": mime_type}]) == (
        Image(data=PNG, mime_type="image/png"),
    )


def test_an_image_without_data_becomes_a_link() -> None:
    block = {"type": "image", "data": "", "mimeType": "image/png", "uri": "file:///w/shot%201.png"}
    assert parts_from([block]) == (Link(uri="file:///w/shot%201.png", name="shot 1.png", mime_type="image/png"),)


def test_unknown_members_and_invalid_annotations_are_ignored() -> None:
    block = {"type": "text", "text": "hi", "annotations": 5, "_meta": {"text": "forged"}, "x": 1}
    assert parts_from([block]) == (Text(text="hi"),)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("hi", 'prompt is "hi"; expected a list of content blocks.'),
        (None, "prompt is missing or null; expected a list of content blocks."),
        ([text("a"), "hi"], 'prompt[1] is "hi"; expected a content block, such as {"type": "text"}.'),
        ([{}], "prompt[0].type is missing or null; expected text, image, audio, resource or resource_link."),
        (
            [text("a"), {"type": "video"}],
            'prompt[1].type is "video"; expected text, image, audio, resource or resource_link.',
        ),
        ([{"type": "text", "text": 5}], "prompt[0].text is 5; expected a string."),
        ([{"type": "image", "data": PNG}], "prompt[0].mimeType is missing or null; expected a string."),
        (
            [{"type": "resource", "resource": []}],
            'prompt[0].resource is a list; expected an object with "uri" and either "text" or "blob".',
        ),
        (
            [{"type": "resource", "resource": {"uri": "u"}}],
            'prompt[0].resource has neither "text" nor "blob"; expected one of them as a string.',
        ),
        ([{"type": "resource_link", "name": "n"}], "prompt[0].uri is missing or null; expected a string."),
        ([], "The prompt is empty; send at least one content block with some text."),
        ([text(""), text(" \n")], "The prompt is empty; send at least one content block with some text."),
    ],
)
def test_an_invalid_block_is_refused_with_its_position(prompt: Any, words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        parts_from(prompt)
    assert str(raised.value) == words


def test_invalid_base64_is_refused_with_its_position() -> None:
    with pytest.raises(ArgumentError, match=r"^prompt\[0\]\.data is not base64: "):
        parts_from([{"type": "image", "data": "no!", "mimeType": "image/png"}])


def test_parts_convert_back_to_the_same_blocks() -> None:
    prompt = [
        text("look at"),
        {"type": "image", "data": PNG, "mimeType": "image/png", "uri": "file:///w/a.png"},
        {"type": "resource", "resource": {"uri": "file:///w/a.py", "text": "x = 1", "mimeType": "text/x-python"}},
        {"type": "resource_link", "uri": "/w/b.py", "name": "b.py", "mimeType": "text/x-python"},
    ]
    assert [block for part in parts_from(prompt) for block in blocks(part)] == prompt


def test_data_uris_become_the_image_that_they_contain() -> None:
    prompt = [
        {"type": "resource_link", "uri": f"data:image/png;base64,{PNG}", "name": "a"},
        {"type": "image", "data": "", "mimeType": "image/png", "uri": f"data:image/png;base64,{PNG}"},
    ]
    assert parts_from(prompt) == (Image(data=PNG, mime_type="image/png"), Image(data=PNG, mime_type="image/png"))


def test_names_of_any_length_fit_on_a_line() -> None:
    long = "x" * 2_000_000
    for part in (
        Link(uri=long, name=long, mime_type=long),
        Resource(uri=long, text=long, mime_type=long),
        Image(data=PNG, mime_type="image/png", uri=long),
    ):
        assert sum(json_bytes(block) for block in blocks(part)) < PART_BYTES


def repeating(*prompts: str, told: int | str | None = None) -> tuple[Part, ...]:
    count = len(prompts) if told is None else told
    counted = f"Continuing from previous session with {count} recent user messages"
    return (
        Link(uri="file:///w/a.py", name="a.py"),
        *(Text(text=f"<previous_user_message>{prompt}</previous_user_message>") for prompt in prompts),
        Text(text=f"<system_context>{counted}</system_context>"),
    )


def test_repeated_earlier_prompts_are_removed() -> None:
    link = Link(uri="file:///w/a.py", name="a.py")
    assert without_repeated_prompts(repeating("third\nline", "second", "first"), is_first=False) == (
        link,
        Text(text="third\nline"),
    )
    assert without_repeated_prompts(repeating("only"), is_first=True) == (link, Text(text="only"))


def test_earlier_prompts_stay_in_the_first_prompt_of_a_session_oldest_first() -> None:
    link, third, second, first, _ = repeating("third", "second", "first")
    assert without_repeated_prompts((link, third, second, first, _), is_first=True) == (
        link,
        first,
        second,
        Text(text="third"),
    )


@pytest.mark.parametrize(
    "parts",
    [
        (Text(text="what does <previous_user_message>a</previous_user_message> mean?"),),
        (Text(text="<previous_user_message>a</previous_user_message>"),),
        repeating("a", "b", told=3),
        repeating(" "),
        repeating(),
    ],
)
def test_prompts_that_only_resemble_repeated_ones_are_unchanged(parts: tuple[Part, ...]) -> None:
    assert without_repeated_prompts(parts, is_first=False) == parts


def test_a_count_of_prompts_that_is_no_count_changes_nothing() -> None:
    parts = repeating("only", told="9" * 5_000)
    assert without_repeated_prompts(parts, is_first=False) == parts
