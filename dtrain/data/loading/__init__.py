"""Samples to batches.

Files in reading order:

* ``loader``: the public class ``ShardLoader``.
* ``batch``: a micro-batch, transfer dtypes, copies to the device.
* ``workers``: which rows of a global batch a rank builds, and the workers that build them; ``worker_processes``, ``ipc``:
  starting and ending processes, sending batches between them; ``worker_deaths``: restarts of workers that died.
* ``collate``: builds one micro-batch; ``sample``: one sample of it; ``field_buffer``: one field of its rows;
  ``mixture_collator``: rows of several sources.
* ``sample_log``: logs of used and bad samples. ``masked_source``: masks samples that were bad in the run that is recomputed, or
  that killed workers.
* ``shard_dataset``: the public dataset of single samples; ``stream``: any iterable dataset as a source of batches.
"""
