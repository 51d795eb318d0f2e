"""Measurements during training.

* ``metrics``: the record of a logged step. ``run_logger``: writes records and messages.
* ``stragglers``: slow ranks. ``communication``: bytes per step. ``flops``: model FLOPs. ``memory``: peaks.
* ``profiler``: traces of some steps, and a summary of them.
"""
