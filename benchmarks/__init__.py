"""Benchmarks of dtrain. Run one from the root of a checkout: ``python -m benchmarks.NAME``; ``--help`` lists its options."""
