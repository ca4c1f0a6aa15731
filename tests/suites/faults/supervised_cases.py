"""What goes wrong under train.py --restarts on several hosts: cables, switch ports and hosts that come back later.

Each run ends with code 0 and the losses of a run that nobody disturbed, and nobody has helped it. The launcher reaches
a host as ssh does: not while its cable is cut.
"""

import signal
from collections.abc import Callable

from scripts.training.lock_file import LOCK, look
from tests.suites.faults.case import GOES_ON, VICTIM, Case, Scene
from tests.suites.faults.processes import processes_on, send, wait_until

FLAGS = "--restarts", 20, "--restart-after", 120
SHORT_S, LONG_S = 40, 240  # a start is ended meanwhile; longer than whatever ends one takes
LOCK_LIMIT_S, LIMIT_S = 120, 420
AGAIN = r"^train\.py: .*they start again"


def cut_for(seconds: float, node: int = VICTIM) -> Callable[[Scene], None]:
    def provoke(scene: Scene) -> None:
        scene.cluster.cut_cable(node)
        wait_until(lambda: False, seconds)
        scene.cluster.mend_cable(node)

    return provoke


def block_for_a_while(scene: Scene) -> None:
    scene.cluster.block_port(VICTIM)
    wait_until(lambda: False, SHORT_S)
    scene.cluster.open_port(VICTIM)


def end_processes(scene: Scene) -> None:
    """All of them on one host, the launcher's daemon and the rank; the host stays."""
    send(signal.SIGKILL, *processes_on(scene.cluster.nodes[VICTIM]))


def cut_rank_0_that_starts(scene: Scene) -> None:
    """In the second start: it has the lock, which it keeps for ever, and the ranks do not watch each other yet."""
    number = lock_of(scene)
    send(signal.SIGKILL, *scene.ranks().values())
    wait_until(lambda: lock_of(scene) not in (number, None), LOCK_LIMIT_S)
    cut_for(LONG_S, node=0)(scene)


def lock_of(scene: Scene) -> str | None:
    seen = look(scene.run / LOCK)
    return seen and seen.run


def supervised(says: str, provoke: Callable[[Scene], None]) -> Case:
    says = f"{says}, under `--restarts`"
    return Case(says, GOES_ON, provoke, flags=FLAGS, supervised=True, limit_s=LIMIT_S, line=AGAIN)


SUPERVISED_CASES = {
    "away": supervised(f"a host's cable is cut for {SHORT_S} s", cut_for(SHORT_S)),
    "away-long": supervised(f"a host's cable is cut for {LONG_S} s", cut_for(LONG_S)),
    "away-silent": supervised(f"a switch passes nothing to a host for {SHORT_S} s", block_for_a_while),
    "away-start": supervised(f"rank 0's cable is cut for {LONG_S} s as it starts again", cut_rank_0_that_starts),
    "processes": supervised("all processes of a host are killed, the launcher's daemon too", end_processes),
}
