"""Facts about this process and its machine, as plain dicts: a section a subject, and no exception leaves a section.

facts = {"place": which rank on which host, "errors": {section: text} of the sections that could not be looked at,
section: {...} of all others}. Nothing here speaks with other ranks.
"""

import os
import socket
import threading

SECTION_LIMIT_S = 60.0  # a file system or a driver that hangs holds up its own section
# What a launcher calls a rank's number on its node. SLURM_LOCALID comes last: under mpirun it is the launcher's own.
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def new_facts() -> dict:
    """Of a process that knows no other yet."""
    host = socket.gethostname()
    place = {"rank": 0, "size": 1, "node": 0, "nodes": 1, "host": host, "local_rank": 0, "local_size": 1}
    return {"place": place, "errors": {}}


def gather(facts: dict, sections: dict, limit_s: float = SECTION_LIMIT_S) -> None:
    """Call each section; what it returns, or why it did not, becomes a part of `facts`."""
    for name, section in sections.items():
        outcome = _within(section, limit_s)
        if "error" in outcome:
            facts["errors"][name] = outcome["error"]
        else:
            facts[name] = outcome["answer"]


def _within(section, limit_s: float) -> dict:
    """{"answer": what section() returns} or {"error": text}: also if it does not return in time."""
    outcome = {}

    def look():
        try:
            outcome["answer"] = section()
        except BaseException as error:  # whatever it is: a library's import may even raise SystemExit
            outcome["error"] = error_text(error)

    # No thread can be stopped; one that hangs ends with the process.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(limit_s)
    return dict(outcome) or {"error": f"no answer in {limit_s:g} s"}


def error_text(error: BaseException) -> str:
    first_line = (str(error).strip() or repr(error)).splitlines()[0]
    return f"{type(error).__name__}: {first_line}"


def is_first_on_node(environment) -> bool:
    """Whether this process is the first of its node, as far as its launcher says: for what is looked at once a node."""
    name = next((name for name in LOCAL_RANKS if name in environment), None)
    return name is None or environment[name] == "0"


def variables(*names: str) -> dict[str, str]:
    """Those of the environment's variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}
