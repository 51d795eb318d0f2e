#!/usr/bin/env bash
# Runs the tests that need a cluster on a SLURM that is started for them, once for each way in which SLURM tracks processes,
# because these deliver signals differently:
#
#   DTRAIN_TEST_SLURM_BED=DIR bash scripts/test_slurm.sh [pytest arguments]
#
# DIR has start.sh, which starts a cluster of several nodes on this machine, and stop.sh. The tests take about half an hour
# on two cores. DTRAIN_TEST_CRASHES=20 makes 20 nodes crash in the test of cancelled runs, instead of three.
set -uo pipefail
: "${DTRAIN_TEST_SLURM_BED:?set it to the folder whose start.sh starts a SLURM}"

failed=0
for tracking in cgroup linuxproc; do
  echo "==== SLURM_BED_TRACK=$tracking"
  SLURM_BED_TRACK=$tracking bash "$(dirname "${BASH_SOURCE[0]}")/test.sh" -m slurm "$@" || failed=1
done
exit "$failed"
