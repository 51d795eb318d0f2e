"""Samples to batches.

Files in reading order:

* ``loader``: the public class.
* ``batch``: a micro-batch, transfer dtypes, copies to the device.
* ``workers``: a rank's rows of a batch, and what builds them; ``worker_processes``, ``ipc``: processes, batches between them;
  ``worker_deaths``: restarts of workers.
* ``collate``: builds one micro-batch; ``sample``: one sample of it; ``field_buffer``: one field of its rows;
  ``mixture_collator``: rows of several sources.
* ``sample_log``: used and bad samples. ``masked_source``: samples that are bad because they were in an earlier run, or killed
  workers.
* ``shard_dataset``: the public dataset of single samples; ``stream``: any iterable dataset as a source of batches.
"""
