"""Starting runs: on this machine under torchrun, or as SLURM jobs.

* A *point* is a run to start and the command line that means it anywhere; a sweep has several.
* A *launcher* (``local``, ``slurm``) checks points, shows what it would start, and starts them.

Nothing here trains: torchrun and SLURM are the engines, and how a run ended is read from its ``status.json``.
"""
