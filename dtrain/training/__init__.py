"""The loop, one optimizer step, evaluation and checkpoints."""
