"""What a run writes while it goes on: phases, network counters, clocks."""
