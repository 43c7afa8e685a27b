"""GPTQ: the solver, and its calibration."""
