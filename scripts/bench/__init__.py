"""The harness that all benchmarks share: turns, statistics, the JSON report and its tables."""
