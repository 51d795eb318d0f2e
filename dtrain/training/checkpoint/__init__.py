"""Saving and resuming.

* ``state``: everything that a checkpoint holds; ``optimizer_state``: the part of the optimizer.
* ``rest``: the parameters that ``checkpoint.only_trained`` leaves out.
* ``tensors``: the files of its tensors. ``manifest``: their sizes and checksums.
* ``checkpoints``: the folder of all checkpoints of a run.
* ``manager``: when to save; writes in the background.
* ``mirror``: the copy of a run in a bucket, which a start fetches. ``uploads``: what is sent there.
* ``other_machines``: a checkpoint on machines without a common disk.
* ``resume``: what a start continues from. ``fork``: a run that begins with the state of a different run.
"""
