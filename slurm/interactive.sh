#!/usr/bin/env bash
# Trains on one node from a terminal: the output appears in the terminal, Ctrl-C makes the run save and stop, and the same
# command resumes it.
#
#   bash slurm/interactive.sh [key=value ...]           from the checkout; experiment=digits without arguments
#
# Inside an allocation (salloc) it uses that allocation, else it asks for one and waits. Lines marked EDIT depend on the
# cluster.
set -euo pipefail

options=(
  --nodes=1
  --ntasks=1          # dtrain launch, which starts one process for each GPU
  --gpus-per-node=2   # EDIT: delete the line to train on CPUs
  --cpus-per-task=8   # EDIT: the workers of the loader need them
  --time=01:00:00     # EDIT
  # --partition=debug # EDIT
  # --account=project # EDIT
)
processes=2                           # EDIT: the GPUs above
python=${VENV:-$PWD/.venv}/bin/python # EDIT: the environment of scripts/quickstart.sh, or a different one
(($#)) || set -- experiment=digits    # EDIT

# The shell of salloc stays open when its allocation ends; srun would then only print that the job id is invalid.
if [[ -n ${SLURM_JOB_ID:-} && -z $(squeue --noheader --jobs="$SLURM_JOB_ID" --states=RUNNING 2>/dev/null) ]]; then
  echo "error: allocation $SLURM_JOB_ID has ended. Leave its shell (exit) and start again." >&2
  exit 1
fi
# --pty sends the keys of the terminal to the node, so Ctrl-C signals dtrain launch instead of srun, which would kill the step.
exec srun "${options[@]}" --pty "$python" -m dtrain.launch launch=local launch.processes_per_node="$processes" "$@"
