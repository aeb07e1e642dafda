"""`python -m release`: makes the archives in dist/, and the registry's entry that names them."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from crow.version import __version__
from release.archive import FOLDER, MAX_BYTES, PLATFORMS, Platform, constraints_for, pack
from release.contents import add_launchers, problems, prune_packages, prune_python, third_party
from release.registry import entry

ROOT = Path(__file__).parents[1]
PYTHON = "3.13.18"
"""The version of Python in the archives. uv knows the checksum of each build of it."""


class ReleaseError(Exception):
    """An archive cannot be made. The message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit code: 0, or 1 after an error."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    add = parser.add_argument
    add("--uv", default="uv", help="the uv that fetches Pythons and wheels")
    add(
        "--platform", action="append", choices=PLATFORMS, help="make only the archive of this platform; may be repeated"
    )
    add("--python", action="append", default=[], metavar="PLATFORM=DIR", help="take this relocatable Python instead")
    add("--wheel", type=Path, required=True, help="the wheel of crow")
    add("--out", type=Path, default=ROOT / "dist", help="where the archives go (default: dist/)")
    add("--downloads", default="", help="the address below which the archives will be found; makes agent.json")
    options = parser.parse_args(arguments)
    try:
        builder = Builder(options.uv, options.wheel, options.out, given_pythons(options.python))
        sums = {name: builder.build(PLATFORMS[name]) for name in options.platform or PLATFORMS}
    except (ReleaseError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"release: exit code {error.returncode}: {shlex.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    lines = sorted(f"{digest}  {PLATFORMS[name].archive}" for name, digest in sums.items())
    (options.out / "SHA256SUMS").write_text("\n".join(lines) + "\n", "utf-8")
    if options.downloads:
        published = {name: f"{options.downloads.rstrip('/')}/{PLATFORMS[name].archive}" for name in sums}
        (options.out / "agent.json").write_text(json.dumps(entry(published), indent=2) + "\n", "utf-8")
    return 0


def given_pythons(given: Sequence[str]) -> dict[str, str]:
    """Return the Pythons of `--python` by platform. :raises ReleaseError: one of them cannot be used."""
    pythons = {}
    for each in given:
        name, _, place = each.partition("=")
        if name not in PLATFORMS:
            raise ReleaseError(f'--python {each}: "{name}" is not one of {", ".join(PLATFORMS)}')
        if not place or not (Path(place) / PLATFORMS[name].interpreter).is_file():
            raise ReleaseError(f'--python {each}: "{place}" has no {PLATFORMS[name].interpreter}')
        pythons[name] = place
    return pythons


class Builder:
    """Makes archives, one for each platform."""

    def __init__(self, uv: str, wheel: Path, out: Path, pythons: dict[str, str]) -> None:
        self._uv = uv
        self._wheel = wheel.resolve()
        self._out = out
        self._pythons = pythons
        """Maps platforms to Pythons that need not be fetched."""
        self._work = ROOT / "build" / "archives"

    def build(self, target: Platform) -> str:
        """Make the archive of a platform. Return its SHA-256.

        :raises ReleaseError: the archive is too large, or something in it is of another platform.
        """
        stage = self._work / target.name / FOLDER
        shutil.rmtree(stage.parent, ignore_errors=True)
        shutil.copytree(self._python(target), stage, symlinks=True)
        prune_python(stage)
        packages = stage / target.packages
        self._install(target, packages)
        prune_packages(packages)
        add_launchers(stage, target)
        (stage / "THIRD_PARTY.txt").write_text(third_party(stage, target), "utf-8")
        shutil.copy(ROOT / "LICENSE", stage / "LICENSE")
        self._compile(stage / target.library)
        if found := problems(stage, target, __version__):
            raise ReleaseError(f"{target.archive}: " + "; ".join(found))
        self._out.mkdir(parents=True, exist_ok=True)
        digest, size = pack(stage, self._out / target.archive)
        print(f"{target.archive}: {size / 1e6:.1f} MB, sha256 {digest}")
        if size > MAX_BYTES:
            raise ReleaseError(f"{target.archive} has {size / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:.0f} are allowed")
        return digest

    def _python(self, target: Platform) -> Path:
        """Return a relocatable Python for a platform. uv fetches it, and compares its checksum."""
        if target.name in self._pythons:
            return Path(self._pythons[target.name])
        places, name = self._work / "pythons", f"cpython-{PYTHON}-{target.python}"
        if not (places / name).exists():
            self._run(self._uv, "python", "install", "--no-bin", "--install-dir", str(places), name)
        return places / name

    def _install(self, target: Platform, packages: Path) -> None:
        """Install crow and the packages that it needs, each in the version of constraints.txt, and only wheels."""
        pins = self._work / target.name / "constraints.txt"
        pins.write_text(constraints_for(target, (ROOT / "constraints.txt").read_text("utf-8")), "utf-8")
        self._run(
            *(self._uv, "pip", "install", "--quiet", "--target", str(packages), "--python", str(self._host_python())),
            *("--python-version", PYTHON, "--python-platform", target.wheels, "--only-binary", ":all:"),
            *("--link-mode", "copy", "--constraint", str(pins), f"crow-acp[serve,postgres] @ {self._wheel.as_uri()}"),
        )

    def _compile(self, library: Path) -> None:
        """Compile all modules. The bytecode is the same on every platform, and is never compared with the source.

        The packages of others are kept as bytecode alone, which saves a fifth of an archive. Crow runs some of its own
        modules as files.
        """
        packages = library / "site-packages"
        others = [str(each) for each in sorted(packages.iterdir()) if each.name != "crow" and _has_modules(each)]
        self._compiled(library, "-x", "/site-packages/", str(library))
        self._compiled(library, str(packages / "crow"))
        self._compiled(library, "-b", *others)
        for source in [path for each in others for path in (Path(each), *Path(each).rglob("*.py")) if path.is_file()]:
            if source.with_suffix(".pyc").exists():
                source.unlink()

    def _compiled(self, library: Path, *arguments: str) -> None:
        command = [str(self._host_python()), "-I", "-m", "compileall", "-q", "-j", "1", "-s", str(library)]
        options = ["--invalidation-mode", "unchecked-hash", *arguments]
        subprocess.run([*command, *options], check=True, env={"PYTHONHASHSEED": "0"})  # noqa: S603  our own arguments

    def _host_python(self) -> Path:
        """Return a Python of the archives' version that runs on this machine."""
        system, machine = platform.system().lower(), platform.machine().lower()
        name = f"{system}-{ {'amd64': 'x86_64', 'arm64': 'aarch64'}.get(machine, machine) }"
        if name not in PLATFORMS:
            raise ReleaseError(f"archives cannot be made on {name}; on one of these: {', '.join(PLATFORMS)}")
        return self._python(PLATFORMS[name]) / PLATFORMS[name].interpreter

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True)  # noqa: S603


def _has_modules(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and not path.name.endswith(".dist-info"))


if __name__ == "__main__":
    sys.exit(main())
