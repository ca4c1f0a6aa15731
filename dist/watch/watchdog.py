"""Name the rank that others wait for, with its host and phase, while the job hangs; end the job if asked to.

Every rank has a thread that shows that the rank lives. Rank 0's thread also judges all ranks' positions (live.py). If
rank 0 itself hangs, rank 1's thread does. If both are gone, the leader of a remaining node does: a launcher that has
lost a host may let the others wait forever.

If ranks have waited too long in an exchange, stalls.py names the culprits: ranks that show no life, or whose node's
port has lost its link, else those that have come the least far and do not move on. If all ranks are in the same
exchange, it is slow, and no rank is named; but if nothing passes through any node's ports, the network is named. When
SIGTERM has asked the job to end, ranks that wait for one that is gone end at once: they cannot do what it asks for.

The threads call no MPI function but MPI_Abort: a rank that hangs may hold any lock of the MPI library.
"""

import os
import sys
import time
from contextlib import suppress

import numpy as np

from dist.console import say
from dist.repeating import Repeating
from dist.watch.live import LivePositions
from dist.watch.stalls import Lookout, Observation, Stall
from dist.world import PRINTING_S, World, end_job

LOOKS = 20  # within after_s; more if a pause between two looks would exceed LONGEST_PAUSE_S
LONGEST_PAUSE_S = 2.0
GONE_S = 1.0  # a rank is gone after a pause and this time without a sign of life
TICK_S = 0.25  # between checks for SIGTERM: after it, seconds count
SILENT_PAUSES = 4  # a rank without a pulse for so many pauses is silent: the next takes over
NAMED_AT_MOST = 3


class Watchdog:
    """Watches the ranks. All ranks make and close it together. Report phases by `on_phase(name or None, step)`.

    folder: on a file system that the nodes share. phases: all names; meetings: those in which ranks wait for each
    other, and which all of them enter equally often. after_s: how long they may wait. ends_job: whether a longer wait
    ends the job; else it prints a line on stderr. waits: phases in which a rank waits for some others. titles: of each
    rank, text to print beside its host: "stage 2 shard 1". is_asked(): whether SIGTERM has come to this rank.
    """

    def __init__(
        self, world: World, folder, phases, meetings, after_s: float, ends_job: bool = False, waits=(), titles=(),
        is_asked=lambda: False,
    ):  # fmt: skip
        self._world = world
        self._names = ("no phase", *phases)
        self._ends_job = ends_job
        self._titles = titles
        self._is_asked = is_asked
        self._told = None  # the Stall that has been printed and is not over
        self._live = LivePositions(world, folder, phases, meetings)
        self.on_phase = self._live.enter
        self._pause_s = min(LONGEST_PAUSE_S, after_s / LOOKS)
        self._due = time.monotonic() + self._pause_s
        tick_s = min(TICK_S, self._pause_s)
        is_meeting, is_wait = (np.array([name in chosen for name in self._names]) for chosen in (meetings, waits))
        self._node = Observation(is_meeting, SILENT_PAUSES * self._pause_s, 2 * self._pause_s)
        self._lookout = Lookout(world, self._live, lambda: Observation(is_meeting, after_s, 2 * self._pause_s, is_wait))
        self._after_sigterm = Lookout(
            world, self._live, lambda: Observation(is_meeting, self._pause_s + GONE_S, 2 * tick_s, is_wait)
        )
        if world.rank == 0 and self._live.unseen:
            say(f"{folder} is not shared with {', '.join(self._live.unseen)}: a stall there is not seen")
        self._thread = Repeating(self._watch, tick_s, "watchdog")

    def close(self) -> None:
        """Stop watching. Collective."""
        self._live.leave()
        self._thread.stop()
        self._tell_the_end()
        self._live.close()

    def _watch(self) -> None:
        if self._is_asked():
            gone = self._after_sigterm.gone_ranks()
            if gone is not None:
                self._end_without(gone)
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._pause_s
        self._live.pulse(self._is_asked())
        if self._world.node_count > 1 and self._world.local_rank < 2:
            self._publish()
        seen = self._lookout.look()
        if seen is not None and seen.are_silent(self._lookout.before):
            self._judge(seen)

    def _end_without(self, gone: list[int]) -> None:
        """End this rank, which SIGTERM asks to end, and which waits for ranks that are gone."""
        self._live.end()
        if gone:
            _say(f"{self._who(gone)} shows no sign of life, and all others wait for it: they end, as SIGTERM asks for")
            time.sleep(PRINTING_S)
        os._exit(1)

    def _publish(self) -> None:
        """Write the node's records for the others, if this is the leader, or the second rank beside a silent leader."""
        positions = self._live.node_positions()
        self._node.look(positions, time.monotonic())
        if self._world.local_rank == 0 or self._node.are_silent([positions["rank"][0]]):
            self._live.publish()

    def _judge(self, seen: Observation) -> None:
        """Print a stall, or end the job."""
        # The network is judged only if all of several nodes are seen: within a node no port carries anything.
        sees_all_ports = self._world.node_count > 1 and not self._live.unseen
        stall = seen.find_stall() or (seen.find_standstill() if sees_all_ports else None)
        if stall and self._ends_job:
            end_job(self._world.comm, f"{self._tell(stall)}; the job ends, as --end-on-stall says\n")
        elif stall and not self._told:
            self._told = stall
            _say(f"{self._tell(stall)}; --end-on-stall ends such a job")
        elif not stall:
            self._tell_the_end()

    def _tell_the_end(self) -> None:
        if self._told:
            _say(f"{self._who(self._told.ranks)}: the stall is over")
            self._told = None

    def _who(self, ranks: list[int]) -> str:
        if not ranks:
            return f"all {self._world.size} ranks"
        titles = [f" ({title})" for title in self._titles] or [""] * self._world.size
        named = [f"rank {rank} on {self._world.places[rank]['host']}{titles[rank]}" for rank in ranks[:NAMED_AT_MOST]]
        more = f" and {len(ranks) - NAMED_AT_MOST} more" if len(ranks) > NAMED_AT_MOST else ""
        return ", ".join(named) + more

    def _tell(self, stall: Stall) -> str:
        """Describe a stall: "rank 5 on cn03 has been in backward of step 17 for 62 s while 8 ranks wait: ..." """
        where = f"{self._names[stall.phase]} of step {stall.step}"
        what = f"has been in {where} for {stall.since_s:.0f} s"
        why = ""
        if stall.is_silent:
            what = f"shows no sign of life for {stall.since_s:.0f} s, last seen in {where},"
            why = "stopped, swapped out, in a loop that holds Python's lock, or the host is gone; "
        elif stall.is_cut_off:
            why = "a network port of that host has lost its link, check its cable and switch; or "
        elif not stall.ranks:
            return (
                f"all {stall.waiting} ranks wait in {where} for {stall.waiting_s:.0f} s while nothing passes through "
                "their hosts' network ports: check the switch, firewalls, and which network MPI was told to use"
            )
        ranks = "1 rank waits" if stall.waiting == 1 else f"{stall.waiting} ranks wait"
        return (
            f"{self._who(stall.ranks)} {what} while {ranks} in {self._names[stall.waiting_phase]} for "
            f"{stall.waiting_s:.0f} s: {why}look there with py-spy dump --pid {stall.pid}, or gdb -p {stall.pid}"
        )


def _say(line: str) -> None:
    # Write in one piece, past the locks of Python's streams: a main thread that hangs may hold them.
    with suppress(OSError, AttributeError):  # if nobody reads stderr any more, the thread still goes on
        os.write(sys.stderr.fileno(), f"{line}\n".encode(errors="replace"))
