"""What ``dtrain.doctor`` looks at.

* A *finding* is one line: what was looked at, what it is, and, where it will hurt, what to do.
* ``machine`` looks at one machine, ``precisions`` at what its device can compute, ``world`` and ``all_reduce`` at the ranks
  together.
* ``examination`` looks at a run: its disks (``storage``, ``saving``), its loader alone (``loader_rate``), its step alone and
  both together (``subject``, ``step_rate``), ``traps``. From these numbers come ``verdict``, ``advice`` and ``account``, which
  measure nothing.

Nothing here changes a setting or leaves a file; what must be tried is tried on a few numbers, or for a few seconds.
"""
