"""Tests commands that show, choose and export, and the user's own commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crow.agent.templates import Template
from crow.domain.entries import Command, User
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
        assert found.count("in this session") == 3  # the prompt, the answer and the title
        assert await typed(it, "/search pelican") == "No matches for “pelican” in any session."
        assert "`/search` needs words" in await typed(it, "/search")


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
        it.session.adapters = replace(it.session.adapters, models=("large", "small", "smart"))
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
    model = ScriptedModel(Say(text=["reviewed"]))
    template = Template(name="review", description="", hint="", text="Review $ARGUMENTS with care.")
    async with opened(tmp_path, model) as it:
        it.session.adapters = replace(it.session.adapters, templates=lambda: (template,))
        await it.session.prompt(text("/review src/a.py"))
        said = [entry.body.parts for entry in await it.log() if isinstance(entry.body, User)]
    assert said == [text("Review src/a.py with care.")]
