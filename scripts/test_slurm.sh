#!/usr/bin/env bash
# The tests that need a cluster, on a SLURM that is started for them, under both ways in which SLURM tracks processes
# (they deliver signals differently):
#
#   DTRAIN_TEST_SLURM_BED=DIR bash scripts/test_slurm.sh [pytest arguments]
#
# DIR is the folder of start.sh, which starts a cluster of several nodes on this machine, and stop.sh. Takes about half an
# hour on two cores.
set -uo pipefail
: "${DTRAIN_TEST_SLURM_BED:?name the folder whose start.sh starts a SLURM}"

failed=0
for tracking in cgroup linuxproc; do
  echo "==== SLURM_BED_TRACK=$tracking"
  SLURM_BED_TRACK=$tracking bash "$(dirname "${BASH_SOURCE[0]}")/test.sh" -m slurm "$@" || failed=1
done
exit "$failed"
