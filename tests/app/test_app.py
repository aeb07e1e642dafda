"""The composition root."""

from __future__ import annotations

from pathlib import Path

import pytest

from crow.app import Wiring, find_hooks
from crow.settings import load_settings
from crow.store import Store


def test_hooks_are_found_in_the_entry_points_of_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours.py").write_text("def before(proposal):\n    return None\n", "utf-8")
    info = tmp_path / "ours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[crow.before_compact]\nfirst = ours:before\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    ((name, load),) = find_hooks("crow.before_compact")
    assert name == "first (ours:before)"
    assert load()("a proposal") is None
    assert find_hooks("crow.after_compact") == []


def test_compaction_settings_reach_the_sessions(tmp_path: Path) -> None:
    (tmp_path / "summary.md").write_text("Sum up.", "utf-8")
    (tmp_path / "config.toml").write_text(
        'model.name = "large"\nmodel.context_window = 50000\n[compaction]\nauto = false\nthreshold = 0.5\n'
        'keep_tokens = 1000\ntarget = 0.25\ncompact_model = "small"\nprompt_file = "summary.md"\n',
        "utf-8",
    )
    wiring = Wiring(load_settings({}, {"CROW_HOME": str(tmp_path), "OPENAI_BASE_URL": "http://localhost:1/v1"}))
    store: Store = None  # type: ignore[assignment]  # nothing is opened here
    adapters = wiring.adapters(store)
    settings = adapters.settings().compaction
    assert (settings.auto, settings.threshold, settings.keep_tokens, settings.target) == (False, 0.5, 1_000, 0.25)
    assert (settings.compact_model, settings.instruction) == ("small", "Sum up.")
    assert adapters.info("large").context_window == 50_000
    assert adapters.info("small").context_window is None
    assert adapters.info("offline").endpoint == "offline offline"
