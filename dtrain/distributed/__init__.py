"""The ranks of a run: how they start, agree, stop and fail together. Independent of models, data and precision.

In reading order:

* ``services``: sets torchrun's variables for the machines of a SageMaker or Vertex AI job.
* ``world``: rank, device and backend of this process, under torchrun or srun.
* ``store``: rendezvous and published failures; calls with a time limit.
* ``process_group``: joins and leaves the process group; network settings; which rank failed first.
* ``collectives``: rank 0's decisions and all ranks' errors, shared by all ranks.
* ``sharding``: models whose parameters are divided among the ranks (FSDP2, HSDP).
* ``lock``: prevents two jobs from training in one run directory.
* ``stop``: requests to stop: signals, the STOP file, time limits.
* ``hang``: detects a run that makes no progress, reports where each rank waits, and ends the peers of a failed rank.
* ``process_exit``: ends a process with its parent, or from a thread; calls that can be abandoned.
* ``replicas``: finds ranks whose parameters are not equal.
* ``torchrun``: shortens what torchrun shows when a rank fails; ``torchrun_end``: ends a torchrun that has lost the other
  machines.
"""
