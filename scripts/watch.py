"""Watch a run while it trains: progress, loss, verdict so far, each rank's step, each node's ports, stalls.

    python scripts/watch.py runs/sliced                 on the login node; ends with the run, or at Ctrl-C
    python scripts/watch.py runs/sliced --once          one screen, for a pipe or a mail

Reads only the run folder, and only the ends of long files, so it does not disturb the run. Needs the package rich
(pip install -e '.[watch]').

Exit codes: 0 the run has made all its steps, or --once has printed a screen; 1 it ended early and was not resumed
within --patience seconds; 2 invalid input, one line; 130 Ctrl-C.
"""

import argparse
import sys
import time
from pathlib import Path

from dist.console import BY_CTRL_C, open_console
from gpt2.errors import UserError
from scripts.settings.command_line import Parser
from scripts.settings.training import positive
from traces import RunError

INSTALL = "pip install -e '.[watch]'"
LONGEST_SHARE = 0.1  # reading the run takes at most this share of the time


def main(arguments: list[str] | None = None) -> int:
    """Run the program. Return the exit status."""
    settings = parse(arguments)
    try:
        return watch(settings)
    except (RunError, UserError) as error:
        print(f"watch.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return BY_CTRL_C


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run folder, written by train.py --out")
    add("--once", action="store_true", help="print one screen and end")
    add("--every", type=positive, default=2.0, metavar="SECONDS", help="least seconds between updates (%(default)g)")
    patience = "seconds to wait for a run that ended early to be resumed (%(default)g)"
    add("--patience", type=positive, default=60.0, metavar="SECONDS", help=patience)
    return parser.parse_args(arguments)


def new_console():
    """Return rich's console on stdout. Raise UserError if rich is not installed."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise UserError(f"watch.py needs the package rich, which cannot be imported ({error}): {INSTALL}") from None
    return Console(highlight=False, emoji=False, markup=False)


def watch(settings: argparse.Namespace) -> int:
    """Show the run until it ends, or once, and leave the last screen. Return the exit status."""
    console = new_console()
    if not settings.once and not console.is_terminal:
        raise UserError("standard output is not a terminal: use --once")
    # Loading these modules takes a second, so --help and mistakes do not wait for it.
    from scripts.watching.bars import glyphs_for
    from scripts.watching.run_state import FINISHED, Watcher
    from scripts.watching.screen import screen

    def drawn(state, lines: int):
        return screen(state, console.width, lines, glyphs_for(console.encoding))

    watcher = Watcher(settings.run)
    state = watcher.look()  # reports a mistake before the screen changes
    if not settings.once:
        state = follow(settings, watcher, state, console, drawn)
    console.print(drawn(state, console.height - 1))  # one line less, for the prompt
    return 0 if settings.once or state.word == FINISHED else 1


def follow(settings: argparse.Namespace, watcher, state, console, drawn):
    """Show the run until it has ended for --patience seconds, or made all its steps. Return its last state."""
    from rich.live import Live

    from scripts.watching.run_state import ENDED, FINISHED

    ended_at = None
    took_s = 0.0
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while state.word != FINISHED:
            begun = time.monotonic()
            live.update(drawn(state, console.height), refresh=True)
            ended_at = (ended_at or begun) if state.word == ENDED else None
            if ended_at is not None and begun - ended_at >= settings.patience:
                break
            time.sleep(max(settings.every, took_s / LONGEST_SHARE))
            begun = time.monotonic()
            state = watcher.look()
            took_s = time.monotonic() - begun
    return state


if __name__ == "__main__":
    open_console()
    sys.exit(main())
