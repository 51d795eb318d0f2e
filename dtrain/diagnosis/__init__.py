"""What ``dtrain.doctor`` looks at.

* A *finding* is one line: what was looked at, what it is, and, where it will hurt, what to do.
* ``machine`` looks at one machine, ``precisions`` at what its device can compute, ``world`` at the ranks together.

Nothing here changes a setting; what must be tried is tried on a few numbers.
"""
