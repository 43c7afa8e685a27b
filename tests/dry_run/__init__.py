"""A CUDA GPU that is not there: what scripts/dev/gpu_dryrun.py runs on."""
