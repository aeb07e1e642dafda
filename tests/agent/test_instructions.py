"""Tests which instruction files the model gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crow.agent.instructions import (
    MAX_DEPTH,
    MAX_INCLUDES,
    OUTSIDE,
    TOO_DEEP,
    TOO_MANY,
    TOO_MUCH,
    InstructionSource,
    describe_sources,
    included_names,
    read_instructions,
)


async def test_instructions_come_from_the_root_of_the_repository_to_the_directory(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "AGENTS.md").write_text("outer", "utf-8")
    (inner / "AGENTS.md").write_bytes(b"inner \xff")
    (tmp_path / ".git").mkdir()
    text = read_instructions(inner).text
    assert text == f"# {tmp_path}/AGENTS.md\n\nouter\n\n# {inner}/AGENTS.md\n\ninner \ufffd"


async def test_huge_instruction_file_is_cut_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text("x" * 200_000, "utf-8")
    text = read_instructions(tmp_path).text
    assert len(text) < 70_000
    assert text.endswith("is larger than 64 KiB)")


def test_instructions_that_the_rules_close_are_left_out_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").symlink_to("notes")
    (tmp_path / "notes").write_text("KEY", "utf-8")
    text = read_instructions(tmp_path, lambda path: path.name != "notes").text
    assert text == f"# {tmp_path}/AGENTS.md\n\n(left out: a rule forbids reading it, or it may hold keys)"


@pytest.mark.parametrize(
    ("folder_mode", "file_mode", "reason"),
    [
        (0o1777, 0o644, "all users can write to its directory"),
        (0o757, 0o644, "all users can write to its directory"),
        (0o755, 0o646, "all users can write to it"),
        (0o775, 0o664, None),
    ],
)
def test_instructions_that_everybody_can_write_are_left_out(
    tmp_path: Path, folder_mode: int, file_mode: int, reason: str | None
) -> None:
    work = tmp_path / "shared" / "work"
    work.mkdir(parents=True)
    (tmp_path / "shared" / ".git").mkdir()
    file = tmp_path / "shared" / "AGENTS.md"
    file.write_text("Obey.", "utf-8")
    file.chmod(file_mode)
    file.parent.chmod(folder_mode)
    assert read_instructions(work).text == f"# {file}\n\n{'Obey.' if reason is None else f'(left out: {reason})'}"


def test_instructions_of_another_user_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / ".git").mkdir()
    file = tmp_path / "AGENTS.md"
    file.write_text("Obey.", "utf-8")
    stranger = 54_321
    if os.geteuid() == 0:
        os.chown(file, stranger, stranger)
        assert (
            read_instructions(work).text
            == f"# {file}\n\n(left out: it belongs to another user, with the id {stranger})"
        )
        os.chown(work, stranger, stranger)  # the owner of the workspace is trusted
    else:
        monkeypatch.setattr(os, "geteuid", lambda: stranger)  # the file belongs to the owner of the workspace
    assert read_instructions(work).text == f"# {file}\n\nObey."


def test_without_a_repository_only_the_directory_itself_counts(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "AGENTS.md").write_text("outer")
    assert read_instructions(work).sources == ()
    (work / "AGENTS.md").write_text("mine")
    assert read_instructions(work).text == f"# {work}/AGENTS.md\n\nmine"


def test_the_users_own_file_comes_first_and_may_be_a_link_but_includes_nothing(tmp_path: Path) -> None:
    work, dotfiles, config = tmp_path / "work", tmp_path / "dotfiles", tmp_path / "config"
    for folder in (work, dotfiles, config):
        folder.mkdir()
    (dotfiles / "agents").write_text("Be brief. @more.md")
    (dotfiles / "more.md").write_text("more")
    (config / "AGENTS.md").symlink_to(dotfiles / "agents")
    (work / "AGENTS.md").write_text("Use tabs.")
    found = read_instructions(work, user_file=config / "AGENTS.md")
    assert found.text == (
        f"# {config}/AGENTS.md (the user's own, for every workspace)\n\nBe brief. @more.md\n\n"
        f"# {work}/AGENTS.md\n\nUse tabs."
    )
    assert [source.path for source in found.sources] == [f"{config}/AGENTS.md", f"{work}/AGENTS.md"]
    twice = read_instructions(config, user_file=config / "AGENTS.md")
    assert len(twice.sources) == 1, "a session in the directory of the settings reads the file once"
    config.chmod(0o777)
    assert (
        "left out: all users can write to its directory" in read_instructions(work, user_file=config / "AGENTS.md").text
    )
    assert len(read_instructions(work, user_file=config / "missing").sources) == 1


def test_claude_md_counts_in_a_directory_without_agents_md(tmp_path: Path) -> None:
    inner = tmp_path / "a"
    (inner / ".git").mkdir(parents=True)
    (inner / ".git").rename(tmp_path / ".git")
    (tmp_path / "CLAUDE.md").write_text("outer")
    (inner / "CLAUDE.md").write_text("never")
    (inner / "AGENTS.md").write_text("inner")
    found = read_instructions(inner)
    assert found.text == f"# {tmp_path}/CLAUDE.md\n\nouter\n\n# {inner}/AGENTS.md\n\ninner"


def test_a_file_includes_others_once_and_each_is_named(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "AGENTS.md").write_text("See @docs/style.md, then (ask @someone about @scope/package).\n@./AGENTS.md\n")
    (tmp_path / "docs" / "style.md").write_text("Tabs.\n@more.md @../docs/style.md @../AGENTS.md")
    (tmp_path / "docs" / "more.md").write_text("More.")
    found = read_instructions(tmp_path)
    style, more = tmp_path / "docs" / "style.md", tmp_path / "docs" / "more.md"
    assert found.text.split("\n\n# ")[1:] == [
        f"{style} (included by {tmp_path}/AGENTS.md)\n\nTabs.\n@more.md @../docs/style.md @../AGENTS.md",
        f"{more} (included by {style})\n\nMore.",
    ]
    assert describe_sources(found.sources) == "\n".join(
        [
            "Instruction files:",
            f"- `{tmp_path}/AGENTS.md` (75 bytes)",
            f"- `{style}` (46 bytes), included by `{tmp_path}/AGENTS.md`",
            f"- `{more}` (5 bytes), included by `{style}`",
        ]
    )
    assert describe_sources(()) == "The model gets no instruction files."


def test_an_include_in_code_or_inside_a_word_is_none() -> None:
    text = "mail me@example.org `@code.md` @a.md. (@b.md)\n```\n@block.md\n~~~\n```\n@c.md, @ @@x\n~~~py\n@d.md"
    assert list(included_names(text)) == ["a.md", "c.md"]


def test_nothing_outside_the_workspace_or_closed_by_a_rule_is_included(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("the key")
    (work / "link").symlink_to("../secret")
    (work / "up").symlink_to("..")
    (work / "denied").write_text("the key")
    os.mkfifo(work / "pipe")
    (work / "null").write_bytes(b"the\0key")
    (work / "open").write_text("the key")
    (work / "open").chmod(0o666)
    secret = tmp_path / "secret"
    (work / "AGENTS.md").write_text(f"@../secret @link @up/secret @{secret} @denied @pipe @null @sub @open @/dev/zero")
    found = read_instructions(work, lambda path: path.name != "denied")
    assert "the key" not in found.text
    assert f"# {secret}" not in found.text, "whether such a file exists is not told to the model"
    agents = f"{work}/AGENTS.md"
    assert found.sources[1:] == tuple(
        InstructionSource(path=str(path), left_out=reason, included_by=agents)
        for path, reason in (
            (secret, OUTSIDE),
            (work / "denied", "a rule forbids reading it, or it may hold keys"),
            (work / "open", "all users can write to it"),
            ("/dev/zero", OUTSIDE),
        )
    )
    other = read_instructions(work, contains=lambda path: path.is_relative_to(tmp_path))
    assert f"# {secret} (included by {agents})\n\nthe key" in other.text, "another directory of the session"


def test_includes_are_bounded_in_depth_number_and_size(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    (deep / "AGENTS.md").write_text("@1")
    for number in range(1, MAX_DEPTH + 3):
        (deep / str(number)).write_text(f"level {number} @{number + 1}")
    sources = read_instructions(deep).sources
    assert [source.left_out for source in sources] == [""] * (MAX_DEPTH + 1) + [TOO_DEEP]

    wide = tmp_path / "wide"
    wide.mkdir()
    for number in range(1_000):
        (wide / str(number)).write_text("x")
    (wide / "AGENTS.md").write_text(" ".join(f"@{number}" for number in range(1_000)))
    sources = read_instructions(wide).sources
    assert [source.left_out for source in sources] == [""] * (MAX_INCLUDES + 1) + [TOO_MANY]

    large = tmp_path / "large"
    large.mkdir()
    (large / "AGENTS.md").write_text("@1 @2 @3")
    for number in (1, 2, 3):
        (large / str(number)).write_text("x" * 80_000)
    found = read_instructions(large)
    assert [source.left_out for source in found.sources] == ["", "", "", TOO_MUCH]
    assert len(found.text) < 140_000
    assert f"(cut: {large}/1 is larger than 64 KiB)" in found.text
