"""The user's file is changed where it really is, and nothing else is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from crow.domain.errors import ConfigError
from crow.settings.write import save_model_settings


def test_a_file_behind_a_link_is_written_in_its_own_directory(tmp_path: Path) -> None:
    """The link may lead to another disk, onto which a new file cannot be moved."""
    link, target = tmp_path / "config.toml", tmp_path / "dotfiles/crow.toml"
    link.symlink_to(target)
    save_model_settings(link, {"name": "egg-1"})
    assert target.read_text() == '[model]\nname = "egg-1"\n'
    assert link.is_symlink()


def test_a_failed_change_leaves_no_part_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot be changed"):
        save_model_settings(file, {"name": "\ud800"})
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert file.read_text() == ""
