"""Implementation of ``python -m dtrain.launch``: starts runs under torchrun on this machine, or as SLURM jobs.

* A *job* is a run to start and the command line of ``dtrain.train`` that starts it from any directory. A sweep has several.
* A *launcher*, ``local`` or ``slurm``, has four functions: ``check`` refuses jobs that cannot start, ``describe`` returns
  their commands or scripts, ``launch`` starts them, and ``starter`` returns the function with which a pool starts them.
* A *pool* runs jobs, at most so many at a time; ``local`` uses it for sweeps, ``search`` for the trials of a search.

Files in reading order: ``job``, ``pool``, ``local``, ``job_script`` (with ``job_body.sh``, the shell code of every batch
script), ``slurm``, ``search``, ``commands`` (``status``, ``tail``, ``stop`` and ``resume``). Training itself is in
``dtrain.train``; the result of a run is read from its ``status.json``.
"""
