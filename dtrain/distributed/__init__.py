"""The ranks of a run: how they start, agree, stop and fail together. Independent of models, data and precision.

In reading order:

* ``world``: rank, device and backend of this process, under torchrun or srun.
* ``process_group``: joins and leaves the process group; network settings; which rank failed first.
* ``collectives``: rank 0's decisions and all ranks' errors, shared by all ranks.
* ``lock``: one job per run directory.
* ``stop``: requests to stop: signals, the STOP file, time limits.
* ``hang``: detects a run that makes no progress and reports where each rank waits.
* ``process_exit``: ends a process with its parent, or from a thread.
* ``atomic``: replaces files and folders atomically.
"""
