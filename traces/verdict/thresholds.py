"""The thresholds of the rules. Tests of the verdicts try both sides of most of them."""

# Thin evidence, which the verdict mentions
FEW_STEPS = 5  # fewer measured steps
CHANGED_LINK = 0.6  # ratio of a link's rates at the start and the end of the run
UNEXPLAINED = 0.1  # fraction of a rank's steps outside all phases

# Every finding
LEAST_SHARE = 0.05  # fraction of a step that a finding costs
LEAST_STALL_SHARE = 0.02  # fraction of a step that stalls cost

# Ranks
SLOW_RANK = 1.12  # ratio of a slow rank's compute time to that of the others
SLOW_RANK_DEVIATIONS = 4.0  # a slow rank must also differ by this many deviations of the ranks' ratios
ALMOST_ALWAYS = 0.75  # fraction of the steps that show at least half of the excess
FEWEST_ALIKE = 2  # fewest stages with equally many layers with which a pipeline stage is compared
UNEVEN = 1.25  # ratio of several slow ranks' compute time to that of the others
STALL = 0.3  # fraction of a step that a stall lasts
STALL_DEVIATIONS = 6.0  # a stall must also last this many deviations of all ranks' steps
FEWEST_STALLS = 2
MOST_OF_STALLS = 0.6  # fraction of all stalled time on the rank that is named
DATA_ON_ALL = 0.25  # fraction of a step that the mean rank reads data

# Network
SLOW_PORT = 0.6  # ratio of a slow port's rate to the lower of the others' medians in and out
LEAST_TRANSFER_SHARE = 0.3  # fraction of a step that moving data takes
HOTSPOT = 1.25  # ratio of a server's bytes to those of other nodes, in one direction
BYTES_SHARE = 0.25  # largest fraction of a latency-bound exchange's time that its bytes need
MAX_LATENCIES = 50  # the bytes of its mean call need at most this many latencies

# Models that ranks share
LONG_STAGE = 1.15  # ratio of a long stage's compute time to that of the mean stage
BUBBLE = 0.15  # fraction of a step that stages wait for each other
STRUCTURE_SHARE = 0.5  # fraction of this waiting that the bubble of equal stages explains
TENSOR_SHARE = 0.3  # fraction of a step in sums over tensor-parallel shards

# Verdict
COMPUTE_BOUND = 0.5  # fraction of a step that compute takes
WORTH_SAYING = 1.1  # speedup for which another strategy is named
