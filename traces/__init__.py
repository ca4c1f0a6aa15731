"""Phase timers, trace files, analysis and plots: names and times, nothing of GPT-2 or MPI.

phases.py       the names of the phases, and which of them are exchange
recorder.py     Tracer: what the training loop and the strategies call
stream_times.py phases on a GPU's stream, by events        tracing_cost.py  what all this costs
files.py        the trace file format                      runs.py      reading a run folder
counters.py     the network counters of a node             clocks.py    all nodes on one clock
waiting.py      how long each exchange waited for another rank
analysis.py     seconds per step, rank and phase; medians; the summary of a run
wait_states.py  which kind of waiting, and for whom        replay.py      steps on a network that takes no time
efficiency.py   POP's efficiencies                         overlap.py     exchange that shows, and that hides
node_traffic.py bytes and rates of the nodes' ports, by step and phase
evidence.py     all of that for one run, which the rules of the verdict read: link_rules.py, network_rules.py,
                rank_rules.py, stall_rules.py; a rule returns findings (findings.py), diagnosis.py chooses one
evidence_table.py  the numbers behind a verdict
ranking.py      several runs side by side: which is fastest, and the table
look.py         colours, legend, title and footnote, which all plots share
lanes.py        the rows of a timeline, one per rank
timeline.py     plot: who does what when, rank by rank
phase_bars.py   plot: where a step's time goes
loss_curves.py  plot: loss against steps
comparison.py   plot: several strategies in one picture
port_lanes.py   the ports' rates below a timeline          port_bars.py   plot: bytes a step against what ports carry
rank_map.py     plot: ranks by steps                       wait_bars.py   plot: what each rank waits for
communication_matrix.py  plot: who sends how much to whom
model_points.py plot: measured against the cost model      scaling_curves.py  plot: runs of growing size
spans.py        spans that never overlap, from the run's start: what the exports begin with
paraver.py      export to Paraver; paraver_labels.py: its numbers and names
chrome.py       export to Chrome's JSON, which Perfetto shows
line_merge.py   millions of lines merged by time, for both

Importing the package is cheap; matplotlib is loaded by the plot modules alone.
"""

from traces.read.runs import read_run
from traces.record.files import RunError
from traces.record.recorder import Tracer

__all__ = ["RunError", "Tracer", "read_run"]
