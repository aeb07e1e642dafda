"""What is measured rather than tested: run with `python -m benchmarks.<name>` in the root of the project."""
