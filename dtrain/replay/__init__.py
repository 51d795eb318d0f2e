"""Recomputes steps of a run and compares them with its records, and says which steps used a sample.

In reading order:

* ``recorded``: reads the records of a run.
* ``trace``: ``dtrain trace``, which computes the uses of a sample from the seed and the record of the starts.
* ``plan``: from which checkpoints a range of steps is recomputed, and with which config.
* ``recompute``: executes a part of the plan with dtrain's own training loop.
* ``samples``: the loss of each row of a step, and its part of the gradient; ``looks``: inspection of a step: its samples, or a
  Python prompt inside it.
* ``compare``: differences, their tolerance, the table and the JSON file.
* ``__main__``: ``dtrain replay``.

The directory of the run is never written, and its lock is not taken.
"""
