"""What makes the README's numbers, from a checkout: `python -m benchmarks.sync`. Not installed with the package."""
