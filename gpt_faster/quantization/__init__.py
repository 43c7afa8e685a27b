"""GPTQ: solver, calibration and its text, bit budgets."""
