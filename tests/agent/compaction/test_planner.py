"""Tests the plan, and what a checkpoint keeps besides its summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from crow.agent.compaction import Reason
from crow.agent.compaction.budget import CompactionPolicy, Measure, limits_for
from crow.agent.compaction.checkpoint import (
    files_in_use,
    files_touched,
    masking_order,
    reads_in_use,
    select_pins,
    select_skills,
)
from crow.agent.compaction.planner import Decision, Noop, plan
from crow.domain.conversation import Projection, for_model
from crow.domain.entries import (
    Announcement,
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    Diff,
    File,
    Location,
    Mask,
    Pin,
    Prompt,
    Restore,
    Skill,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.messages import Image, Text, ToolCall, ToolMessage
from crow.domain.rendering import checkpoint_message, parts_text
from tests.support.paths import PathBuilder, result_of, said, user

SYSTEM = Prompt(system="s" * 4_000, tools=(), cwd="/", model="m")
NEW_SKILL = Announcement(title="new")
END = TurnEnd(stop="end_turn")


def decide(
    *bodies: Body,
    window: int = 16_000,
    reason: Reason = "threshold",
    used: int | None = None,
    is_configured: bool = True,
) -> tuple[Decision, Projection]:
    projection = Projection(PathBuilder(SYSTEM, *bodies).entries)
    context = projection.context()
    limits = limits_for(window, None, context.fixed_estimate, CompactionPolicy(), is_configured=is_configured)
    found = Measure(
        used=context.estimate if used is None else used, fixed=context.fixed_estimate, scale=1.0, is_reported=False
    )
    return plan(projection, limits, found, reason), projection


def exchange(question: str, answer: str) -> tuple[User, Assistant, TurnEnd]:
    return user(question), said(answer), END


def test_below_the_threshold_nothing_is_done() -> None:
    assert decide(*exchange("q" * 8_000, "a" * 8_000))[0] == Noop(why="There is enough room.")


def test_old_outputs_are_masked_first_if_that_is_enough() -> None:
    bodies: list[Body] = [user("go"), said("", "a"), result_of(3, 0, "x" * 50_000), said("well"), END, user("next")]
    decision, projection = decide(*bodies)
    assert isinstance(decision, Mask)
    assert decision.before > 4
    assert decision.tokens_after < projection.context().estimate - 10_000


def test_results_that_the_model_has_not_seen_are_never_masked() -> None:
    bodies: list[Body] = [user("go"), said("", "a", "b"), result_of(3, 0, "x" * 52_000), result_of(3, 1, "short")]
    assert not isinstance(decide(*bodies)[0], Mask)


def ran_calls(*calls: tuple[str, str, str]) -> PathBuilder:
    """A prompt, then steps of one call each: name, path or command, output."""
    path = PathBuilder(SYSTEM, user("go"))
    for name, argument, output in calls:
        key = "command" if name == "shell" else "path"
        called = ToolCall(id="", name=name, arguments=json.dumps({key: argument}))
        step = path.add(Assistant(text="", message_id="m", calls=(called,)))
        locations = () if name == "shell" else (Location(path=argument),)
        announcement = Announcement(title=name, locations=locations)
        ref = CallRef(assistant=step.id, index=0)
        path.add(ToolResult(call=ref, name=name, text=output, announcement=announcement))
    return path


def outputs(path: PathBuilder) -> list[int]:
    return [entry.id for entry in path.entries if isinstance(entry.body, ToolResult)]


def test_superseded_outputs_are_masked_first_and_the_newest_version_of_each_file_last() -> None:
    path = ran_calls(
        ("read_file", "/a", "old a"),
        ("shell", "make", "first run"),
        ("read_file", "/b", "b"),
        ("read_file", "/c", "c, rewritten below"),
        ("shell", "ls", "same listing"),
        ("read_file", "/a", "new a"),
        ("shell", "make", "second run"),
        ("write_file", "/c", "wrote"),
        ("shell", "ls -1", "same listing"),
        ("edit_file", "/b", "edited"),
    )
    old_a, make, b, c, ls, new_a, make_again, wrote, ls_again, edited = outputs(path)
    assert masking_order(path.entries) == (old_a, make, c, ls, make_again, wrote, ls_again, edited, new_a, b)


def test_partial_read_is_superseded_only_by_the_same_part_or_the_whole_file() -> None:
    path = PathBuilder(SYSTEM, user("go"))
    ranges: list[dict[str, object]] = [{"line": 1, "limit": 9}, {"line": 10, "limit": 9}, {"line": 1, "limit": 9}, {}]
    for lines in ranges:
        arguments = json.dumps({"path": "/a", **lines})
        call = ToolCall(id="", name="read_file", arguments=arguments)
        step = path.add(Assistant(text="", message_id="m", calls=(call,)))
        path.add(result_of(step.id, 0, f"{arguments} {step.id}"))
    first, second, third, whole = outputs(path)
    assert masking_order([entry for entry in path.entries if entry.id != whole]) == (first, second, third)
    assert masking_order(path.entries) == (first, second, third, whole)
    result = path.entries[-1].body
    assert isinstance(result, ToolResult)
    failed = replace(path.entries[-1], body=replace(result, is_error=True))
    assert masking_order([*path.entries[:-1], failed])[0] == first
    assert masking_order([*path.entries[:-1], failed])[-1] == third


def test_lines_that_a_path_asks_for_are_a_part_of_the_file_and_the_start_of_a_long_file_is_not() -> None:
    whole, part = ("read_file", "/a", "def a"), ("read_file", "/a", "[lines 1-2 of 90]\ndef a")
    long = ("read_file", "/a", "[lines 1-2 of 9,000]\ndef a\n[continue with line=3]")
    path, again = ran_calls(whole, part), ran_calls(whole, long)
    assert [file.entry for file in files_in_use(None, path.entries)] == outputs(path)[:1]
    assert [file.entry for file in files_in_use(None, again.entries)] == outputs(again)[1:]


def test_files_in_use_are_not_masked_as_long_as_they_fit_their_share() -> None:
    read = [("read_file", f"/{number}", f"{number} " + "x" * 4_000) for number in range(3)]
    logs = [("shell", f"make {number}", f"{number} " + "y" * 4_000) for number in range(10)]
    path = ran_calls(*read, *logs)
    for body in (said("well"), END, user("next")):
        path.add(body)
    bodies = [entry.body for entry in path.entries[1:]]
    decision, projection = decide(*bodies)
    assert isinstance(decision, Mask)
    reads = outputs(path)[:3]
    assert set(reads) <= set(decision.exceptions)
    assert reads_in_use(None, projection.entries, 10_000) == frozenset(reads)
    assert reads_in_use(None, projection.entries, 1_500) == frozenset(reads[2:])
    # The budget is counted from the file that was used last. Files that are only changed have no text to keep.
    edit = ToolCall(id="", name="edit_file", arguments=json.dumps({"path": "/0"}))
    step = path.add(Assistant(text="", message_id="m", calls=(edit,)))
    announcement = Announcement(title="edit_file", locations=(Location(path="/0"),))
    path.add(replace(result_of(step.id, 0, "edited", name="edit_file"), announcement=announcement))
    assert reads_in_use(None, path.entries, 1_500) == frozenset(reads[:1])
    too_many = [("read_file", f"/{number}", f"{number} " + "x" * 4_000) for number in range(14)]
    many = ran_calls(*too_many)
    for body in (said("well"), END, user("next")):
        many.add(body)
    assert isinstance(decide(*[entry.body for entry in many.entries[1:]])[0], Mask)


def in_use(*bodies: Body, reads: Sequence[str]) -> list[str]:
    """The files in use after reading some and adding entries, most important first."""
    path = ran_calls(*(("read_file", name, f"{name} " + "x" * 400) for name in reads))
    for body in bodies:
        path.add(body)
    return [file.path for file in files_in_use(None, path.entries)]


def test_a_file_that_the_model_names_is_in_use() -> None:
    reads = ["/repo/src/a.py", "/repo/src/b.py", "/repo/lib/b.py", "/repo/make", "/repo/c.py"]
    assert in_use(reads=reads) == reads[::-1]
    assert in_use(said("As /repo/src/a.py says."), reads=reads)[0] == reads[0]
    assert in_use(said("See `src/b.py`: it (like a.py:12) is right."), reads=reads)[:2] == [reads[0], reads[1]]
    call = ToolCall(id="", name="shell", arguments=json.dumps({"command": "pytest lib/b.py && make"}))
    assert in_use(Assistant(text="", message_id="m", calls=(call,)), reads=reads)[:2] == [reads[2], reads[4]]
    # Two files are called b.py, and "make" may be anything.
    assert in_use(said("b.py, then make, aa.py, d.py. And a.pyx"), reads=reads) == reads[::-1]
    assert in_use(said("In C:\\repo\\a.py."), reads=["C:\\repo\\a.py", "/x.py"])[0] == "C:\\repo\\a.py"


def test_less_of_the_recent_messages_is_kept_if_files_in_use_need_the_room() -> None:
    def kept(*files: tuple[str, str, str]) -> int:
        path = ran_calls(*files)
        for _ in range(16):
            for body in exchange("q" * 1_000, "a" * 1_000):
                path.add(body)
        decision, projection = decide(*[entry.body for entry in path.entries[1:]], used=15_000, reason="command")
        assert isinstance(decision, tuple)
        first = decision[0].body.first_kept
        return sum(1 for entry in projection.entries if first is not None and entry.id >= first)

    files = [("read_file", f"/{number}", f"{number} " + "x" * 4_000) for number in range(4)]
    assert kept(*files) < kept(files[0])


def test_only_as_many_outputs_are_masked_as_the_target_needs() -> None:
    files = [("read_file", f"/{number}", f"{number} " + "x" * 8_000) for number in range(4)]
    logs = [("shell", f"make {number}", f"{number} " + "y" * 8_000) for number in range(2)]
    path = ran_calls(files[0], logs[0], *files[1:], logs[1], ("shell", "end", "z" * 4_000))
    for body in (said("well"), END, user("n" * 2_000)):
        path.add(body)
    decision, projection = decide(*[entry.body for entry in path.entries[1:]])
    *_, third, fourth, _, end = outputs(path)
    assert isinstance(decision, Mask)
    assert (decision.before, decision.exceptions) == (end + 1, (third, fourth))
    limits = limits_for(16_000, None, projection.context().fixed_estimate, CompactionPolicy())
    assert decision.tokens_after <= limits.target < decision.tokens_after + 1_900
    masked = PathBuilder(
        *[entry.body for entry in path.entries], Mask(before=decision.before, exceptions=(third, fourth))
    )
    shown = [message.text[:1] for message in for_model(masked.entries).messages if isinstance(message, ToolMessage)]
    assert shown == ["[", "[", "[", "2", "3", "[", "["]


def test_compact_command_summarises_without_masking_first() -> None:
    bodies: list[Body] = [user("go"), said("", "a"), result_of(3, 0, "x" * 50_000), said("well"), END]
    assert isinstance(decide(*bodies, reason="command")[0], tuple)


def test_cut_prefers_a_user_message() -> None:
    long = [exchange("q" * 8_000, "a" * 8_000) for _ in range(3)]
    last = (user("u" * 4_000), said("b" * 4_000), END)
    decision, projection = decide(*[body for bodies in long for body in bodies], *last)
    assert isinstance(decision, tuple)
    draft = decision[0]
    kept = next(entry for entry in projection.entries if entry.id == draft.body.first_kept)
    assert kept.body == last[0]


def test_cut_never_separates_a_call_from_its_results() -> None:
    steps: list[Body] = [user("go")]
    for step in range(12):
        steps += [said("", "a", "b"), result_of(3 + 3 * step, 0, "y" * 5_000), result_of(3 + 3 * step, 1, "x" * 380)]
    decision, projection = decide(*steps, reason="command")
    bodies = {entry.id: entry.body for entry in projection.entries}
    assert isinstance(decision, tuple)
    kept = [bodies[draft.body.first_kept] for draft in decision if draft.body.first_kept is not None]
    assert kept
    assert all(isinstance(body, Assistant) for body in kept)


def test_unanswered_messages_are_kept_even_if_they_are_longer_than_the_tail() -> None:
    old = [exchange("q" * 6_400, "a" * 6_400) for _ in range(3)]
    decision, projection = decide(*[body for bodies in old for body in bodies], user("n" * 11_000))
    assert isinstance(decision, tuple)
    assert decision[0].body.first_kept == projection.entries[-1].id


def test_tail_that_does_not_fit_beside_the_longest_summary_is_not_kept() -> None:
    decision, _ = decide(*exchange("q" * 6_400, "a" * 6_400), user("n" * 36_000))
    assert isinstance(decision, tuple)
    assert [draft.body.first_kept for draft in decision] == [None]


def test_nothing_new_since_a_checkpoint_is_not_compacted_again() -> None:
    checkpoint = Checkpoint(compaction_id="k", summary="S", first_kept=None)
    decision, _ = decide(*exchange("q" * 9_000, "a" * 9_000), checkpoint, reason="command")
    assert decision == Noop(why="Nothing is new since the last compaction.")


def test_short_conversation_is_not_summarised_on_command() -> None:
    decision, _ = decide(*exchange("q", "a"), reason="command")
    assert decision == Noop(why="The conversation is too short to compact.", is_too_short=True)


def test_window_filled_by_system_message_and_tools_is_too_small() -> None:
    assert decide(user("q" * 8_000), window=3_000)[0] == ()


def test_any_shorter_request_is_accepted_in_a_tiny_learned_window() -> None:
    bodies: list[Body] = [*exchange("q" * 8_000, "a" * 8_000), user("n" * 400)]
    decision, projection = decide(*bodies, window=1_200, is_configured=False)
    assert isinstance(decision, tuple)
    kept, nothing_kept = decision
    assert (kept.body.first_kept, nothing_kept.body.first_kept) == (projection.entries[-1].id, None)
    assert kept.max_tokens == projection.context().estimate * 9 // 10
    assert decide(user("n" * 400), window=1_200, is_configured=False)[0] == ()


def test_later_drafts_keep_less_and_the_last_keeps_nothing() -> None:
    old = [exchange("q" * 4_000, "a" * 4_000) for _ in range(8)]
    decision, _ = decide(*[body for bodies in old for body in bodies])
    assert isinstance(decision, tuple)
    starts = [draft.start for draft in decision]
    assert starts == sorted(starts)
    assert decision[-1].body.first_kept is None


def test_pins_are_the_first_and_last_message_and_the_newest_that_fit() -> None:
    path = PathBuilder(*[user(f"{number} " + "word " * 40) for number in range(10)])
    pins = select_pins(None, path.entries, 300)
    assert pins == tuple(Pin(entry=entry, text=f"{entry - 1} " + "word " * 40) for entry in (1, 8, 9, 10))


def test_long_first_and_last_pins_are_cut_to_half_of_the_budget_and_name_their_entry() -> None:
    path = PathBuilder(user("a" * 9_000), user("middle " * 50), user("b" * 9_000))
    first, last = select_pins(None, path.entries, 400)
    assert (first.entry, last.entry) == (1, 3)
    for pin in (first, last):
        assert f"recall with entry {pin.entry} " in pin.text
        assert 500 < len(pin.text) < 900


def test_pins_of_the_previous_checkpoint_are_kept_and_images_become_text() -> None:
    picture = User(parts=(Text(text="like this"), Image(data="AA", mime_type="image/png")), message_id="m")
    entry = replace(PathBuilder(picture).entries[0], id=40)
    previous = Checkpoint(compaction_id="k", summary="S", first_kept=30, pins=(Pin(entry=3, text="the goal"),))
    assert select_pins(previous, [entry], 1_000) == (
        Pin(entry=3, text="the goal"),
        Pin(entry=40, text="like this\n[An image.]"),
    )


def test_no_user_message_gives_no_pins() -> None:
    assert select_pins(None, PathBuilder(said("hello")).entries, 1_000) == ()


def test_newest_skills_are_kept_whole_then_cut_then_by_name() -> None:
    path = PathBuilder(
        Skill(name="old", text="o" * 400),
        Skill(name="long", text="l" * 4_000),
        Skill(name="new", text="first version"),
        said("", "a"),
        ToolResult(call=CallRef(assistant=4, index=0), name="skill", text="n" * 400, announcement=NEW_SKILL),
    )
    kept = select_skills(None, path.entries, 400)
    assert [(skill.entry, skill.name) for skill in kept] == [(1, "old"), (2, "long"), (5, "new")]
    assert kept[2].text == "n" * 400
    assert "recall with entry 2 " in kept[1].text
    assert kept[0].text == ""
    previous = Checkpoint(compaction_id="k", summary="S", first_kept=9, skills=kept)
    assert select_skills(previous, [], 400) == kept
    shown = parts_text(checkpoint_message(previous).parts)
    assert "- old (recall with entry 1 gives it)" in shown
    assert f'<skill name="new" entry="5">\n{"n" * 400}\n</skill>' in shown


def test_checkpoint_names_the_entries_that_it_covers_also_after_another() -> None:
    old = [exchange("q" * 8_000, "a" * 8_000) for _ in range(4)]
    bodies: list[Body] = [body for bodies in old for body in bodies]
    first, projection = decide(*bodies)
    assert isinstance(first, tuple)
    draft = first[0].body
    assert draft.first_kept is not None
    assert (draft.first_covered, draft.last_covered) == (1, draft.first_kept - 1)
    later, _ = decide(*bodies, replace(draft, compaction_id="k", summary="S"), *bodies)
    assert isinstance(later, tuple)
    again = later[0].body
    assert again.first_kept is not None
    assert (again.first_covered, again.last_covered) == (1, again.first_kept - 1)
    text = parts_text(checkpoint_message(again).parts)
    assert f"It replaces the entries 1 to {again.last_covered}." in text
    assert len(projection.entries) == 13


def ran(name: str, index: int, announcement: Announcement, *, is_error: bool = False) -> ToolResult:
    return ToolResult(
        call=CallRef(assistant=1, index=index), name=name, text="", announcement=announcement, is_error=is_error
    )


def called(*named: tuple[str, str]) -> Assistant:
    calls = tuple(ToolCall(id="", name=name, arguments=json.dumps({"path": path})) for name, path in named)
    return Assistant(text="", message_id="m", calls=calls)


def test_files_come_from_arguments_announcements_and_saved_contents() -> None:
    nothing = Announcement(title="t")
    located = Announcement(title="t", kind="read", locations=(Location(path="/abs/read"),))
    diff = Announcement(title="t", kind="edit", diffs=(Diff(path="/abs/diffed", old_text="a", new_text="b"),))
    path = PathBuilder(
        called(("read_file", "rel"), ("read_file", "x"), ("write_file", "/w"), ("apply", "y"), ("edit_file", "/e")),
        ran("read_file", 0, nothing),
        ran("read_file", 1, located),
        ran("write_file", 2, nothing),
        ran("apply", 3, diff),
        ran("edit_file", 4, nothing, is_error=True),
        File(call=CallRef(assistant=1, index=4), path="/half-written", before=None, after_hash="0"),
        File(call=CallRef(assistant=1, index=4), path="/workspace", before=None, after_hash="", change_set="c1"),
    )
    assert files_touched(None, path.entries) == (("rel", "/abs/read"), ("/w", "/abs/diffed", "/half-written"))


def test_files_accumulate_over_checkpoints_and_a_modified_file_is_not_listed_as_read() -> None:
    previous = Checkpoint(
        compaction_id="k", summary="S", first_kept=None, files_read=("/a", "/b"), files_modified=("/m", "/n")
    )
    path = PathBuilder(called(("write_file", "/a"), ("edit_file", "/m")))
    path.add(ran("write_file", 0, Announcement(title="t")))
    path.add(ran("edit_file", 1, Announcement(title="t")))
    assert files_touched(previous, path.entries) == (("/b",), ("/n", "/a", "/m"))


def test_arguments_without_a_path_name_no_file() -> None:
    calls = tuple(ToolCall(id="", name="read_file", arguments=arguments) for arguments in ("[1]", "{", '{"path": 3}'))
    path = PathBuilder(Assistant(text="", message_id="m", calls=calls))
    for index in range(3):
        path.add(ran("read_file", index, Announcement(title="t")))
    assert files_touched(None, path.entries) == ((), ())


def test_an_unloaded_skill_is_in_no_message_and_no_later_checkpoint() -> None:
    path = PathBuilder(user("go"), said("", "skill"))
    path.add(Skill(name="release", text="Tag it."))
    kept = select_skills(None, path.entries, 1_000)
    assert [skill.name for skill in kept] == ["release"]
    path.add(Checkpoint(compaction_id="c", summary="S", first_kept=None, skills=kept))
    assert Projection(path.entries).loaded_skills() == {"release": kept[0].entry}
    path.add(Restore(entry=kept[0].entry, skill="release"))
    projection = Projection(path.entries)
    assert projection.loaded_skills() == {}
    assert "Tag it." not in repr(projection.context().messages)
    assert projection.checkpoint_body is not None
    assert select_skills(projection.checkpoint_body, path.entries[-1:], 1_000) == ()
    path.add(Skill(name="release", text="Tag it twice."))
    again = Projection(path.entries)
    assert "Tag it twice." in repr(again.context().messages)
    assert "Tag it." not in repr(again.context().messages)
    later = select_skills(projection.checkpoint_body, path.entries[-2:], 1_000)
    assert [skill.text for skill in later] == ["Tag it twice."]
