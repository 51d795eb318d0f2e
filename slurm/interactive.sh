#!/usr/bin/env bash
# A training in front of you, on one node: what it says appears here, Ctrl-C makes it save and stop, and the same command
# goes on.
#
#   bash slurm/interactive.sh [key=value ...]           from the checkout; experiment=digits without arguments
#
# Inside an allocation (salloc) it takes that one, else it asks for one and waits. Lines marked EDIT depend on the cluster.
set -euo pipefail

options=(
  --nodes=1
  --ntasks=1          # dtrain.launch, which starts a process for each GPU
  --gpus-per-node=2   # EDIT: delete the line to train on CPUs
  --cpus-per-task=8   # EDIT: the loader's workers need them
  --time=01:00:00     # EDIT
  # --partition=debug # EDIT
  # --account=project # EDIT
)
processes=2                           # EDIT: the GPUs above
python=${VENV:-$PWD/.venv}/bin/python # EDIT: the environment that scripts/quickstart.sh made, or yours
(($#)) || set -- experiment=digits    # EDIT

# The shell of salloc outlives its allocation, and srun would only say that a job id is invalid.
if [[ -n ${SLURM_JOB_ID:-} && -z $(squeue --noheader --jobs="$SLURM_JOB_ID" --states=RUNNING 2>/dev/null) ]]; then
  echo "error: allocation $SLURM_JOB_ID is over. Leave its shell (exit) and start again." >&2
  exit 1
fi
# --pty: the terminal's keys go to the node, so that Ctrl-C reaches the launcher and not srun, which would kill the step.
exec srun "${options[@]}" --pty "$python" -m dtrain.launch launch=local launch.processes_per_node="$processes" "$@"
