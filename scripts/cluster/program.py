"""Start other processes and end cleanly, for compare.py, virtual_cluster.py and virtual_slurm.py."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path

from dist.console import USER_MISTAKE
from scripts.cluster.hosts import ClusterError
from scripts.settings.units import UnitError

HOST_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal told this program to end. Not derived from Exception, so that `except Exception` does not catch it."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.exit_code = 128 + signal_number


def raise_stopped(signal_number, frame):
    raise Stopped(signal_number)


def split_command(words: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line at the first "--" into this program's flags and a command, which may contain more "--"."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def check_machine() -> None:
    """Raise ClusterError unless this process can create virtual hosts (root on Linux) and finds the tools."""
    if sys.platform != "linux":
        raise ClusterError("virtual hosts need Linux namespaces; this is not Linux")
    if os.geteuid() != 0:
        raise ClusterError("only root can create virtual hosts and networks: run with sudo")
    check_tools(HOST_TOOLS)


def check_tools(tools: dict[str, str]) -> None:
    """Raise ClusterError unless every tool is found. tools: {command: what to install}."""
    for tool, package in tools.items():
        if shutil.which(tool) is None:
            raise ClusterError(f"no command {tool!r}: install {package}")


def check_command(command: list[str]) -> None:
    if not command:
        raise ClusterError("no command: end the command line with -- COMMAND...")


def end_with(work: Callable[[], int]) -> None:
    """Call `work` and end this process with the exit code that it returns.

    Ctrl-C, SIGTERM, a closing terminal and a closed output pipe stop `work`. A user's mistake becomes one line.
    """
    for number in ENDS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup has SIGHUP ignored: leave it
            signal.signal(number, raise_stopped)
    try:
        raise SystemExit(work())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that Python still buffers
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (ClusterError, UnitError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(USER_MISTAKE) from None
    except Stopped as stopped:
        raise SystemExit(stopped.exit_code) from None


def run_process(command: list[str], stop: Callable[[subprocess.Popen], None], **options) -> int:
    """Run a command. Return its exit code, or 128 + the signal that ended it. options: for Popen.

    On Stopped, call `stop(process)` and raise Stopped again.
    """
    process = None
    try:
        with undisturbed([number for number in ENDS if signal.getsignal(number) is raise_stopped]):
            process = subprocess.Popen(command, **options)
        code = process.wait()
    except Stopped:
        if process:
            stop(process)
        raise
    return code if code >= 0 else 128 - code


@contextmanager
def undisturbed(numbers: Iterable[int]):
    """Defer terminating signals until the block ends: a signal during Popen would leave a child nobody can stop."""
    arrived = []
    handlers = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])


def end_process(process: subprocess.Popen, grace_s: float) -> None:
    """Tell a process to end. Kill it after grace_s seconds, or when this program is told to end again."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()
