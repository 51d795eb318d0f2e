"""Implementation of ``dtrain launch``: starts runs under torchrun on this machine, or as SLURM jobs.

* A *job* is a run to start, with the command line of ``dtrain train`` that starts it from any directory. A sweep has several.
* A *launcher*, ``local`` or ``slurm``, has four functions: ``check`` refuses jobs that cannot start, ``describe`` returns
  their commands or scripts, ``launch`` starts them, and ``starter`` returns the function with which a pool starts them.
* A *pool* runs jobs, a limited number at a time; ``local`` uses it for sweeps, ``search`` for the trials of a search.

Files in reading order:

* ``job``: a run to start, and its result, which is read from ``status.json``.
* ``pool``: runs jobs, stops them on a signal, and shows their progress.
* ``local``: jobs on this machine, each with its share of the cores and GPUs.
* ``job_script``: the batch script of a SLURM job; ``job_body.sh`` is the shell code of every batch script.
* ``slurm``: submits jobs, and asks SLURM about them.
* ``search_space``: the keys of a search, and the values to choose from; ``search_journal``: its files; ``search``: searches
  with Optuna.
* ``commands``: the commands status, tail, stop and resume.
"""
