"""The parts that all benchmarks share: timing, records, options and the run itself."""
