"""Training: the step, the loop, the optimiser, checkpoints and metric writers."""
