"""A CUDA GPU that is not there: what scripts/gpu_dryrun.py runs on."""
