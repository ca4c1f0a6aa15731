"""Phase timers, trace files, analysis and plots. Knows names and times; imports nothing of GPT-2 or MPI.

units.py  numbers with units
record/   used by training loop and strategies: Tracer, phases on a GPU's stream, trace files
read/     read and check a run folder: seconds by step, rank and phase; waits; efficiencies; bytes through ports
verdict/  what slows a run's steps: evidence, rules, diagnosis; also summaries and rankings of several runs
plots/    figures, one subject in each file
export/   Paraver, Chrome's JSON for Perfetto, OTF2

A folder imports only folders above it in this list. Importing the package is cheap: only the plots load matplotlib.
"""

from traces.read.runs import read_run
from traces.record.files import RunError
from traces.record.recorder import Tracer

__all__ = ["RunError", "Tracer", "read_run"]
