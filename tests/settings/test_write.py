"""The user's file is changed where it really is, and nothing else is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from crow.domain.errors import ConfigError
from crow.settings.write import remove_server, save_model_settings, save_server


def test_a_file_behind_a_link_is_written_in_its_own_directory(tmp_path: Path) -> None:
    """The link may lead to another disk, onto which a new file cannot be moved."""
    link, target = tmp_path / "config.toml", tmp_path / "dotfiles/crow.toml"
    link.symlink_to(target)
    save_model_settings(link, {"name": "egg-1"})
    assert target.read_text() == '[model]\nname = "egg-1"\n'
    assert link.is_symlink()


def test_line_ends_and_mode_of_the_file_stay(tmp_path: Path) -> None:
    """A file for all users of a machine must not become unreadable for them."""
    file = tmp_path / "config.toml"
    file.write_bytes(b'# mine\r\n[model]\r\nname = "a"\r\n')
    file.chmod(0o644)
    save_model_settings(file, {"name": "egg-1", "base_url": "http://localhost:1/v1"})
    save_server(file, "docs", {"url": "https://mcp.example/mcp"})
    assert file.read_bytes() == (
        b'# mine\r\n[model]\r\nname = "egg-1"\r\nbase_url = "http://localhost:1/v1"\r\n\r\n'
        b'[mcp_servers.docs]\r\nurl = "https://mcp.example/mcp"\r\n'
    )
    remove_server(file, "docs")
    assert file.read_bytes().count(b"\r\n") == file.read_bytes().count(b"\n") == 5
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_failed_change_leaves_no_part_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot be changed"):
        save_model_settings(file, {"name": "\ud800"})
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert file.read_text() == ""
