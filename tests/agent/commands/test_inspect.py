"""Tests commands that show, choose and export, and the user's own commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crow.agent.templates import Template
from crow.domain.entries import Command, ToolResult, User
from crow.store import NewSession
from crow.tools.mcp.client import open_toolbox
from tests.agent.harness import Opened, Tool, opened, text
from tests.support.scripted_model import Say, ScriptedModel, call


async def typed(it: Opened, line: str) -> str:
    """Types a command and returns its answer."""
    await it.session.prompt(text(line))
    return [entry.body.answer for entry in await it.log() if isinstance(entry.body, Command)][-1]


async def test_search_finds_prompts_answers_and_titles(tmp_path: Path) -> None:
    async with opened(tmp_path, ScriptedModel(Say(text=["a heron stands still"]))) as it:
        await it.session.prompt(text("what about the heron?"))
        found = await typed(it, "/search heron")
        (heading, *lines) = found.splitlines()
        assert heading == "This session:"
        assert [line.split("(")[1].split(",")[0] for line in lines] == ["title", "assistant", "user"]
        other = NewSession(id="other", cwd="/", model="m", mode="ask", title="The \x1b[2Jheron")
        await it.store.create_session(other)
        assert "\n\n**“The \\x1b[2Jheron”** (`other`):\n- The " in await typed(it, "/search heron")
        assert await typed(it, "/search pelican") == "No matches for “pelican” in any session."
        assert "`/search` needs words" in await typed(it, "/search")


async def test_show_gives_the_whole_output_of_a_call(tmp_path: Path) -> None:
    long = "".join(f"line {number} ```\n" for number in range(9_000))

    async def shout() -> str:
        return long

    async def blank() -> str:
        return " "

    tools = {"shout": Tool("read", shout), "blank": Tool("read", blank)}
    model = ScriptedModel(Say(calls=(call("shout"), call("blank"))), Say(text=["done"]))
    async with opened(tmp_path, model, tools=tools) as it:
        await it.session.prompt(text("go"))
        first, second = (entry.body.call.call_id for entry in await it.log() if isinstance(entry.body, ToolResult))
        shown = await typed(it, f"/show {first}")
        assert f"````\n{long.rstrip()}\n````" in shown
        assert await typed(it, f"/show `{first}`") == shown
        assert (await typed(it, f"/show {second}")).endswith("It has no output.")
        assert await typed(it, f"/show {first[:-1]}9") == f"This session has no result of {first[:-1]}9."
        for wrong in ("", f"{first[:-1]}00", "call_1", "call_-1_0", f"call_{10**30}_0", "../../etc/passwd"):
            assert "expected the id of a call, such as `/show call_12_0`" in await typed(it, f"/show {wrong}".strip())


async def test_tags_are_added_removed_and_shown(tmp_path: Path) -> None:
    async with opened(tmp_path, ScriptedModel()) as it:
        assert await typed(it, "/tag") == (
            "This session has no tags. `/tag NAME` adds one, `/tag remove NAME` removes one."
        )
        assert await typed(it, "/tag Work #http") == "Tags: `http`, `work`."
        await it.store.merge_metadata("s1", {"tags": {"elsewhere": True}})  # as another process does
        assert await typed(it, "/tag remove http") == "Tags: `elsewhere`, `work`."
        assert await typed(it, "/tag remove http") == "This session has no tag `http`. Tags: `elsewhere`, `work`."
        assert await typed(it, "/tag remove") == "`/tag remove` needs a tag, such as `/tag remove draft`."
        assert await typed(it, "/tag a,b") == (
            '"a,b" cannot be a tag; expected one word of at most 50 characters, without commas.'
        )
        assert (await it.store.session("s1")).metadata == {"tags": {"elsewhere": True, "work": True}}


async def test_an_archived_session_leaves_the_list_and_goes_on(tmp_path: Path) -> None:
    async with opened(tmp_path, ScriptedModel(Say(text=["1"]), Say(text=["2"]))) as it:
        await it.session.prompt(text("one"))
        assert (await typed(it, "/archive")).startswith("This session is archived: ")
        await it.session.prompt(text("two"))
        assert (await it.store.sessions()).rows == ()
        assert [row.id for row in (await it.store.sessions(archived=True)).rows] == ["s1"]
        assert await typed(it, "/archive now") == "`/archive now`: expected no argument, or `undo`."
        assert await typed(it, "/archive undo") == "This session is back on the list of sessions."
        assert [row.id for row in (await it.store.sessions()).rows] == ["s1"]


async def test_usage_counts_tokens_and_export_writes_a_new_markdown_file(tmp_path: Path) -> None:
    async def look() -> str:
        return "looked\n"

    model = ScriptedModel(Say(text=["I look."], calls=(call("look"),)), Say(text=["Done."]))
    async with opened(tmp_path, model, tools={"look": Tool("read", look)}) as it:
        await it.session.prompt(text("please look"))
        assert (await typed(it, "/usage")).startswith("This session used ")
        assert await typed(it, "/usage now") == "`/usage` takes no argument."
        assert await typed(it, "/export session.md") == f"Written to {tmp_path / 'session.md'}."
        assert "exists already" in await typed(it, "/export session.md")
        assert "outside the workspace" in await typed(it, "/export ../session.md")
    written = (tmp_path / "session.md").read_text()
    assert written.startswith("# please look\n\n- session: s1\n")
    assert "\n\nplease look\n\n## scripted\n\nI look.\n\n- **look {}** (done, " in written
    assert " s)\n\n```\nlooked\n```\n\n## scripted\n\nDone.\n\n## You, " in written


async def test_model_and_mode_are_shown_and_chosen_by_name_or_prefix(tmp_path: Path) -> None:
    async with opened(tmp_path, ScriptedModel()) as it:
        it.session.conversation.adapters = replace(it.session.conversation.adapters, models=("large", "small", "smart"))
        assert await typed(it, "/model") == (
            "The model is `scripted`. Choose one of `large`, `small`, `smart`, `scripted`."
        )
        assert await typed(it, "/model la") == "The model is `large` from the next prompt on."
        assert await typed(it, "/model sma") == "No model `sma`. Choose one of `small`, `smart`."
        assert await typed(it, "/model huge") == ("No model `huge`. Choose one of `large`, `small`, `smart`.")
        assert await typed(it, "/mode pl") == "The mode is `plan`."
        assert await typed(it, "/mode") == ("The mode is `plan`. Choose one of `ask`, `accept-edits`, `plan`, `auto`.")
        row = await it.store.session("s1")
    assert (row.model, row.mode) == ("large", "plan")


async def test_user_command_is_sent_as_its_prompt(tmp_path: Path) -> None:
    model = ScriptedModel(Say(text=["reviewed"]), Say(text=["a slash"]))
    template = Template(name="review", description="", hint="", text="Review $ARGUMENTS with care.")
    async with opened(tmp_path, model) as it:
        it.session.conversation.adapters = replace(it.session.conversation.adapters, templates=lambda: (template,))
        await it.session.prompt(text("/review src/a.py"))
        said = [entry.body.parts for entry in await it.log() if isinstance(entry.body, User)]
        await it.session.prompt(text("/ "))
        said += [entry.body.parts for entry in await it.log() if isinstance(entry.body, User)][-1:]
    assert said == [text("Review src/a.py with care."), text("/ ")]


def writing(**files: str) -> Say:
    return Say(
        calls=tuple(
            call("write_file", f"c{number}", path=name.replace("_", "."), content=content)
            for number, (name, content) in enumerate(files.items())
        )
    )


async def test_diff_shows_what_the_session_changed_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    turns = (writing(a_txt="one\n2\n", b_txt="new\n"), Say(), writing(a_txt="one\n2\nthree\n", c_txt="c\n"), Say())
    async with opened(tmp_path, ScriptedModel(*turns), mode="auto", open_tools=open_toolbox) as it:
        assert "changed no files" in await typed(it, "/diff")
        await it.session.prompt(text("go"))
        await it.session.prompt(text("go on"))
        (tmp_path / "c.txt").write_text("mine\n")
        assert await typed(it, "/diff") == (
            "This session changed 3 files with its own tools.\n\n"
            "**`a.txt`** +2 −1\n\n```diff\n@@ -1,2 +1,3 @@\n one\n-two\n+2\n+three\n```\n\n"
            "**`b.txt`** +1 −0 (new)\n\n```diff\n@@ -1,0 +1,1 @@\n+new\n```\n\n"
            "**`c.txt`** +1 −0 (new; changed by someone else since)\n\n```diff\n@@ -1,0 +1,1 @@\n+c\n```"
        )
        assert "**`b.txt`**" in await typed(it, "/diff b.txt")
        assert "a.txt" not in await typed(it, "/diff b.txt")
        assert await typed(it, "/diff x") == "This session did not change `x`. It changed `a.txt`, `b.txt`, `c.txt`."
        await it.session.prompt(text("/undo keep"))
        assert "three" not in await typed(it, "/diff b.txt")


async def test_diff_shows_small_changes_after_a_large_one(tmp_path: Path) -> None:
    large = "".join(f"{number}\n" for number in range(2_000))
    turn = (writing(a_txt=large, b_txt="small\n", c_txt="x\n"), Say())
    async with opened(tmp_path, ScriptedModel(*turn), mode="auto", open_tools=open_toolbox) as it:
        await it.session.prompt(text("go"))
        (tmp_path / "c.txt").unlink()
        (tmp_path / "c.txt").symlink_to("b.txt")
        shown = await typed(it, "/diff")
    assert "1,501 more lines are not shown" in shown
    assert "**`b.txt`** +1 −0 (new)\n\n```diff\n@@ -1,0 +1,1 @@\n+small\n```" in shown
    assert "**`c.txt`** +1 −0 (new; is now a link to another file)" in shown


async def test_diff_names_files_that_others_changed_between_edits_or_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe")
    read = Say(calls=(call("read_file", "r", path="b.txt"),))
    turns = (writing(a_bin="text\n", b_txt="1\n"), Say(), read, writing(b_txt="3\n"), Say())
    async with opened(tmp_path, ScriptedModel(*turns), mode="auto", open_tools=open_toolbox) as it:
        await it.session.prompt(text("go"))
        (tmp_path / "b.txt").write_text("2\n")
        await it.session.prompt(text("go on"))
        shown = await typed(it, "/diff")
    assert "**`b.txt`** +1 −0 (new; changed by someone else between two edits; the diff includes that change)" in shown
    assert "**`a.bin`** +0 −0 (not text, 2 → 5 bytes)" in shown
