"""Record phases, network counters and clocks during a run."""
