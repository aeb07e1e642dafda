"""How an answer is built from updates."""

from __future__ import annotations

import base64
from typing import Any

from crow_channels.state import Prompt
from crow_channels.turn import MAX_TEXT, Replay, Turn

Files = list[tuple[int, str, str, bytes]]


def turn(files: Files | None = None, *, shows_calls: bool = True) -> Turn:
    prompt = Prompt(
        number=1,
        chat="c",
        place="p",
        message="m",
        user="u",
        principal="ann",
        blocks=[{"type": "text", "text": "do it"}],
        stage="sent",
    )
    kept: Files = [] if files is None else files
    return Turn(prompt, lambda *file: kept.append(file), shows_calls=shows_calls)


def update(kind: str, cursor: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"update": {"sessionUpdate": kind, **fields}, "_meta": {"acp/cursor": cursor} if cursor else {}}


def said(text: str, message: str = "a", kind: str = "agent_message_chunk") -> dict[str, Any]:
    return update(kind, content={"type": "text", "text": text}, messageId=message)


def test_messages_and_calls_are_paragraphs_and_the_cursor_moves_along() -> None:
    one = turn()
    updates = [
        said("Let me "),
        said("look."),
        update("tool_call", "e5", toolCallId="c1", title="Read\na.txt"),
        update("tool_call", toolCallId="c1", title="Read a.txt"),
        update("tool_call_update", toolCallId="c1", status="completed"),
        said("Done.", "b"),
    ]
    assert [one.apply(each) for each in updates] == [True, True, True, False, False, True]
    assert one.prompt.text == "Let me look.\n\n⚙ Read a.txt\n\nDone."
    assert (one.prompt.cursor, one.prompt.has_begun) == ("e5", True)


def test_turns_of_other_clients_are_not_part_of_the_answer() -> None:
    one = turn()
    for each in (
        said("something else", "u1", "user_message_chunk"),
        said("theirs", "a1"),
        update("tool_call", toolCallId="c1", title="Theirs"),
        said("do it", "u2", "user_message_chunk"),
        said("and its second block", "u2", "user_message_chunk"),
        said("mine", "a2"),
        said("more", "u3", "user_message_chunk"),
        said("theirs", "a3"),
        update("session_info_update", _meta={"acp/turnState": {"state": "idle"}}),
        said("mine too", "a2"),
    ):
        one.apply(each)
    assert one.prompt.text == "minemine too"


def test_the_answer_is_found_in_a_whole_history() -> None:
    one = turn()
    one.prompt.text = "half an"
    replay = Replay(one)
    for each in (said("do it", "u1", "user_message_chunk"), said("old", "a1"), said("x", "u2", "user_message_chunk")):
        replay.apply(each)
    for each in (said("do it", "u3", "user_message_chunk"), said("half an answer", "a3")):
        replay.apply(each)
    replay.finish()
    assert one.prompt.text == "half an answer"
    other = turn()
    other.prompt.text = "kept"
    missing = Replay(other)
    missing.apply(said("x", "u2", "user_message_chunk"))
    missing.finish()
    assert other.prompt.text == "kept"


def test_images_are_kept_once_and_bounded() -> None:
    files: Files = []
    one = turn(files, shows_calls=False)
    image = {"type": "image", "mimeType": "image/png", "data": base64.b64encode(b"png").decode()}
    call = update("tool_call_update", toolCallId="c", content=[{"type": "content", "content": image}])
    for each in (call, call, *(update("agent_message_chunk", content=image, messageId=f"m{n}") for n in range(20))):
        one.apply(each)
    one.apply(update("agent_message_chunk", content=image | {"data": "not base64!"}, messageId="x"))
    one.apply(update("agent_message_chunk", content=image | {"mimeType": "text/html"}, messageId="y"))
    assert [file[:2] for file in files] == [(number, f"image-{number + 1}.png") for number in range(10)]
    assert files[0][3] == b"png"
    assert one.prompt.text == ""


def test_an_endless_answer_is_cut() -> None:
    one = turn()
    for _ in range(25):
        one.apply(said("x" * 50_000))
    assert len(one.prompt.text) < MAX_TEXT + 100
    assert one.prompt.text.endswith("(The answer is too long for a chat and ends here.)")
