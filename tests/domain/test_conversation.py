"""What the model sees: rules by example, laws by property."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.conversation import Context, Projection, for_model
from crow.domain.entries import (
    Announcement,
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    Entry,
    Mask,
    Note,
    Pin,
    PlanItem,
    Prompt,
    Remark,
    Reminder,
    Restore,
    Skill,
    Started,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.messages import (
    AssistantMessage,
    Image,
    Link,
    Message,
    Resource,
    SystemMessage,
    Text,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from crow.domain.rendering import EFFECTS_UNKNOWN, INTERRUPTED, NO_ANSWER, NO_QUESTION, NOT_RUN
from tests.support.amounts import examples
from tests.support.paths import (
    PathBuilder,
    breaks,
    damaged,
    histories,
    plain_histories,
    problems,
    result_of,
    said,
    user,
)

END = TurnEnd(stop="end_turn")


def messages(*bodies: object) -> list[Message]:
    """What follows the system message for a path of `bodies`; ids count from 1."""
    return list(for_model(PathBuilder(*bodies).entries).messages[1:])  # type: ignore[arg-type]


def asks(text: str) -> UserMessage:
    return UserMessage(parts=(Text(text=text),))


def test_empty_path_has_one_empty_system_message() -> None:
    assert for_model([]) == Context(tools=(), messages=(SystemMessage(text=""),))


def test_newest_prompt_entry_gives_system_message_and_tools() -> None:
    old = Prompt(system="old", tools=(), cwd="/a", model="m")
    new = Prompt(system="new", tools=(), cwd="/b", model="m")
    context = for_model(PathBuilder(old, user("hi"), new).entries)
    assert context.messages == (SystemMessage(text="new"), asks("hi"))
    assert context.system == "new"


def test_results_stand_in_call_order_however_they_landed() -> None:
    assert messages(user("go"), said("", "a", "b"), result_of(2, 1, "second"), result_of(2, 0, "first")) == [
        asks("go"),
        AssistantMessage(text="", calls=said("", "a", "b").calls),
        ToolMessage(call_id="a", text="first"),
        ToolMessage(call_id="b", text="second"),
    ]


def test_call_without_result_is_answered_not_run_or_effects_unknown_if_it_had_started() -> None:
    started = Started(call=CallRef(assistant=2, index=1), why="mode auto", announcement=Announcement(title="t"))
    assert messages(user("go"), said("", "a", "b"), started, TurnEnd(stop="cancelled"), user("next"))[2:] == [
        ToolMessage(call_id="a", text=NOT_RUN, is_error=True),
        ToolMessage(call_id="b", text=EFFECTS_UNKNOWN, is_error=True),
        asks("next"),
    ]


def test_result_that_comes_after_its_step_was_given_up_is_dropped() -> None:
    path = [user("go"), said("", "a"), TurnEnd(stop="cancelled")]
    late = [*path, result_of(2, 0, "late"), user("next")]
    assert messages(*late) == messages(*path, Note(about="label", value=""), user("next"))


def test_results_of_unknown_or_answered_calls_are_dropped() -> None:
    strays = [result_of(2, 0, "again"), result_of(2, 7, "no such index"), result_of(99, 0, "no such answer")]
    path = [user("go"), said("", "a"), result_of(2, 0, "ok")]
    assert messages(*path, *strays) == messages(*path)


def test_repeated_call_ids_are_renamed_in_call_and_result() -> None:
    path = [user("go"), said("", "a"), result_of(2, 0, "one"), said("", "a", "a"), result_of(4, 0), result_of(4, 1)]
    calls = [call.id for m in messages(*path) if isinstance(m, AssistantMessage) for call in m.calls]
    results = [m.call_id for m in messages(*path) if isinstance(m, ToolMessage)]
    assert calls == results == ["a", "call_4_0", "call_4_1"]


def test_fixed_line_stands_between_two_prompts_and_an_empty_answer_is_dropped() -> None:
    path = [user("one"), said(""), END, user("two")]
    assert messages(*path) == [asks("one"), AssistantMessage(text=NO_ANSWER), asks("two")]


def test_fixed_line_stands_before_an_answer_to_nothing() -> None:
    assert messages(said("hello")) == [asks(NO_QUESTION), AssistantMessage(text="hello")]


def test_interrupted_answer_is_marked_and_loses_its_opaque_fields() -> None:
    broken = Assistant(text="I will", message_id="m", finish="interrupted", opaque={"signature": "half"})
    assert messages(user("go"), broken)[1] == AssistantMessage(text=f"I will\n\n{INTERRUPTED}")


def test_reminder_joins_the_prompt_of_its_turn_and_a_prompt_joins_the_reminder_before_it() -> None:
    joined = [UserMessage(parts=(Text(text="go"), Text(text="mode: plan")))]
    assert messages(user("go"), Reminder(text="mode: plan")) == joined
    assert messages(Reminder(text="go"), user("mode: plan")) == joined


def test_reminder_after_the_end_of_a_turn_does_not_change_what_was_sent() -> None:
    path = [user("go"), TurnEnd(stop="error"), Reminder(text="changed"), user("again")]
    assert messages(*path) == [
        asks("go"),
        AssistantMessage(text=NO_ANSWER),
        UserMessage(parts=(Text(text="changed"), Text(text="again"))),
    ]


def test_reminder_after_an_empty_answer_does_not_change_what_was_sent() -> None:
    path = [user("go"), said(""), Reminder(text="changed")]
    assert messages(*path) == [asks("go"), AssistantMessage(text=NO_ANSWER), asks("changed")]


def test_reminders_between_results_follow_all_of_them() -> None:
    path = [user("go"), said("", "a", "b"), result_of(2, 0), Skill(name="s", text="do so"), result_of(2, 1)]
    assert messages(*path)[2:] == [
        ToolMessage(call_id="a", text="ok"),
        ToolMessage(call_id="b", text="ok"),
        asks('<skill name="s">\ndo so\n</skill>'),
    ]


def test_entries_for_the_client_alone_are_not_rendered() -> None:
    shown = [Remark(text="to the user", message_id="r"), Note(about="model", value="t"), Mask(before=0)]
    assert messages(user("go"), *shown) == [asks("go")]


def test_cut_result_shows_head_and_tail_with_size_and_entry() -> None:
    text = "a" * 600 + "b" * 600
    (*_, shown) = messages(user("go"), said("", "a"), result_of(2, 0, text, cut=300))
    assert isinstance(shown, ToolMessage)
    assert shown.text.startswith("a" * 200 + "\n[")
    assert shown.text.endswith("]\n" + "b" * 100)
    assert "900 of 1200 characters" in shown.text
    assert "entry 3" in shown.text


def test_cut_prompt_shortens_its_longest_text_and_keeps_the_others() -> None:
    image, link = Image(data="AA", mime_type="image/png"), Link(uri="file:///b", name="b")
    body = User(
        parts=(Text(text="look"), Resource(uri="file:///a", text="z" * 5000), image, link), message_id="m", cut=100
    )
    ((words, resource, *others),) = [message.parts for message in messages(body) if isinstance(message, UserMessage)]
    assert words == Text(text="look")
    assert others == [image, link]
    assert isinstance(resource, Resource)
    assert resource.text.count("z") == 96
    assert "entry 1" in resource.text


def test_mask_hides_long_outputs_before_it_but_not_plan_skills_and_short_ones() -> None:
    plan = (PlanItem(content="p"),)
    path = [
        user("go"),
        said("", "a", "b", "c", "d"),
        result_of(2, 0, "x" * 5000),
        result_of(2, 1, "short"),
        result_of(2, 2, "y" * 5000, name="update_plan", plan=plan),
        result_of(2, 3, "z" * 5000, name="skill"),
        said("", "e"),
        result_of(7, 0, "w" * 5000),
        Mask(before=7),
    ]
    texts = [message.text for message in messages(*path) if isinstance(message, ToolMessage)]
    assert texts == [
        "[Output of 5000 characters elided; recall with entry 3 gives it.]",
        "short",
        "y" * 5000,
        "z" * 5000,
        "w" * 5000,
    ]


def test_mask_shows_its_exceptions_unless_another_mask_hides_them() -> None:
    outputs = [result_of(2, index, letter * 5000) for index, letter in enumerate("xyz")]
    path = [user("go"), said("", "a", "b", "c"), *outputs, said("done"), END]

    def shown(*masks: Mask) -> list[str]:
        return [message.text[:1] for message in messages(*path, *masks) if isinstance(message, ToolMessage)]

    assert shown(Mask(before=6, exceptions=(4,))) == ["[", "y", "["]
    assert shown(Mask(before=4), Mask(before=6, exceptions=(3, 4))) == ["[", "y", "["]
    assert shown(Mask(before=6, exceptions=(4,)), Mask(before=5)) == ["[", "[", "["]


def test_mask_hides_nothing_that_comes_after_it() -> None:
    path = [user("go"), Mask(before=99), said("", "a"), result_of(3, 0, "x" * 5000)]
    assert messages(*path)[-1] == ToolMessage(call_id="a", text="x" * 5000)


def test_restored_mask_and_checkpoint_no_longer_count() -> None:
    path: list[Body] = [user("go"), said("", "a"), result_of(2, 0, "x" * 5000), said("done"), END]
    hidden = [*path, Mask(before=4), Checkpoint(compaction_id="k", summary="S", first_kept=None)]
    restored = for_model(PathBuilder(*hidden, Restore(entry=6), Restore(entry=7)).entries)
    assert restored == for_model(PathBuilder(*path).entries)


def test_checkpoint_is_one_user_message_and_then_the_tail() -> None:
    checkpoint = Checkpoint(
        compaction_id="k",
        summary="## Goal\nShip it.",
        first_kept=3,
        pins=(Pin(entry=1, text="build a parser"),),
        files_read=("/r1", "/r2"),
        files_modified=("/m1", "/m2"),
        mode="plan",
        plan=(PlanItem(content="write", status="completed"), PlanItem(content="test")),
    )
    found = messages(user("build a parser"), said("yes"), user("and docs"), said("fine"), checkpoint)
    summary = found[0]
    assert isinstance(summary, UserMessage)
    assert len(summary.parts) == 1
    part = summary.parts[0]
    assert isinstance(part, Text)
    for words in (
        "## Goal\nShip it.",
        '<message entry="1">\nbuild a parser\n</message>',
        "- [x] write\n- [ ] test",
        "- /m2\n- /m1",
        "- /r2\n- /r1",
        "Permission mode: plan",
    ):
        assert words in part.text
    assert found[1:] == [AssistantMessage(text=NO_ANSWER), asks("and docs"), AssistantMessage(text="fine")]


def test_lists_of_a_checkpoint_are_bounded_newest_first() -> None:
    files = tuple(f"/proj/file{number}" for number in range(100))
    checkpoint = Checkpoint(compaction_id="k", summary="S", first_kept=None, files_modified=files, lists_cut=40)
    (message,) = messages(user("go"), checkpoint)
    assert isinstance(message, UserMessage)
    assert isinstance(message.parts[0], Text)
    assert "- /proj/file99\n- /proj/file98\n- and 98 more" in message.parts[0].text


def test_newest_checkpoint_covers_the_ones_before() -> None:
    first = Checkpoint(compaction_id="k1", summary="FIRST", first_kept=None)
    second = Checkpoint(compaction_id="k2", summary="SECOND", first_kept=3)
    found = messages(user("one"), first, user("two"), said("2"), second)
    assert [type(message) for message in found] == [UserMessage, AssistantMessage, UserMessage, AssistantMessage]
    assert "FIRST" not in repr(found)
    assert "SECOND" in repr(found[0])
    assert found[2] == asks("two")


def test_projection_knows_what_is_in_force() -> None:
    prompt = Prompt(system="s", tools=(), cwd="/", model="m")
    plan = (PlanItem(content="p"),)
    result, note = result_of(3, 0, "ok", plan=plan), Note(about="mode", value="auto")
    bodies: list[Body] = [prompt, user("go"), said("", "a"), result, note]
    projection = Projection(PathBuilder(*bodies).entries)
    assert (projection.prompt, projection.plan, projection.mode, projection.checkpoint) == (prompt, plan, "auto", None)
    path = PathBuilder(*bodies, Checkpoint(compaction_id="k", summary="S", first_kept=None, mode="ask", plan=plan))
    projection = Projection(path.entries)
    assert (projection.prompt, projection.plan, projection.mode) == (prompt, plan, "ask")
    assert projection.checkpoint is path.entries[-1]


def test_checkpoint_drops_covered_entries_but_not_the_prompt_in_force() -> None:
    path = PathBuilder(Prompt(system="s", tools=(), cwd="/", model="m"), user("one"), said("1"), END, user("two"))
    projection = Projection()
    path.add(Checkpoint(compaction_id="k", summary="S", first_kept=5))
    for entry in path.entries:
        projection.add(entry)
    assert [entry.id for entry in projection.entries] == [1, 5, 6]


def test_restore_of_entries_that_are_not_in_memory_is_incomplete() -> None:
    path = PathBuilder(
        user("one"), said("1"), END, user("two"), Checkpoint(compaction_id="k", summary="S", first_kept=4)
    )
    projection = Projection(path.entries)
    projection.add(path.add(Restore(entry=5)))
    assert not projection.complete
    assert Projection(path.entries).complete
    assert len(Projection(path.entries).context().messages) == 4


@given(entries=damaged())
@settings(max_examples=examples(20))
def test_any_damaged_path_gives_a_valid_request(entries: list[Entry]) -> None:
    assert problems(for_model(entries).messages) == []


@given(entries=histories())
@settings(max_examples=examples(20))
def test_folding_entry_by_entry_gives_the_same_as_all_at_once(entries: list[Entry]) -> None:
    projection = Projection()
    for count, entry in enumerate(entries, 1):
        projection.add(entry)
        context = projection.context()
        if not projection.complete:
            return
        whole = for_model(entries[:count])
        assert context == whole
        assert (context.origins, context.estimates) == (whole.origins, whole.estimates)
        assert len(context.origins) == len(context.estimates) == len(context.messages)


@given(entries=histories())
@settings(max_examples=examples(20))
def test_the_entries_in_memory_are_enough_for_the_context(entries: list[Entry]) -> None:
    whole = Projection(entries)
    assert for_model(whole.entries) == whole.context()


@given(entries=plain_histories())
@settings(max_examples=examples(20))
def test_between_breaks_a_request_is_a_prefix_of_the_next_one(entries: list[Entry]) -> None:
    projection = Projection()
    sent: tuple[Message, ...] = ()
    for entry in entries:
        if breaks(entry.body):
            sent = ()
        if isinstance(entry.body, Assistant):  # the request that it answers was made just now
            now = projection.context().messages
            assert now[: len(sent)] == sent
            assert all(before is after for before, after in zip(sent, now, strict=False))
            sent = now
        projection.add(entry)


@given(entries=histories(), later=st.integers(0, 3))
@settings(max_examples=examples(20))
def test_no_entry_is_both_covered_and_rendered(entries: list[Entry], later: int) -> None:
    context = for_model(entries)
    checkpoint = Projection(entries).checkpoint
    if checkpoint is None:
        return
    assert isinstance(checkpoint.body, Checkpoint)
    first = checkpoint.body.first_kept or checkpoint.id + 1
    assert context.origins[1] == checkpoint.id
    assert all(origin >= first for origin in context.origins[2:])


def test_an_answer_keeps_its_calls_extras_and_reasoning() -> None:
    calls = (ToolCall(id="a", name="f", arguments="{}", extra={"index": 0}),)
    body = Assistant(
        text="t", message_id="m", thought="hm", calls=calls, opaque={"o": 1}, reasoning_field="r", endpoint="e"
    )
    result = ToolResult(call=CallRef(assistant=2, index=0), name="f", text="", announcement=Announcement(title="f"))
    assert messages(user("go"), body, result)[1:] == [
        AssistantMessage(text="t", calls=calls, thought="hm", opaque={"o": 1}, reasoning_field="r", endpoint="e"),
        ToolMessage(call_id="a", text="[No output.]"),
    ]
