#!/usr/bin/env bash
# Uploads runs that were tracked by wandb on nodes without internet (WANDB_MODE=offline):
#
#   bash scripts/wandb_sync.sh [DIR ...]
#
# Run it on a machine with internet after `wandb login`. DIR are run directories (default: all in runs/). Each start of a run
# has written one offline folder; on wandb they become one run. Folders that were uploaded before are skipped, so the
# command can be repeated while runs are training.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

(($#)) || set -- runs/*
folders=()
for run_dir; do
  for folder in "$run_dir"/wandb/offline-run-*; do
    # If a start was killed before wandb wrote anything, the file has only its header of 7 bytes.
    if [[ -n $(find "$folder" -maxdepth 1 -name '*.wandb' -size +7c 2>/dev/null) ]]; then folders+=("$folder"); fi
  done
done
((${#folders[@]})) || die "no wandb/offline-run-* in $*. Give the directories of runs with WANDB_MODE=offline."

wandb=$venv/bin/wandb
[[ -x $wandb ]] || wandb=wandb
command -v "$wandb" >/dev/null || die "wandb is neither in $venv nor on the path. Activate the environment of dtrain."
say "$wandb sync: ${#folders[@]} offline folders"
exec "$wandb" sync --skip-synced "${folders[@]}"
