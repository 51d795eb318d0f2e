#!/usr/bin/env bash
# Sends what runs have written for wandb on nodes without internet (WANDB_MODE=offline):
#
#   bash scripts/wandb_sync.sh [DIR ...]
#
# From a machine with internet that is logged in (wandb login). DIR are run directories; without any, all in runs/. Each
# start of a run has left a piece; together they are one run there. What was sent already is not sent again, so the
# command can be repeated while runs go on.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

(($#)) || set -- runs/*
pieces=()
for run_dir; do
  for piece in "$run_dir"/wandb/offline-run-*; do
    # A start that was killed before wandb wrote anything has left a file with nothing but its header of 7 bytes.
    if [[ -n $(find "$piece" -maxdepth 1 -name '*.wandb' -size +7c 2>/dev/null) ]]; then pieces+=("$piece"); fi
  done
done
((${#pieces[@]})) || die "no wandb/offline-run-* in $*: name the directories of runs that were offline."

wandb=$venv/bin/wandb
[[ -x $wandb ]] || wandb=wandb
command -v "$wandb" >/dev/null || die "no wandb in $venv and none on the path. Activate the environment of dtrain."
say "$wandb sync: ${#pieces[@]} pieces"
exec "$wandb" sync --skip-synced "${pieces[@]}"
