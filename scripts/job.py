"""Write a SLURM job script for this Python and its MPI.

    python scripts/job.py > train.sbatch                       then: sbatch --nodes=4 train.sbatch RUN [FLAGS...]
    python scripts/job.py --launcher mpirun > train.sbatch     if srun cannot start this MPI (docs/slurm.md)
    python scripts/job.py --sweep > sweep.sbatch               one job per strategy; each runs your train.sbatch

Edit the block at the top of the script for your site: partition, nodes, ranks per node, time, modules. The script's
first lines describe what it does.
"""

import re
import shlex
import sys
from pathlib import Path

from dist.console import open_console, say
from dist.probe.programs import find_mpirun, mpi_family, tool_output
from scripts.settings.command_line import Parser

FOLDER = Path(__file__).parent / "slurm"
SRUN = "srun"
LAUNCHERS = {SRUN: "", "mpirun": "'s mpirun"}  # {launcher: what follows the MPI's name in the mark of its line}
# A line of the script that starts ranks: commented out or not, the command, its mark.
LAUNCH = re.compile(r"^(?:# )?(launch=\(.*# (.+))$", re.MULTILINE)


def main(words: list[str] | None = None) -> int:
    """Print the script. Return the exit status."""
    asked = parse(words)
    script = (FOLDER / f"{'sweep' if asked.sweep else 'train'}.sbatch").read_text()
    line = f"python={shlex.quote(sys.executable)}"
    script = re.sub(r"^python=\S+", lambda found: line, script, count=1, flags=re.MULTILINE)
    if not asked.sweep:
        mpirun = find_mpirun()
        family = mpi_family(tool_output(mpirun, "--version", limit_s=60) or "") if mpirun else None
        if family is None:
            say("job.py: no mpirun says which MPI this is: choose one of the script's launch lines", on_stderr=True)
        else:
            whose = family + LAUNCHERS[asked.launcher or SRUN]
            script = LAUNCH.sub(lambda found: found[1] if found[2] == whose else f"# {found[1]}", script)
    print(script, end="", flush=True)  # not say(): half a script on a full disk is an error
    return 0


def parse(words: list[str] | None):
    parser = Parser(__doc__)
    parser.add_argument("--launcher", choices=LAUNCHERS, help=f"program that starts the ranks ({SRUN})")
    parser.add_argument("--sweep", action="store_true", help="write the script that trains with several strategies")
    asked = parser.parse_args(words)
    if asked.sweep and asked.launcher:
        parser.error("--launcher with --sweep, whose ranks start as its train.sbatch says: leave one of them out")
    return asked


if __name__ == "__main__":
    open_console()
    sys.exit(main())
