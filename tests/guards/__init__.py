"""What must not become more costly, counted instead of timed; figures are in `benchmarks`."""
