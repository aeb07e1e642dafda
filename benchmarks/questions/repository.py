"""The scratch repository that the corpus runs in.

A small project in Python, C, JavaScript, Rust and Go, with tests, a Makefile, a history of commits, a branch, a
remote, and uncommitted changes, as a model finds it in the middle of its work. It is the same each time: dates and
authors are fixed, so two copies differ only in what a command did to them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["changes", "ignored", "make_area", "toolchains"]

DATE = "2026-01-05T09:00:00+00:00"

FILES: Mapping[str, str] = {
    "README.md": """
        # Birdhouse

        Counts eggs in nests.

            birdhouse list
            birdhouse stats data/sightings.csv
        """,
    "CHANGELOG.md": """
        # Changelog

        ## 0.1.0

        - First version.
        """,
    "AGENTS.md": """
        Run `pytest` before you say that something works. Keep functions short.
        """,
    ".gitignore": """
        __pycache__/
        .venv*/
        build/
        dist/
        node_modules/
        target/
        *.egg-info/
        .pytest_cache/
        .mypy_cache/
        .ruff_cache/
        .coverage
        .env
        """,
    ".env": "SECRET=none\n",
    ".env.example": "SECRET=\nDEBUG=0\n",
    ".github/workflows/ci.yml": """
        on: [push]
        jobs:
          test:
            runs-on: ubuntu-latest
            steps:
              - uses: actions/checkout@v4
              - run: make test
        """,
    "pyproject.toml": """
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"

        [project]
        name = "birdhouse"
        version = "0.1.0"
        requires-python = ">=3.11"

        [project.scripts]
        birdhouse = "birdhouse.cli:main"

        [tool.hatch.build.targets.wheel]
        packages = ["src/birdhouse"]

        [tool.pytest.ini_options]
        pythonpath = ["src"]
        testpaths = ["tests"]

        [tool.mypy]
        strict = true

        [tool.ruff]
        line-length = 100
        """,
    "requirements.txt": "requests>=2\n",
    "requirements-dev.txt": "-r requirements.txt\npytest\nruff\nmypy\n",
    "Makefile": """
        CC ?= cc
        PYTHON ?= python

        .PHONY: all test check lint clean

        all: build/count

        build/count: native/count.c
        \t@mkdir -p build
        \t$(CC) -O1 -Wall -o $@ $<

        test: build/count
        \t$(PYTHON) -m pytest -q
        \t./build/count README.md

        check: lint test

        lint:
        \truff check src tests

        clean:
        \trm -rf build dist
        """,
    "Dockerfile": "FROM python:3.12-slim\nCOPY . /app\nRUN pip install /app\n",
    "package.json": """
        {
          "name": "birdhouse",
          "version": "0.1.0",
          "private": true,
          "scripts": {
            "test": "node --test js/",
            "lint": "node scripts/lint.mjs",
            "format": "node scripts/lint.mjs --fix",
            "build": "node scripts/build.mjs",
            "dev": "node js/server.js 18107"
          }
        }
        """,
    "package-lock.json": """
        {
          "name": "birdhouse",
          "version": "0.1.0",
          "lockfileVersion": 3,
          "requires": true,
          "packages": {"": {"name": "birdhouse", "version": "0.1.0"}}
        }
        """,
    "src/birdhouse/__init__.py": '"""Counts eggs in nests."""\n\n__version__ = "0.1.0"\n',
    "src/birdhouse/__main__.py": "from birdhouse.cli import main\n\nmain()\n",
    "src/birdhouse/nest.py": '''
        """Nests and their eggs."""


        class Nest:
            """A nest that holds at most `capacity` eggs.

            >>> Nest(2).count()
            0
            """

            def __init__(self, capacity: int) -> None:
                if capacity < 1:
                    raise ValueError("capacity must be positive")
                self.capacity = capacity
                self._eggs: list[str] = []

            def add_egg(self, species: str) -> None:
                """Add an egg. :raises ValueError: the nest is full."""
                if len(self._eggs) >= self.capacity:
                    raise ValueError("the nest is full")
                self._eggs.append(species)

            def count(self) -> int:
                return len(self._eggs)

            def hatch(self) -> list[str]:
                """Empty the nest."""
                hatched, self._eggs = self._eggs, []
                return hatched  # TODO: keep the egg shells
        ''',
    "src/birdhouse/store.py": '''
        """Sightings in a SQLite database."""

        import sqlite3
        from pathlib import Path


        class Store:
            """A database of sightings."""

            def __init__(self, path: Path) -> None:
                self._connection = sqlite3.connect(path, timeout=5)
                self._connection.execute("create table if not exists sightings (species text, eggs integer)")

            def add(self, species: str, eggs: int) -> None:
                with self._connection:
                    self._connection.execute("insert into sightings values (?, ?)", (species, eggs))

            def total(self) -> int:
                return int(self._connection.execute("select coalesce(sum(eggs), 0) from sightings").fetchone()[0])

            def close(self) -> None:
                self._connection.close()
        ''',
    "src/birdhouse/config.py": '''
        """Settings from a TOML file and the environment."""

        import os
        import tomllib
        from pathlib import Path


        def load(path: Path) -> dict[str, object]:
            settings = tomllib.loads(path.read_text())
            if "BIRDHOUSE_PORT" in os.environ:
                settings["port"] = int(os.environ["BIRDHOUSE_PORT"])
            return settings
        ''',
    "src/birdhouse/server.py": '''
        """A small HTTP server."""

        import json
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps({"status": "ok", "path": self.path}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)


        def serve(port: int) -> ThreadingHTTPServer:
            return ThreadingHTTPServer(("127.0.0.1", port), Handler)
        ''',
    "src/birdhouse/cli.py": '''
        """The command line."""

        import argparse
        import csv
        import json
        import logging
        from collections import Counter
        from importlib import resources
        from pathlib import Path

        from birdhouse.server import serve
        from birdhouse.store import Store


        def main() -> None:
            logging.basicConfig(level=logging.INFO)
            parser = argparse.ArgumentParser(prog="birdhouse")
            commands = parser.add_subparsers(dest="command", required=True)
            listing = commands.add_parser("list")
            listing.add_argument("--limit", type=int, default=10)
            adding = commands.add_parser("add")
            adding.add_argument("species")
            adding.add_argument("eggs", type=int)
            adding.add_argument("--database", type=Path, default=Path("data/birds.db"))
            counting = commands.add_parser("stats")
            counting.add_argument("file", type=Path)
            serving = commands.add_parser("serve")
            serving.add_argument("--port", type=int, default=8000)
            options = parser.parse_args()
            match options.command:
                case "list":
                    text = resources.files("birdhouse").joinpath("data/species.json").read_text()
                    for species in json.loads(text)[: options.limit]:
                        print(species["name"])
                case "add":
                    store = Store(options.database)
                    store.add(options.species, options.eggs)
                    store.close()
                case "stats":
                    stats(options.file)
                case "serve":
                    serve(options.port).serve_forever()


        def stats(file: Path) -> None:
            with file.open() as lines:
                eggs = Counter[str]()
                for row in csv.DictReader(lines):
                    eggs[row["species"]] += int(row["eggs"])
            for species, count in sorted(eggs.items()):
                print(species, count)
        ''',
    "src/birdhouse/data/species.json": """
        [
          {"name": "wren", "legs": 2},
          {"name": "tit", "legs": 2},
          {"name": "robin", "legs": 2}
        ]
        """,
    "tests/__init__.py": "",
    "tests/conftest.py": '''
        """Fixtures."""

        from collections.abc import Iterator
        from pathlib import Path

        import pytest

        from birdhouse.store import Store


        @pytest.fixture
        def store(tmp_path: Path) -> Iterator[Store]:
            store = Store(tmp_path / "birds.db")
            yield store
            store.close()
        ''',
    "tests/test_nest.py": """
        import pytest

        from birdhouse.nest import Nest


        def test_a_nest_holds_eggs() -> None:
            nest = Nest(2)
            nest.add_egg("wren")
            assert nest.count() == 1


        def test_a_full_nest_refuses() -> None:
            nest = Nest(1)
            nest.add_egg("wren")
            with pytest.raises(ValueError, match="full"):
                nest.add_egg("tit")


        @pytest.mark.parametrize("capacity", [0, -1])
        def test_capacity_is_positive(capacity: int) -> None:
            with pytest.raises(ValueError, match="capacity"):
                Nest(capacity)


        def test_hatch_empties_the_nest() -> None:
            nest = Nest(1)
            nest.add_egg("wren")
            assert nest.hatch() == ["wren"]
            assert nest.count() == 0
        """,
    "tests/test_store.py": """
        from birdhouse.store import Store


        def test_a_new_store_is_empty(store: Store) -> None:
            assert store.total() == 0


        def test_sightings_are_summed(store: Store) -> None:
            store.add("wren", 2)
            store.add("tit", 3)
            assert store.total() == 5
        """,
    "tests/test_config.py": """
        from pathlib import Path

        from birdhouse.config import load


        def test_the_file_is_read() -> None:
            assert load(Path("config/dev.toml"))["port"] == 8000
        """,
    "tests/test_cli.py": """
        import subprocess
        import sys


        def test_the_list_has_wrens() -> None:
            command = [sys.executable, "-m", "birdhouse", "list"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": "src"})
            assert "wren" in done.stdout
        """,
    "tests/test_server.py": """
        import threading
        from urllib.request import ProxyHandler, build_opener

        from birdhouse.server import serve


        def test_health_is_served_on_loopback() -> None:
            server = serve(0)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_address[1]}/health"
            with build_opener(ProxyHandler({})).open(url, timeout=10) as answer:
                assert b"ok" in answer.read()
            server.shutdown()
            server.server_close()
        """,
    "tests/test_parallel.py": """
        from concurrent.futures import ProcessPoolExecutor


        def double(number: int) -> int:
            return 2 * number


        def test_processes_share_the_work() -> None:
            with ProcessPoolExecutor(2) as pool:
                assert list(pool.map(double, [1, 2, 3])) == [2, 4, 6]
        """,
    "tests/test_units.py": """
        import unittest

        from birdhouse.nest import Nest


        class NestTest(unittest.TestCase):
            def test_count(self) -> None:
                self.assertEqual(Nest(1).count(), 0)
        """,
    "tests/smoke.sh": """
        set -e
        out=$(mktemp)
        PYTHONPATH=src python -m birdhouse list > "$out"
        grep -q wren "$out"
        rm "$out"
        echo ok
        """,
    "tests/fixtures/one.txt": "wren\n",
    "tests/fixtures/two.txt": "tit\n",
    "js/format.js": """
        'use strict'

        function format(nest) {
          return `${nest.name}: ${nest.eggs}`
        }

        module.exports = { format }
        """,
    "js/format.test.js": """
        'use strict'
        const test = require('node:test')
        const assert = require('node:assert')
        const { format } = require('./format.js')

        test('format names the bird', () => {
          assert.equal(format({ name: 'wren', eggs: 3 }), 'wren: 3')
        })
        """,
    "js/index.js": """
        'use strict'
        const species = require('../src/birdhouse/data/species.json')

        for (const bird of species) console.log(bird.name)
        """,
    "js/server.js": """
        'use strict'
        const http = require('node:http')

        const server = http.createServer((request, response) => response.end('ok'))
        server.listen(Number(process.argv[2] || 8000), '127.0.0.1')
        """,
    "scripts/lint.mjs": """
        import fs from 'node:fs'

        for (const name of fs.readdirSync('js')) {
          const text = fs.readFileSync(`js/${name}`, 'utf8')
          const better = text.trimEnd() + '\\n'
          if (process.argv.includes('--fix')) fs.writeFileSync(`js/${name}`, better)
          else if (text !== better) process.exitCode = 1
        }
        """,
    "scripts/build.mjs": """
        import fs from 'node:fs'

        fs.mkdirSync('dist', { recursive: true })
        for (const name of ['format.js', 'index.js']) fs.copyFileSync(`js/${name}`, `dist/${name}`)
        console.log('built')
        """,
    "scripts/release-notes.mjs": "console.log('# Release\\n\\n- Nests refuse negative capacities.')\n",
    "scripts/release.sh": '#!/bin/sh\nset -e\nmake test\ngit tag "$1"\n',
    "scripts/check-env.sh": "for tool in python git make; do command -v $tool > /dev/null && echo $tool ok; done\n",
    "scripts/report.py": """
        import csv
        from pathlib import Path

        rows = list(csv.DictReader(Path("data/sightings.csv").open()))
        print(len(rows), "sightings of", len({row["species"] for row in rows}), "species")
        """,
    "scripts/seed.py": """
        import sqlite3

        connection = sqlite3.connect("data/birds.db")
        with connection:
            connection.executemany("insert into sightings values (?, ?)", [("owl", 2), ("jay", 4)])
        """,
    "scripts/migrate.py": """
        import sqlite3
        import sys

        connection = sqlite3.connect(sys.argv[-1])
        with connection:
            connection.execute("alter table sightings add column place text")
        """,
    "scripts/generate.py": """
        import json
        from pathlib import Path

        species = json.loads(Path("src/birdhouse/data/species.json").read_text())
        lines = [f"{bird['name'].upper()} = {bird['name']!r}" for bird in species]
        Path("src/birdhouse/names.py").write_text("\\n".join(lines) + "\\n")
        """,
    "native/count.c": """
        #include <stdio.h>

        int main(int argc, char **argv) {
            int lines = 0, c;
            FILE *file = argc > 1 ? fopen(argv[1], "r") : stdin;
            if (file == NULL) {
                perror(argv[1]);
                return 1;
            }
            while ((c = fgetc(file)) != EOF)
                lines += c == '\\n';
            printf("%d\\n", lines);
            return 0;
        }
        """,
    "native/Makefile": """
        test: ../build/native-count
        \t../build/native-count count.c

        ../build/native-count: count.c
        \tmkdir -p ../build
        \tcc -o $@ $<
        """,
    "native/CMakeLists.txt": """
        cmake_minimum_required(VERSION 3.13)
        project(count C)
        add_executable(count count.c)
        """,
    "engine/Cargo.toml": """
        [package]
        name = "engine"
        version = "0.1.0"
        edition = "2021"
        """,
    "engine/Cargo.lock": """
        # This file is automatically @generated by Cargo.
        # It is not intended for manual editing.
        version = 3

        [[package]]
        name = "engine"
        version = "0.1.0"
        """,
    "engine/src/lib.rs": """
        //! Counts eggs.

        pub fn count(eggs: &[&str]) -> usize {
            eggs.len()
        }

        #[cfg(test)]
        mod tests {
            use super::*;

            #[test]
            fn counts() {
                assert_eq!(count(&["wren", "tit"]), 2);
            }
        }
        """,
    "engine/src/main.rs": """
        fn main() {
            let eggs: Vec<String> = std::env::args().skip(1).collect();
            let names: Vec<&str> = eggs.iter().map(String::as_str).collect();
            println!("{}", engine::count(&names));
        }
        """,
    "tools/sum/go.mod": "module example.invalid/sum\n\ngo 1.21\n",
    "tools/sum/sum.go": "package sum\n\nfunc Sum(a, b int) int { return a + b }\n",
    "tools/sum/sum_test.go": """
        package sum

        import "testing"

        func TestSum(t *testing.T) {
        \tif Sum(1, 2) != 3 {
        \t\tt.Fatal("wrong")
        \t}
        }
        """,
    "config/dev.toml": 'port = 8000\ntimeout = 5\ndatabase = "data/birds.db"\n',
    "config/prod.toml": 'port = 80\ntimeout = 30\ndatabase = "/var/lib/birdhouse/birds.db"\n',
    "docs/usage.md": "# Usage\n\nRun `birdhouse list`.\n\nfoo\n",
    "docs/design.md": "# Design\n\nA nest holds eggs.\n",
    "data/usage.patch": """
        --- a/docs/design.md
        +++ b/docs/design.md
        @@ -1,3 +1,3 @@
        -# Design
        +# Architecture

         A nest holds eggs.
        """,
    "logs/app.log": "".join(
        f"2026-01-05 09:{n:02}:00 {'ERROR full nest' if n % 9 == 0 else 'INFO egg laid'}\n" for n in range(60)
    ),
}
"""The files of the first commit."""

EDITED = ("capacity must be positive", "capacity must be positive, not negative")
"""The uncommitted change in src/birdhouse/nest.py."""

REPRO = "from birdhouse.nest import Nest\n\nprint(Nest(capacity=1).count())\n"
"""An untracked file, such as models leave behind."""

VENV_SCRIPTS = ("pip", "pytest", "mypy")


def toolchains() -> tuple[Path, ...]:
    """The directories that hold this Python, node and Rust; a confined command must be able to read them."""
    found = {Path(sys.prefix), Path(sys.base_prefix)}
    if node := shutil.which("node"):
        found.add(Path(node).resolve().parents[1])
    if (rust := rust_sysroot()) is not None:
        found.add(rust)
    return tuple(sorted(path for path in found if path.parts[1:2] not in (("usr",), ("bin",))))


def rust_sysroot() -> Path | None:
    """The directory of the Rust toolchain; None if there is none. The programs in it need no rustup."""
    if shutil.which("rustc") is None:
        return None
    done = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=False)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def environment(area: Path, programs: str) -> dict[str, str]:
    """The environment of commands in `area`. `programs` is the PATH without the project's own virtual environment.
    Every way to the network leads to a closed port on loopback."""
    closed = "http://127.0.0.1:9"
    return {
        "PATH": f"{area / 'work' / '.venv' / 'bin'}:{programs}",
        "VIRTUAL_ENV": str(area / "work" / ".venv"),
        "HOME": str(area / "home"),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "GIT_AUTHOR_DATE": DATE,
        "GIT_COMMITTER_DATE": DATE,
        "GIT_CONFIG_NOSYSTEM": "1",
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy"), closed),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1"),
        "PIP_NO_INDEX": "1",
        "npm_config_offline": "true",
        "npm_config_update_notifier": "false",
        "npm_config_audit": "false",
        "npm_config_fund": "false",
        "CARGO_NET_OFFLINE": "true",
        "GOPROXY": "off",
        "COLUMNS": "120",
    }


def programs_path() -> str:
    """PATH for the commands: this Python, node, Rust and the system's programs."""
    places = [Path(sys.executable).parent]
    if node := shutil.which("node"):
        places.append(Path(node).resolve().parent)
    if (rust := rust_sysroot()) is not None:
        places.append(rust / "bin")
    system = [Path(name) for name in ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")]
    return os.pathsep.join(dict.fromkeys(map(str, [*places, *system])))


def make_area(area: Path) -> dict[str, str]:
    """Make `work` (the repository), `origin.git` (its remote) and `home` in an empty directory. Returns the environment
    of commands there."""
    env = environment(area, programs_path())
    work, home = area / "work", area / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        "[user]\n\tname = Dev\n\temail = dev@example.invalid\n[init]\n\tdefaultBranch = main\n"
    )
    work.mkdir()
    for name, text in FILES.items():
        write(work / name, textwrap.dedent(text).removeprefix("\n"))
    write_data(work / "data")
    (work / "scripts" / "check-env.sh").chmod(0o755)
    make_venv(work / ".venv", work / "src")
    make_history(work, env)
    nest = work / "src" / "birdhouse" / "nest.py"
    nest.write_text(nest.read_text().replace(*EDITED))
    (work / "repro.py").write_text(REPRO)
    return env


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_data(data: Path) -> None:
    """Binary files, a table and a database."""
    (data / "logo.bin").write_bytes(b"BIRD" + bytes(range(256)) * 100)
    rows = [f"2026-01-{day:02},{species},{day % 4}\n" for day in range(1, 29) for species in ("wren", "tit", "owl")]
    (data / "sightings.csv").write_text("date,species,eggs\n" + "".join(rows))
    connection = sqlite3.connect(data / "birds.db")
    with connection:
        connection.execute("create table sightings (species text, eggs integer)")
        connection.executemany("insert into sightings values (?, ?)", [("wren", 2), ("tit", 0)])
    connection.close()
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w") as archive, zipfile.ZipFile(data / "fixtures.zip", "w") as zipped:
        for name in ("three.txt", "four.txt"):
            content = f"{name}\n".encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
            zipped.writestr(zipfile.ZipInfo(name, (2026, 1, 5, 9, 0, 0)), content)
    (data / "fixtures.tar.gz").write_bytes(gzip.compress(archived.getvalue(), mtime=0))


def make_venv(venv: Path, source: Path) -> None:
    """A virtual environment with the packages of this Python's own and the project, without a copy of them."""
    python = Path(sys.base_prefix, "bin", "python3").resolve()
    packages = venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    (venv / "bin").mkdir()
    write(venv / "pyvenv.cfg", f"home = {python.parent}\ninclude-system-site-packages = false\n")
    write(packages / "shared.pth", f"{sysconfig.get_paths()['purelib']}\n{source}\n")
    for name in ("python", "python3"):
        (venv / "bin" / name).symlink_to(python)
    for name in VENV_SCRIPTS:
        script = venv / "bin" / name
        write(script, f'#!/bin/sh\nexec {venv}/bin/python -m {name} "$@"\n')
        script.chmod(0o755)
    (venv / "bin" / "ruff").symlink_to(Path(sys.executable).parent / "ruff")


def make_history(work: Path, env: Mapping[str, str]) -> None:
    """Six commits on main, one more on a branch, a tag, and a remote that lacks the newest commits."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=work, env=dict(env), check=True, capture_output=True)

    def commit(message: str, *names: str) -> None:
        git("add", *names)
        git("commit", "-q", "-m", message)

    git("init", "-q")
    commit("Start the project", "pyproject.toml", ".gitignore", "README.md", ".github")
    commit("Add nests and the store", "src", "tests")
    git("tag", "v0.1.0")
    commit("Add the programs in C, JavaScript, Rust and Go", "native", "js", "engine", "tools", "package.json")
    commit("Add scripts and settings", "scripts", "config", "Makefile", "Dockerfile")
    commit("Add data", "data", "logs")
    commit("Add everything else", ".")
    git("checkout", "-q", "-b", "feature/colours")
    write(work / "src" / "birdhouse" / "colours.py", 'COLOURS = ("brown", "blue")\n')
    commit("Add colours", "src")
    git("checkout", "-q", "main")
    origin = str(work.parent / "origin.git")
    git("init", "-q", "--bare", origin)
    git("remote", "add", "origin", origin)
    git("push", "-q", "-u", "origin", "main~1:refs/heads/main", "feature/colours~1:refs/heads/feature/colours")
    git("branch", "-q", "--set-upstream-to", "origin/main", "main")
    git("push", "-q", origin, "main~2:refs/heads/release")  # the clone does not know of it
    git("gc", "-q")


CACHES = frozenset(
    (
        *("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".cache", ".npm", ".cargo", ".coverage"),
        *(".fingerprint", "deps", "incremental", "CMakeFiles", ".sqlite_history", ".rustc_info.json", "CACHEDIR.TAG"),
    )
)
"""Names of files and directories that programs keep for themselves; they are not compared."""

REPOSITORY_PARTS = frozenset({"HEAD", "config", "packed-refs", "refs", "hooks", "info"})
"""The parts of a repository that are compared; the index is read by git."""

BY_NAME = (".gz", ".whl", ".zip", ".d", ".rlib")
"""Ends of names of files that hold times, so that only their existence is compared."""


def changes(area: Path) -> dict[str, str]:
    """The state of everything in `area`, by path: what each file holds, and what git says about the repository.

    Caches are left out. The inside of a repository counts by its refs, index and settings.
    """
    found = {}
    for directory, names, files in os.walk(area):
        is_repository = Path(directory).name in (".git", "origin.git")
        wanted = REPOSITORY_PARTS if is_repository else {*names, *files} - CACHES
        names[:] = sorted(wanted.intersection(names))
        for name in sorted(wanted & {*names, *files}):
            path = Path(directory, name)
            found[str(path.relative_to(area))] = content_of(path)
    for repository in sorted(area.glob("*/.git")):
        found[f"{repository.relative_to(area)} index"] = index_of(repository.parent)
    return found


def content_of(path: Path) -> str:
    """What is at the path: its kind, whether it can be executed, and its content."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"link to {os.readlink(path)}"
    if stat.S_ISDIR(mode):
        return "directory"
    if not stat.S_ISREG(mode):
        return "special file"
    runs = "program" if mode & 0o100 else "file"
    if path.name.endswith(BY_NAME):
        return runs
    return f"{runs} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def index_of(work: Path) -> str:
    """What git has staged, without the times that the index keeps."""
    done = subprocess.run(["git", "ls-files", "--stage"], cwd=work, capture_output=True, text=True, check=False)
    return hashlib.sha256(done.stdout.encode()).hexdigest()[:16]


def ignored(work: Path) -> tuple[str, ...]:
    """The files and directories that git ignores, relative to the repository; directories end with a slash."""
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--directory"]
    return tuple(subprocess.run(command, cwd=work, capture_output=True, text=True, check=False).stdout.splitlines())
