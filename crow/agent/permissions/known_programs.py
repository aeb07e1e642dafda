"""Tables of programs that run other programs, or that have subcommands."""

from __future__ import annotations

from collections.abc import Mapping

SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "fish", "rbash", "csh", "tcsh"))
WRAPPERS: Mapping[str, tuple[str, int]] = {
    **dict.fromkeys(("builtin", "busybox", "command", "nohup", "pkexec", "prlimit"), ("", 0)),
    **dict.fromkeys(("setpriv", "setsid", "unbuffer"), ("", 0)),
    **dict.fromkeys(("chroot", "setarch", "taskset"), ("", 1)),
    "caffeinate": ("tw", 0),
    "chrt": ("TPD", 1),
    "doas": ("uC", 0),
    "env": ("uCS", 0),
    "exec": ("a", 0),
    "flock": ("wE", 1),
    "ionice": ("cn", 0),
    "ltrace": ("oeupn", 0),
    "nice": ("n", 0),
    "parallel": ("jINPaS", 0),
    "rlwrap": ("", 0),
    "runuser": ("ugGcs", 0),
    "script": ("cEIOBTm", 0),
    "ssh": ("oFEiJlLRDpbBcImOQSwW", 1),
    "stdbuf": ("ioe", 0),
    "strace": ("oeupEasPSUbX", 0),
    "su": ("cgGsw", 0),
    "sudo": ("uCDgRrTtUph", 0),
    "systemd-run": ("pEtuMH", 0),
    "time": ("fo", 0),
    "timeout": ("ks", 1),
    "unshare": ("SGRwm", 0),
    "nsenter": ("tSG", 0),
    "watch": ("n", 0),
    "xargs": ("aEeIiLlnPsd", 0),
}
"""Programs that run another program. Each maps to two values: the letters of the options that take a value, and the
number of operands that come before the other program."""

RUNNERS = frozenset(
    (
        *("bunx", "direnv", "mise", "nix", "nix-shell", "npx", "pipx", "pnpx", "uvx", "toolbox", "firejail", "entr"),
        *("watchexec", "nodemon", "hyperfine", "fakeroot", "gosu", "su-exec", "tini", "dumb-init", "valgrind", "perf"),
        *("faketime", "runcon", "sg", "cgexec", "numactl", "eatmydata", "bwrap", "proxychains", "proxychains4"),
        *("torsocks", "sshpass", "tmux", "screen", "start-stop-daemon", "adb", "dbus-run-session", "xvfb-run"),
        *("linux32", "linux64", "chronic", "chpst", "envdir", "softlimit", "setuidgid", "uftrace", "toybox"),
        *("gchroot", "genv", "gnice", "gnohup", "gstdbuf", "gtimeout", "gxargs"),
    )
)
"""More programs that run another program. Their command lines vary too much for `WRAPPERS`, or they are programs of GNU
under the names that they have on macOS."""
FIND_RUNS = {
    **dict.fromkeys(("find", "gfind"), frozenset(("-exec", "-execdir", "-ok", "-okdir"))),
    **dict.fromkeys(("fd", "fdfind"), frozenset(("-x", "-X", "--exec", "--exec-batch"))),
}
"""Programs that find files and may run another program for them. Each maps to the options that come before the name of
the other program."""
SUBCOMMANDS: Mapping[str, frozenset[str]] = {
    "git": frozenset(
        ("-C", "-c", "--git-dir", "--work-tree", "--namespace", "--exec-path", "--super-prefix", "--config-env")
    ),
    "docker": frozenset(("-H", "--host", "-c", "--context", "-l", "--log-level", "--config")),
    "podman": frozenset(("--connection", "-c", "--url", "--log-level", "--root")),
    "kubectl": frozenset(("-n", "--namespace", "--context", "--kubeconfig", "-s", "--server", "--cluster", "--user")),
    "helm": frozenset(("-n", "--namespace", "--kube-context", "--kubeconfig")),
    "cargo": frozenset(("-C", "-Z", "--config", "--color")),
    "npm": frozenset(("--prefix", "-C", "--registry", "-w", "--workspace", "--userconfig", "--loglevel")),
    "pnpm": frozenset(("-C", "--dir", "--filter", "-F", "--registry")),
    "yarn": frozenset(("--cwd", "--registry")),
    "gh": frozenset(("-R", "--repo")),
    "go": frozenset(("-C",)),
    **dict.fromkeys(
        (
            *("apt", "apt-get", "aws", "az", "brew", "bundle", "conda", "dnf", "gcloud", "gem", "hg", "jj", "pip"),
            *("pip3", "poetry", "rustup", "snap", "svn", "systemctl", "terraform", "twine", "uv", "yum"),
        ),
        frozenset[str](),
    ),
}
"""Programs whose first operand is a subcommand. Each maps to the options that may come before the subcommand and take
the next word as their value."""


def program_of(word: str) -> str:
    """Return the name of a program without its directory."""
    return word.rpartition("/")[2]
