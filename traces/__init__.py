"""Phase timers, trace files, analysis and plots: names and times, nothing of GPT-2 or MPI.

record/   what the training loop and the strategies call: Tracer, phases on a GPU's stream, the files they write
read/     a run folder read back and checked: seconds by step, rank and phase; waits; efficiencies; ports' bytes
verdict/  the summary of a run and its rank among others; what holds its steps up: evidence, rules, the diagnosis
plots/    one subject a file: timeline, comparison, ranks, traffic, loss_curves, expected, exchange_bars
export/   Paraver and Chrome's JSON, which Perfetto shows
units.py  numbers with their units, as people read them

Imports go upwards in this list only: record imports nothing of the others, read imports record, and so on.
Importing the package is cheap; matplotlib is loaded by the plots alone.
"""

from traces.read.runs import read_run
from traces.record.files import RunError
from traces.record.recorder import Tracer

__all__ = ["RunError", "Tracer", "read_run"]
