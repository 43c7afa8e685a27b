"""benchmark.py: engines, workloads, peers, tables and plots."""
