"""Two hosts on one machine: network namespaces with names, addresses and a cable to the same switch.

    host-a 10.77.0.1 ── eth0 ══ port-a ── switch ── port-b ══ eth0 ── host-b 10.77.0.2

The switch is a bridge in a third namespace. Taking one of its ports down is what pulling a cable is: the host at its
end sees that it has no carrier, the other one sees silence. Each host has its own loopback, host name and
`/etc/hosts`; disks, memory and process numbers are the machine's. There is no way out of this network.
"""

import errno
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2"}
HOSTS_FILES = Path("/etc/netns")
"""Where `ip netns exec` looks for files that a namespace has in place of those in /etc."""
END_S = 30.0


class NetworkError(RuntimeError):
    """The network could not be made; the message says which command failed and why."""


def missing() -> str | None:
    """Why there can be no such network here; None where it can be made."""
    if os.geteuid():
        return "network namespaces need root"
    if absent := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        return f"network namespaces need the command {' and '.join(absent)}"
    try:
        with Network(f"slip-{os.getpid()}-try"):
            return None
    except NetworkError as error:
        return str(error)


class Network:
    """The hosts `a` and `b` and their switch, from `with` to its end, which ends all processes in them.

    Args:
        name: beginning of the namespaces' names; no other network of the machine may have it.
    """

    def __init__(self, name: str):
        self._name, self._switch = name, f"{name}-switch"
        self._spaces = {host: f"{name}-{host}" for host in HOSTS}

    def __enter__(self) -> "Network":
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def _make(self) -> None:
        for space in (self._switch, *self._spaces.values()):
            _ip("netns", "add", space)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        names = "".join(f"{address} host-{host}\n" for host, address in HOSTS.items())
        for host, space in self._spaces.items():
            port = f"port-{host}"
            _ip("link", "add", port, "netns", self._switch, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"{HOSTS[host]}/30", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
            folder = HOSTS_FILES / space
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def _remove(self) -> None:
        for host, space in self._spaces.items():
            self.kill(host)
            shutil.rmtree(HOSTS_FILES / space, ignore_errors=True)
        for space in (self._switch, *self._spaces.values()):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def inside(self, host: str, command: list[str]) -> list[str]:
        """The command that runs `command` on `host`, under that host's name."""
        named = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        enter = ["ip", "netns", "exec", self._spaces[host], "unshare", "--uts", "sh", "-c", named, f"host-{host}"]
        return [*enter, *command]

    def processes(self, host: str) -> dict[int, str]:
        """Titles of all processes on `host`, by number."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._spaces[host]], capture_output=True, text=True, check=False
        )
        titles = {}
        for pid in map(int, listed.stdout.split()):
            try:
                titles[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESRCH):
                    raise
        return titles

    def kill(self, host: str) -> None:
        """End all processes on `host` at once, as a power cut would.

        Raises:
            NetworkError: some are still there after half a minute.
        """
        deadline = time.monotonic() + END_S
        while left := self.processes(host):
            if time.monotonic() > deadline:
                raise NetworkError(f"processes on host {host} do not end: {left}")
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)

    def cut(self) -> None:
        """Pull host b's cable."""
        _ip("-n", self._switch, "link", "set", "port-b", "down")

    def mend(self) -> None:
        """Put it back."""
        _ip("-n", self._switch, "link", "set", "port-b", "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
