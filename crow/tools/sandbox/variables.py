"""The environment variables that tell confined commands where their temporary files and caches are."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crow.tools.network.registries import DEFAULT_REGISTRIES
from crow.tools.sandbox.paths import is_inside_any, prefixes_of

_CACHES = {
    "XDG_CACHE_HOME": ("xdg", ".cache"),
    "PIP_CACHE_DIR": ("pip", ".cache/pip"),
    "UV_CACHE_DIR": ("uv", ".cache/uv"),
    "npm_config_cache": ("npm", ".npm"),
    "YARN_CACHE_FOLDER": ("yarn", ".cache/yarn"),
    "BUN_INSTALL_CACHE_DIR": ("bun", ".bun/install/cache"),
    "DENO_DIR": ("deno", ".cache/deno"),
    "GOCACHE": ("go-build", ".cache/go-build"),
    "GOMODCACHE": ("go-mod", "go/pkg/mod"),
    "GRADLE_USER_HOME": ("gradle", ".gradle"),
    "CCACHE_DIR": ("ccache", ".cache/ccache"),
    "SCCACHE_DIR": ("sccache", ".cache/sccache"),
    "COMPOSER_CACHE_DIR": ("composer", ".cache/composer"),
    "CARGO_HOME": ("cargo", ".cargo"),
}
"""The keys are variables that say where a cache is. Each value has the cache's name in the commands' own directory, and
the cache's usual place below HOME."""

_GO_PROXY = f"https://{DEFAULT_REGISTRIES['go'][0]},direct"
"""What go uses if GOPROXY is not set."""

_WORKSPACE_CACHES = {"MYPY_CACHE_DIR": "mypy", "RUFF_CACHE_DIR": "ruff", "CARGO_TARGET_DIR": "cargo-target"}
"""The keys are variables that move a tool's files out of the workspace. The values are the names of the directories
that receive the files. Only commands that cannot write into the workspace at all get these variables."""

PYTEST_CACHE = "pytest"
"""The name of the directory for pytest's cache, which an option of pytest sets. The directory must exist before pytest
runs. Otherwise pytest would create it and change its mode, which not every sandbox allows."""

_KEPT_PLACES = {
    "COREPACK_HOME": ".cache/node/corepack",
    "PRE_COMMIT_HOME": ".cache/pre-commit",
    "PLAYWRIGHT_BROWSERS_PATH": ".cache/ms-playwright",
    "GRADLE_RO_DEP_CACHE": ".gradle/caches",
}
"""The keys are variables that say where programs or dependencies are installed. The values are the usual places of
these installations below HOME. Without these variables, tools would look below the new XDG_CACHE_HOME or
GRADLE_USER_HOME."""

REMOVED = (
    *("SSH_AUTH_SOCK", "SSH_AGENT_PID", "GPG_AGENT_INFO", "DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR"),
    *("DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "SESSION_MANAGER", "TMUX", "VSCODE_IPC_HOOK_CLI"),
)
"""Variables that refer to the user's other programs, mostly to their sockets. Commands do not get these variables,
because confined commands cannot reach those programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlaces:
    """Where the tools that a command runs keep their files."""

    env: Mapping[str, str]
    """The environment that crow adapts for the command."""
    home: Path
    caches: Path
    """The commands' own directory for caches."""
    writable: Sequence[Path]
    """The directories that the command can change. A cache in one of them stays where it is."""

    def variables(self, *, has_network: bool) -> dict[str, str]:
        """Return the variables that move caches to `caches`, and those that name the places of `_KEPT_PLACES`, which do
        not move. `has_network` says whether the command has the whole network."""
        inside, own = prefixes_of(self.writable), f"{self.caches}{os.sep}"
        variables = {}
        for name, (directory, place) in _CACHES.items():
            usual = self.env.get(name) or f"{self.home}{os.sep}{place}"
            if f"{usual}{os.sep}".startswith(inside) or (name == "CARGO_HOME" and not has_network):
                continue
            variables[name] = f"{own}{directory}"
        if "GOMODCACHE" in variables:
            others = self.env.get("GOPROXY") or _GO_PROXY
            variables["GOPROXY"] = f"{self._go_downloads()},{others if has_network else 'off'}"
        for name, place in _KEPT_PLACES.items():
            if name not in self.env and os.path.isdir(found := f"{self.home}{os.sep}{place}"):
                variables[name] = found
        return variables

    def workspace_variables(self) -> dict[str, str]:
        """Return the variables that make tools write to `caches` instead of the workspace."""
        variables = {name: str(self.caches / directory) for name, directory in _WORKSPACE_CACHES.items()}
        pytest = f"-o cache_dir={shlex.quote(str(self.caches / PYTEST_CACHE))}"
        return variables | {"PYTEST_ADDOPTS": f"{self.env.get('PYTEST_ADDOPTS', '')} {pytest}".strip()}

    def download_variables(self) -> dict[str, str]:
        """Return more variables for a command that can reach hosts. They tell go and cargo where earlier downloads are,
        and where to put new ones. A cargo home with downloads of the user stays where it is, read-only, so that builds
        find them."""
        variables = {}
        if not is_inside_any(self._go_modules(), self.writable):
            variables["GOPROXY"] = f"{self._go_downloads()},{self.env.get('GOPROXY') or _GO_PROXY}"
        cargo = Path(self.env.get("CARGO_HOME") or self.home / _CACHES["CARGO_HOME"][1])
        if not is_inside_any(cargo, self.writable) and not (cargo / "registry").is_dir():
            variables["CARGO_HOME"] = str(self.caches / _CACHES["CARGO_HOME"][0])
        return variables

    def _go_modules(self) -> Path:
        """Return the directory in which go keeps the modules that the user has downloaded."""
        usual = self.home / _CACHES["GOMODCACHE"][1]
        named = Path(self.env.get("GOMODCACHE") or usual)
        return named if named.is_absolute() else usual  # go itself refuses a relative one

    def _go_downloads(self) -> str:
        """Return the URL under which go finds the modules in that directory."""
        return (self._go_modules() / "cache" / "download").as_uri()
