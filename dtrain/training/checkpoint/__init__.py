"""Saving and resuming.

* ``state``: everything that a checkpoint holds; ``optimizer_state``: the optimizer's part of it.
* ``rest``: the parameters that ``checkpoint.only_trained`` leaves out.
* ``tensors``: the files that hold the tensors. ``manifest``: their sizes and checksums.
* ``checkpoints``: the folder of all checkpoints of a run.
* ``manager``: decides when to save, and writes in the background.
* ``mirror``: fetches the copy of a run from a bucket. ``uploads``: sends checkpoints and records there.
* ``other_machines``: copies a checkpoint to machines without a shared disk.
* ``resume``: chooses what a start continues from. ``fork``: a run that begins with the state of a different run.
"""
