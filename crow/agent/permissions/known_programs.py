"""Tables of programs that run other programs, or that have subcommands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "fish", "rbash", "csh", "tcsh"))


class Wrapper(NamedTuple):
    """The command line of a program that runs another program."""

    letters: str = ""
    """Short options that take a value: the rest of the word or, if nothing is left of it, the next word."""
    operands: int = 0
    """How many operands come before the other program."""
    attached: str = ""
    """Short options whose value can only be the rest of the word."""
    lines: str = ""
    """Short options whose value is a command line."""
    joins: bool = False
    """Whether the program joins the words of the other command and has a shell read them."""


WRAPPERS: Mapping[str, Wrapper] = {
    **dict.fromkeys(("builtin", "busybox", "command", "nohup", "pkexec", "setpriv", "setsid", "unbuffer"), Wrapper()),
    "caffeinate": Wrapper("tw"),
    "chroot": Wrapper("ugG", 1),
    "chrt": Wrapper("TPD", 1),
    "doas": Wrapper("auC"),
    "docker exec": Wrapper("euw", 1),
    "env": Wrapper("auCLUP", lines="S"),
    "exec": Wrapper("a"),
    "flock": Wrapper("wE", 1),
    "ionice": Wrapper("cn"),
    "kubectl exec": Wrapper("cfn", 1),
    "ltrace": Wrapper("aADeFlnopsuwxX"),
    "nice": Wrapper("n"),
    "nsenter": Wrapper("tSGWN", attached="muinpCUTrw"),
    "prlimit": Wrapper("po", attached="cdefilmnqrstuvxy"),
    "ssh": Wrapper("BbcDEeFIiJLlmOoPpQRSWw", 1, joins=True),
    "stdbuf": Wrapper("ioe"),
    "strace": Wrapper("abeEIoOpPsSuUX"),
    "sudo": Wrapper("acuCDgRrTtUph"),
    "systemd-run": Wrapper("pEuMHC"),
    "taskset": Wrapper("", 1),
    "time": Wrapper("fo"),
    "timeout": Wrapper("ks", 1),
    "unshare": Wrapper("SGRwl", attached="muinpUCT"),
    "watch": Wrapper("nqs", attached="d", joins=True),
    "xargs": Wrapper("aEIJLnPRsSd", attached="eil"),
}
"""Programs that run another program. If only a subcommand does so, it is part of the key."""

RUNNERS = frozenset(
    (
        *("bunx", "direnv", "mise", "nix", "nix-shell", "npx", "pipx", "pnpx", "uvx", "toolbox", "firejail", "entr"),
        *("watchexec", "nodemon", "hyperfine", "fakeroot", "gosu", "su-exec", "tini", "dumb-init", "valgrind", "perf"),
        *("faketime", "runcon", "sg", "cgexec", "numactl", "eatmydata", "bwrap", "proxychains", "proxychains4"),
        *("torsocks", "sshpass", "tmux", "screen", "start-stop-daemon", "adb", "dbus-run-session", "xvfb-run"),
        *("linux32", "linux64", "chronic", "chpst", "envdir", "softlimit", "setuidgid", "uftrace", "toybox"),
        *("su", "runuser", "run0", "script", "setarch", "i386", "x86_64", "rlwrap", "parallel", "env_parallel", "sem"),
        *(
            "xterm",
            "uxterm",
            "x-terminal-emulator",
            "gnome-terminal",
            "konsole",
            "xfce4-terminal",
            "alacritty",
            "kitty",
        ),
        *(
            "foot",
            "wezterm",
            "autossh",
            "mosh",
            "rsh",
            "pssh",
            "pdsh",
            "clush",
            "ssh-agent",
            "schroot",
            "proot",
            "guix",
        ),
        *(
            "systemd-inhibit",
            "systemd-nspawn",
            "distrobox",
            "distrobox-enter",
            "gdbserver",
            "rr",
            "heaptrack",
            "cpulimit",
        ),
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
