"""Other processes in a test: clients to be killed or stopped, and what a process still holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

WAIT_S = 60.0


class ClientProcess:
    """A client in a process of its own, running `code` (Python source) with `arguments` in `sys.argv[1:]`.

    `expect(line)` waits until it prints that line, which is how a test knows how far it is.
    """

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def expect(self, line: str) -> None:
        """Read up to a line. Raises AssertionError when the process ends before."""
        assert self.process.stdout is not None
        for found in self.process.stdout:
            if found.strip() == line:
                return
        raise AssertionError(f"the client ended with {self.process.wait()} before it said {line!r}")

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT, ..."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def num_descriptors(pid: int | str = "self") -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_shared_maps(pid: int | str = "self") -> int:
    """Maps of arenas: memory objects shared between processes."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:" in line or "/dev/shm/" in line for line in lines)
