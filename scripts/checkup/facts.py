"""How facts are gathered, so that nothing holds up a rank that others wait for.

    {"place": which rank on which host, "errors": {section: why it could not be looked at}, section: its facts, ...}

A section is a function whose answer JSON can hold. Nothing here speaks with other ranks.
"""

import faulthandler
import os
import socket
import threading
from importlib.util import find_spec

from dist.console import say
from scripts.machine.host import version_of

SECTION_LIMIT_S = 60.0  # a file system or a driver that hangs holds up its own section
LAST_RESORT_S = 5.0


def new_facts() -> dict:
    """Of a process that knows no other yet."""
    host = socket.gethostname()
    place = {"rank": 0, "size": 1, "node": 0, "nodes": 1, "host": host, "local_rank": 0, "local_size": 1}
    return {"place": place, "errors": {}}


def gather(facts: dict, sections: dict, limit_s: float = SECTION_LIMIT_S) -> None:
    """Call each section; what it returns, or why it did not, becomes a part of `facts`."""

    def look(section, outcome):
        try:
            outcome["answer"] = section()
        except BaseException as error:  # whatever it is: a library's import may even raise SystemExit
            outcome["error"] = error_text(error)

    for name, section in sections.items():
        outcome = {}
        # No thread can be stopped; one that hangs ends with the process.
        thread = threading.Thread(target=look, args=(section, outcome), daemon=True)
        thread.start()
        thread.join(limit_s)
        if "answer" in outcome:
            facts[name] = outcome["answer"]
        else:
            facts["errors"][name] = outcome.get("error", f"no answer in {limit_s:g} s")


def error_text(error: BaseException) -> str:
    first_line = (str(error).strip() or repr(error)).splitlines()[0]
    return f"{type(error).__name__}: {first_line}"


def variables(*names: str) -> dict[str, str]:
    """Those of the environment's variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def installed(package: str) -> str | None:
    """Its version; "unknown" of a module that is there without being installed, None of what is not there."""
    return version_of(package) or ("unknown" if find_spec(package) else None)


class TimeLimit:
    """From here on this process has `seconds`; then it says what it was doing, its `stage`, and ends with code 1."""

    def __init__(self, seconds: float):
        self.stage, self._seconds = "starting", seconds
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        # A library's start may hold the interpreter, and then no thread of Python's runs: this one is none.
        faulthandler.dump_traceback_later(seconds + LAST_RESORT_S, exit=True)

    def _end(self) -> None:
        who = f"{socket.gethostname()}, process {os.getpid()}"
        text = f"doctor: will fail: {who}: not done after {self._seconds:g} s, while {self.stage}"
        say(text, on_stderr=True)
        os._exit(1)
