"""The harness that all benchmarks share: turns, statistics, the JSON report."""
