"""Phase timers, trace files, analysis and plots. Knows names and times, nothing of GPT-2 or MPI.

record/   for training loop and strategies: Tracer, phases on a GPU's stream, the files they write
read/     read and check a run folder: seconds by step, rank and phase; waits; efficiencies; bytes through ports
verdict/  the summary of a run and its rank among others; what holds its steps up: evidence, rules, the diagnosis
plots/    figures, one subject in each file
export/   Paraver, Chrome's JSON for Perfetto, OTF2
units.py  numbers with their units

A folder imports only folders above it in this list. Importing the package is cheap: only the plots load matplotlib.
"""

from traces.read.runs import read_run
from traces.record.files import RunError
from traces.record.recorder import Tracer

__all__ = ["RunError", "Tracer", "read_run"]
