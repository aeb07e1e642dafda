"""The composition root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from crow.adapters import open_workspace, own_folders
from crow.app import Wiring, find_hooks
from crow.domain.messages import SystemMessage
from crow.llm import Model, Request, TextDelta
from crow.settings import load_settings
from tests.support.fake_endpoint import FakeEndpoint, Gate, text


def test_hooks_are_found_in_the_entry_points_of_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours.py").write_text("def before(proposal):\n    return None\n", "utf-8")
    info = tmp_path / "ours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[crow.before_compact]\nfirst = ours:before\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = find_hooks()
    ((name, load),) = found["before_compact"]
    assert name == "first (ours:before)"
    assert load()("a proposal") is None
    assert found["after_compact"] == []


async def test_compaction_settings_reach_the_sessions(tmp_path: Path) -> None:
    (tmp_path / "summary.md").write_text("Sum up.", "utf-8")
    (tmp_path / "config.toml").write_text(
        'model.name = "large"\nmodel.context_window = 50000\n[compaction]\nauto = false\nthreshold = 0.5\n'
        'keep_tokens = 1000\ntarget = 0.25\nearly = 0.7\ncompact_model = "small"\nprompt_file = "summary.md"\n',
        "utf-8",
    )
    wiring = Wiring(load_settings({}, {"CROW_HOME": str(tmp_path), "OPENAI_BASE_URL": "http://localhost:1/v1"}))
    adapters = wiring.adapters(await wiring.dependencies().open_store())
    settings = adapters.settings().compaction
    assert (settings.auto, settings.threshold, settings.keep_tokens, settings.target) == (False, 0.5, 1_000, 0.25)
    assert (settings.compact_model, settings.instruction, settings.early) == ("small", "Sum up.", 0.7)
    assert adapters.info("large").context_window == 50_000
    assert adapters.info("small").context_window is None
    assert adapters.info("offline").endpoint == "offline offline"
    await wiring.store.close()


@pytest.mark.parametrize(("written", "early"), [("", 0.6), ("early = false", None), ("early = 1", 1.0)])
async def test_early_summaries_are_on_by_default_and_can_be_turned_off(
    tmp_path: Path, written: str, early: float | None
) -> None:
    (tmp_path / "config.toml").write_text(f"[compaction]\n{written}\n", "utf-8")
    wiring = Wiring(load_settings({}, {"CROW_HOME": str(tmp_path), "OPENAI_BASE_URL": "https://far.example/v1"}))
    adapters = wiring.adapters(await wiring.dependencies().open_store())
    assert adapters.settings().compaction.early == early
    assert [adapters.info(name).is_local for name in ("large", "offline")] == [False, True]
    await wiring.store.close()


async def test_a_model_that_opens_while_the_client_sets_its_provider_uses_the_new_endpoint(tmp_path: Path) -> None:
    fifo = tmp_path / "key"
    os.mkfifo(fifo)
    table = '[providers.a]\nbase_url = "http://127.0.0.1:9/v1"\nmodels = ["m"]\n'
    (tmp_path / "config.toml").write_text(f'{table}api_key_command = ["cat", "{fifo}"]\n', "utf-8")
    wiring = Wiring(load_settings({}, {"CROW_HOME": str(tmp_path)}))
    opened = wiring.adapters(await wiring.dependencies().open_store()).model
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            models: list[Model] = []

            async def open_it() -> None:
                models.append(await opened("a/m"))

            tasks.start_soon(open_it)
            key = await anyio.open_file(fifo, "w")  # opens once the command reads
            wiring.set_provider("a", "openai", "http://127.0.0.1:10/v1", {})
            await key.write("own-key-0123456789")
            await key.aclose()
    assert models[0].info.endpoint == "http://127.0.0.1:10/v1 m"
    assert models[0] is await opened("a/m")
    await wiring.close()
    await wiring.store.close()


def protections(home: Path, cwd: Path, *paths: Path, config: Path | None = None) -> list[str]:
    """How a workspace at `cwd` protects each path from reads, if crow's directory is `home`."""
    env = {"CROW_HOME": str(home), "CROW_SANDBOX": "off"} | ({} if config is None else {"CROW_CONFIG": str(config)})
    workspace = open_workspace(lambda: load_settings({}, env), str(cwd), ())
    return [workspace.read_protection(path) for path in paths]


def test_a_config_file_in_a_directory_of_the_user_does_not_close_that_directory(tmp_path: Path) -> None:
    home, cwd = tmp_path / "state", tmp_path / "work"
    config = tmp_path / "dotfiles" / "config.toml"
    vimrc = config.with_name("vimrc")
    assert protections(home, cwd, config, vimrc, home / "x", config=config) == ["never", "none", "never"]
    config = tmp_path / "crow" / "config.toml"  # a directory of this name is crow's
    assert protections(home, cwd, config, config.parent / "x", cwd / "x", config=config) == ["never", "never", "none"]


def test_a_workspace_inside_crows_directory_stays_open_but_crows_files_in_it_do_not(tmp_path: Path) -> None:
    cwd = tmp_path / "work"
    crows = [tmp_path / name for name in ("crow.db", "crow.db-wal", "config.toml", "crow.log", "cache/x")]
    assert protections(tmp_path, cwd, cwd / "notes.txt", *crows) == ["none", *["never"] * len(crows)]
    assert protections(tmp_path, tmp_path, tmp_path / "notes.txt", *crows) == ["none", *["never"] * len(crows)]
    assert protections(tmp_path, tmp_path / "cache" / "a", tmp_path / "cache" / "a" / "x") == ["none"]
    assert protections(tmp_path / "work" / "crow", cwd, cwd / "x", cwd / "crow" / "x") == ["none", "never"]


@pytest.mark.parametrize("linked", ["workspace", "home"])
def test_a_workspace_inside_crows_directory_is_recognised_through_a_link(tmp_path: Path, linked: str) -> None:
    (tmp_path / "home" / "work").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "home" / "work" if linked == "workspace" else tmp_path / "home")
    home = tmp_path / ("home" if linked == "workspace" else "link")
    cwd = tmp_path / ("link" if linked == "workspace" else "home/work")
    paths = load_settings({}, {"CROW_HOME": str(home)}).paths
    assert own_folders(paths, str(cwd)) == (home / "cache",)
    assert protections(home, cwd, cwd / "notes.txt", home / "crow.db") == ["none", "never"]


ENDS_WHILE_IT_IMPORTS = """
import asyncio, sys
from crow.app import Wiring
from crow.settings import load_settings
from tests.support.fake_endpoint import FakeEndpoint

async def main():
    wiring = Wiring(load_settings({}, {"CROW_HOME": sys.argv[1], "OPENAI_BASE_URL": "http://localhost:1/v1"}))
    importing = asyncio.create_task(wiring.dependencies().import_rest())
    await asyncio.sleep(0)
    assert not importing.done()
    await wiring.close()
    print("crow.tools.mcp.client" in sys.modules)

asyncio.run(main())
"""


@pytest.mark.long
def test_a_process_does_not_end_while_a_thread_imports(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", ENDS_WHILE_IT_IMPORTS, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


async def test_models_of_an_endpoint_that_is_replaced_while_it_lists_them_are_not_offered(tmp_path: Path) -> None:
    async with FakeEndpoint() as old, FakeEndpoint() as new:
        old.models, new.models = ["old"], ["new"]
        old.listing.clear()
        wiring = Wiring(load_settings({}, {"CROW_HOME": str(tmp_path), "OPENAI_BASE_URL": old.base_url}))
        list_models = wiring.dependencies().more_models

        async def list_old() -> None:
            await list_models()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(list_old)
            while not old.requests:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            wiring.set_provider("main", "openai", new.base_url, {})
            old.listing.set()
        assert await list_models() == ("new",)
        await wiring.close()


async def test_a_model_that_new_settings_replace_finishes_its_answer_and_leaves_no_connection(tmp_path: Path) -> None:
    async with FakeEndpoint() as old, FakeEndpoint() as new:
        wiring = Wiring(
            load_settings({}, {"CROW_HOME": str(tmp_path), "OPENAI_BASE_URL": old.base_url, "CROW_MODEL": "m"})
        )
        opened = wiring.adapters(await wiring.dependencies().open_store()).model
        model, gate, texts = await opened("m"), Gate(), list[str]()
        old.script(text("one ", "two", between=[gate]))
        async with model.stream(Request(messages=(SystemMessage(text="You are crow."),))) as stream:
            async for delta in stream:
                texts += [delta.text] if isinstance(delta, TextDelta) else []
                wiring.set_provider("main", "openai", new.base_url, {})
                assert await opened("m") is not model
                gate.open()
        assert ("".join(texts), len(old.asked)) == ("one two", 1)
        with anyio.fail_after(60):
            while old.open_connections:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await wiring.close()
        await wiring.store.close()


async def test_two_sessions_that_need_a_model_at_the_same_moment_share_it(tmp_path: Path) -> None:
    table = '[providers.a]\nbase_url = "http://127.0.0.1:9/v1"\nmodels = ["m"]\n'
    (tmp_path / "config.toml").write_text(f'{table}api_key_command = ["echo", "own-key-0123456789"]\n', "utf-8")
    wiring = Wiring(load_settings({}, {"CROW_HOME": str(tmp_path)}))
    opened = wiring.adapters(await wiring.dependencies().open_store()).model
    models: list[Model] = []

    async def open_it() -> None:
        models.append(await opened("a/m"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(open_it)
        tasks.start_soon(open_it)
    assert models[0] is models[1]
    await wiring.close()
    await wiring.store.close()
