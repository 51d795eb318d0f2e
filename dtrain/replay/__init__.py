"""Recomputes steps of a run and compares them with its records, and says which steps used a sample.

In reading order:

* ``recorded``: the records of a run that the rest reads.
* ``trace``: ``dtrain trace``, which computes the uses of a sample from the seed and the record of the starts.
* ``plan``: from which checkpoints a range of steps is recomputed, and with which config.
* ``recompute``: executes a part of the plan with dtrain's own loop.
* ``samples``: the loss of each row of a step, and its part of the gradient; ``looks``: who looks into a step, also a prompt.
* ``compare``: differences, their tolerance, the table and the JSON file.
* ``__main__``: ``dtrain replay``.

Nothing in the directory of the run is written, and its lock is not taken.
"""
