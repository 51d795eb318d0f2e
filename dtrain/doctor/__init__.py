"""Measurements of ``dtrain doctor``: this machine, the communication between ranks, and a configured run.

A *finding* (``dtrain.console.Finding``) is one line of the result, with a remedy if it is a problem.

Files in reading order:

* ``machine``: hardware, software and limits of one machine; precisions of its device; versions on all ranks; known problems.
* ``measure``: the time of the loader, of an optimizer step and of an all-reduce.
* ``disks``: speed of reading the shards and of writing a checkpoint.
* ``judge``: which part limits a run, what to change, and known problems of its config, such as missing packages.
* ``memory``: ``doctor memory``, the memory of a step with ddp, fsdp and hsdp, and what fits.
* ``examination``: measures a configured run part by part, and formats the result.
* ``lr``: ``doctor lr``, a learning rate range test.
* ``numerics``: ``doctor numerics``, which audits the precision of a run.

Nothing here changes a setting or leaves a file behind, and trained weights are discarded.
"""
