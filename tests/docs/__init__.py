"""What the docs, the examples and the benchmarks say is what happens."""
