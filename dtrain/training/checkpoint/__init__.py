"""Saving and resuming.

* ``state``: everything that a checkpoint holds; ``optimizer_state``: the part of the optimizer.
* ``rest``: the parameters that ``checkpoint.only_trained`` leaves out.
* ``tensors``: the files of its tensors. ``manifest``: their sizes and checksums.
* ``checkpoints``: the folder of all checkpoints of a run.
* ``manager``: when to save; writes in the background.
* ``mirror``: the copy of a run in a bucket: what a start fetches, and what is uploaded.
* ``resume``: what a start continues from. ``fork``: a run that begins with the state of a different run.
"""
