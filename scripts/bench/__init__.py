"""What all benchmarks share: turns, statistics, the JSON report."""
