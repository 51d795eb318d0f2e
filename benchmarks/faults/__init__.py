"""What other trainers and loaders lose when processes are killed: ``python -m benchmarks.faults`` (docs/faults.md).

Reading order: ``protocol``, what is the same for all; ``runs``, how a run is killed, started again and counted; then a file
for each contender, written as that project's own documentation says; ``__main__``, the table.
"""
