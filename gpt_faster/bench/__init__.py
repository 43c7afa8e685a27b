"""benchmark.py: engines, workloads, peers, tables, plots."""
