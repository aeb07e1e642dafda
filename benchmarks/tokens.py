"""Counts the tokens that requests have: the first one, a whole task, noisy commands, and hundreds of MCP tools.

Scripted tasks run in the real process. Tokens are crow's own estimate (`crow/domain/tokens.py`), because no tokenizer
holds for every model; the rows in characters count the tools and messages of the request as JSON. Nothing here depends
on time or on the machine, except for the length of its paths.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from benchmarks.rows import ROOT, Row, arguments, report
from crow.domain.tokens import estimate_text
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, allow_once
from tests.support.fake_endpoint import FakeEndpoint, Reply
from tests.support.tool_catalogue import catalogue, request_tokens, with_servers

__all__ = ["rows"]

Body = Mapping[str, Any]

MODULE = "".join(
    f'def step_{n}(nest, twigs):\n    """Add the twigs of step {n}."""\n    return nest + twigs * {n}\n\n\n'
    for n in range(40)
)
NOISY = {
    "progress in one line": 'for n in $(seq 2000); do printf "\\rBuilding %s of 2000" $n; done; echo; echo built',
    "colours": "for n in $(seq 300); do printf '\\033[32mok\\033[0m test_%s\\n' $n; done",
    "equal lines": "for n in $(seq 5000); do echo 'warning: the nest is deprecated'; done; echo done",
    "a long log": 'for n in $(seq 20000); do echo "$n: compiled module_$n.o from module_$n.c"; done',
}
"""Commands with output of which a model needs little."""


def task() -> list[Reply]:
    """Thirty steps: reads, searches, edits and commands."""
    steps: list[Reply] = []
    for n in range(6):
        number = 5 * n
        old, new = f"return nest + twigs * {number}\n", f"return nest + twigs * {number + 1}  # at least one\n"
        for call in (
            ("read_file", {"path": "nest.py", "line": 1 + 30 * n, "limit": 60}),
            ("grep", {"pattern": f"step_{number}\\b"}),
            (
                "edit_file",
                {"path": "nest.py", "old_text": f'{number}."""\n    {old}', "new_text": f'{number}."""\n    {new}'},
            ),
            ("shell", {"command": f"python3 -c 'import nest; print(nest.step_{number}(1, 2))'", "access": "write"}),
            ("list_files", {"path": "."}),
        ):
            steps.append(fake.calls(call, say="Next.", prefix=f"s{len(steps)}n"))
    return [*steps, fake.text("Done.")]


def modules() -> dict[str, str]:
    """Fifteen modules and their tests, about as long and as deeply indented as those of a real project."""
    found = {}
    for name in ("nests", "twigs", "eggs", "wings", "songs", "maps", "winds", "roosts", "flocks", "diets", "molts",
                 "calls", "routes", "seasons", "guards"):  # fmt: skip
        one = name.removesuffix("s")
        parts = [
            f'"""Keeps the {name} of a colony, and finds those that need care."""\n\nfrom __future__ import annotations'
        ]
        parts += [
            (
                f"class {one.title()}Part{part}:\n"
                f'    """One part of a {one}, with its age and its neighbours."""\n\n'
                f"    def __init__(self, age: int, neighbours: list[str]) -> None:\n"
                f"        self.age = age\n"
                f"        self.neighbours = neighbours\n\n"
                f"    def needs_care(self, season: str, *, limit: int = {part + 3}) -> bool:\n"
                f'        """Whether the {one} is too old for the season, or stands alone."""\n'
                f'        if season == "winter":\n'
                f"            return self.age > limit or not self.neighbours\n"
                f"        for neighbour in self.neighbours:\n"
                f'            if neighbour.startswith("{one}"):\n'
                f"                return False\n"
                f"        return self.age > limit * 2\n\n"
                f"    def described(self) -> str:\n"
                f'        return f"{one} {part} of age {{self.age}} beside {{len(self.neighbours)}} others"'
            )
            for part in range(9)
        ]
        found[f"colony/{name}.py"] = "\n\n\n".join(parts) + "\n"
    found["colony/check.py"] = (
        "import sys\n\nfor number in range(45):\n"
        '    print(f"test_part_{number} (colony.test_{sys.argv[1]}.TestCare.test_part_{number}) ... ok")\n'
        "print('-' * 70)\nprint('Ran 45 tests in 0.0s')\nprint('OK')\n"
    )
    return found


def long_task() -> list[Reply]:
    """Thirty steps in fifteen files: each is read, in whole or in part, and then searched for, changed or tested."""
    steps: list[Reply] = []
    files = [path for path in modules() if not path.endswith("check.py")]
    for number, path in enumerate(files):
        name = Path(path).stem
        part = {} if number % 3 else {"line": 40, "limit": 90}
        change = {"old_text": f'"""One part of a {name[:-1]}, with', "new_text": f'"""A part of a {name[:-1]}, with'}
        then = (
            ("grep", {"pattern": rf"class {name[:-1].title()}Part|limit: int = 5", "path": "colony"}),
            ("edit_file", {"path": path, "all": True, **change}),
            ("shell", {"command": f"python3 colony/check.py {name} 2>&1", "access": "write"}),
        )[number % 3]
        for each in (("read_file", {"path": path, **part}), then):
            say = f"Next I look at {name} and what depends on it."
            steps.append(fake.calls(each, say=say, prefix=f"l{len(steps)}n"))
    return [*steps, fake.text("Done.")]


def tool_task(count: int, *, is_direct: bool) -> list[Reply]:
    """Ten steps that use five of the MCP tools."""
    steps = []
    tools = catalogue()[:count]
    for n in range(5):
        tool = tools[n * (len(tools) // 5)]
        values = dict.fromkeys(tool.schema["required"], "moss")
        if is_direct:
            steps += [
                fake.calls((tool.full_name, values), prefix=f"a{n}"),
                fake.calls((tool.full_name, values), prefix=f"b{n}"),
            ]
        else:
            steps += [
                fake.calls(("find_tools", {"query": tool.words}), prefix=f"a{n}"),
                fake.calls(("call_tool", {"name": tool.full_name, "arguments": values}), prefix=f"b{n}"),
            ]
    return [*steps, fake.text("Done.")]


def prepare(home: Path, work: Path, config: str, files: Mapping[str, str]) -> None:
    """Make crow's home and the workspace."""
    for directory in (home, work):
        directory.mkdir(exist_ok=True)
    (work / "nest.py").write_text(MODULE)
    for path, text in files.items():
        (work / path).parent.mkdir(exist_ok=True)
        (work / path).write_text(text)
    (home / "config.toml").write_text(config)


async def requests_of(
    steps: Sequence[Reply], config: str, home: Path, files: Mapping[str, str] | None = None
) -> list[Body]:
    """The requests of one prompt that the endpoint answers with `steps`. `files` are more files of the workspace."""
    work = home.with_name(f"{home.name}-work")
    await anyio.to_thread.run_sync(prepare, home, work, config, files or {})
    async with FakeEndpoint() as endpoint:
        endpoint.script(*steps)
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "CROW_HOME": str(home),
            "CROW_SANDBOX": "off",
            "CROW_MODEL": "fake-model",
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": "sk-test-0123456789",
        }
        answers = {"session/request_permission": allow_once}
        async with CrowProcess([sys.executable, "-m", "crow", "acp"], env=env, cwd=work, answers=answers) as agent:
            agent.checks_schema = False
            await agent.initialize()
            session = await agent.new_session(work)
            await agent.prompt(session, "Make each step of nest.py that ends in 0 or 5 add at least one twig.")
        return [request.body for request in endpoint.asked]


def breaks_in(requests: Sequence[Body]) -> int:
    """How many requests do not begin with the one before."""
    return sum(
        after["tools"] != before["tools"] or after["messages"][: len(before["messages"])] != before["messages"]
        for before, after in pairwise(requests)
    )


def row(what: str, count: int, limit: float | None = None, unit: str = "") -> Row:
    return Row(what, count, count, unit, limit)


def characters(body: Body) -> int:
    return len(json.dumps([body.get("tools"), body["messages"]], ensure_ascii=False))


async def rows(directory: Path) -> list[Row]:
    found: list[Row] = []
    requests = await requests_of(task(), "", directory / "task")
    found.append(row("the first request", request_tokens(requests[0]), 1_900))
    found.append(row("the first request, in characters", characters(requests[0])))
    for count in (88, 500):
        first = (
            await requests_of([fake.text("Hi.")], with_servers(directory / f"f{count}", count), directory / f"f{count}")
        )[0]
        found.append(row(f"the first request with {count} MCP tools", request_tokens(first), 2_500))
        found.append(row(f"the first request with {count} MCP tools, in characters", characters(first)))
    found.append(row(f"{len(requests)} requests of one task", sum(map(request_tokens, requests)), 150_000))
    found.append(row("… with a broken prefix", breaks_in(requests), 0))
    requests = await requests_of(long_task(), "", directory / "long", modules())
    found.append(row(f"{len(requests)} requests of a task in 15 files", sum(map(request_tokens, requests)), 480_000))
    found.append(row("… with a broken prefix", breaks_in(requests), 0))
    for count in (5, 30, 88, 500):
        for is_direct in (True, False):
            home = directory / f"t{count}{is_direct}"
            limits = f"offered_tools = {1_000 if is_direct else 0}\noffered_tool_tokens = 1_000_000\n"
            asked = await requests_of(tool_task(count, is_direct=is_direct), with_servers(home, count, limits), home)
            how = "sent" if is_direct else "found"
            found.append(row(f"a task of 10 steps, {count} MCP tools {how}", sum(map(request_tokens, asked))))
            found.append(row("… with a broken prefix", breaks_in(asked), 0))
    steps = [
        fake.calls(("shell", {"command": line, "access": "write"}), prefix=f"c{n}")
        for n, line in enumerate(NOISY.values())
    ]
    last = (await requests_of([*steps, fake.text("Done.")], "", directory / "noise"))[-1]
    outputs = [message["content"] for message in last["messages"] if message["role"] == "tool"]
    for name, output in zip(NOISY, outputs, strict=True):
        found.append(row(f"a command with {name}", estimate_text(output), 11_000))
    return found


async def main(file: Path | None) -> int:
    with tempfile.TemporaryDirectory(dir=Path(tempfile.gettempdir()).resolve()) as directory:  # noqa: ASYNC240
        found = await rows(Path(directory))
    report(found, file)
    return any(each.is_over for each in found)


if __name__ == "__main__":
    sys.exit(anyio.run(main, arguments(__doc__).parse_args().json))
