# shellcheck shell=bash disable=SC2154

# The body of every batch script. The scripts that dtrain.launch writes contain this code, those in slurm/ source this file.
# They set these variables before:
#   run_dir=DIR         the run directory, on a file system that all nodes share
#   python=FILE         the Python interpreter that has dtrain, on the nodes or in the container
#   processes=N         processes on each node
#   arguments=(...)     arguments of dtrain.train
#   srun_options=(...)  more options of srun
#   container=(...)     command that starts python in a container; empty without one
#   requeue=1           1: ask for another allocation if the run is not finished; 0: do not

set -uo pipefail

# SLURM_JOB_ID of the last array element also names the whole array, so elements are named ARRAY_ELEMENT.
job=$SLURM_JOB_ID
[[ -n ${SLURM_ARRAY_TASK_ID:-} ]] && job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# -- signals: set up first, because an unhandled USR1 kills this shell
stop_requested=0 cancelled=0
# The run looks for this file about once a second. Then all ranks agree on a step, save, and exit with code 0.
trap 'stop_requested=1; echo "the time limit is near: asking the run to stop"; touch "$run_dir/STOP"' USR1
# TERM comes from scancel or from the time limit. SLURM sends it to torchrun, too, so it is not forwarded here; but a job
# that a user cancelled must not be requeued.
trap 'if over_time; then stop_requested=1; else cancelled=1; fi' TERM
over_time() { [[ $(timeout 10 squeue --noheader --jobs="$job" --format=%r) == TimeLimit ]]; }

# -- the allocation
# Number of earlier allocations: of this job and, where requeue is forbidden, of the jobs before it.
starts=$((${DTRAIN_STARTS:-0} + ${SLURM_RESTART_COUNT:-0}))
nodes=${SLURM_JOB_NUM_NODES:-1} cpus=${SLURM_CPUS_PER_TASK:-$processes}

# -- the run directory
on_all_nodes() { if ((nodes == 1)); then "$@"; else srun --ntasks-per-node=1 --export=ALL "$@"; fi; }
if ! on_all_nodes test -d "$run_dir"; then
  echo "error: $run_dir does not exist on every node of $SLURM_JOB_NODELIST. run.dir must be on a file system that all" \
    "nodes share." >&2
  exit 1
fi
echo "$job" >"$run_dir/.job"
# A STOP file that an earlier start did not read must not stop this one.
((stop_requested)) || rm -f "$run_dir/STOP"
((starts)) || rm -f "$run_dir/.requeue"
newest_checkpoint() {
  local found=("$run_dir"/checkpoints/step-?????????)
  echo "${found[-1]}"
}
status_before=$(cat "$run_dir/status.json" 2>/dev/null)
checkpoint_before=$(newest_checkpoint)

# -- nodes, processes, threads
if ((nodes == 1)); then
  endpoint=localhost:0 # a free port, so that two jobs on one node do not collide
else
  # All nodes need the same port, so it cannot be a free one; ports of two jobs differ because their ids differ.
  endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))
fi
# torchrun would set 1, and without a value each process would use all cores of the node.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus / processes > 1 ? cpus / processes : 1))}
# For signals that are sent to the step instead of this shell: torchrun forwards these to the ranks (torch >= 2.10), and
# without this setting USR1 and USR2 would kill torchrun.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2
echo "job $job, restart $starts, on $SLURM_JOB_NODELIST: $nodes x $processes processes," \
  "OMP_NUM_THREADS=$OMP_NUM_THREADS, $run_dir"

# -- train
# In the background, because bash does not run a trap while it waits for a foreground command.
#   --ntasks-per-node=1    one torchrun on each node, which starts the processes
#   --cpus-per-task        srun does not read it from the #SBATCH line since SLURM 22.05
#   --kill-on-bad-exit=1   if one torchrun fails, the others end immediately instead of waiting for it
#   --export=ALL           overrides --export=NONE of the site or the user, which would leave the ranks no environment
#   --rdzv-id              with the restart count: a new start must not join the rendezvous of an old one
#   --max-restarts=0       restarts are done by SLURM, which excludes a failed node
srun --ntasks-per-node=1 --cpus-per-task="$cpus" --kill-on-bad-exit=1 --export=ALL "${srun_options[@]}" \
  "${container[@]}" "$python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$processes" \
  --max-restarts=0 --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$SLURM_JOB_ID.$starts" \
  -m dtrain.train "${arguments[@]}" &
srun_pid=$!
# A trap ends `wait` early, so wait until srun has ended; the last `wait` returns its exit code.
while kill -0 "$srun_pid" 2>/dev/null; do wait "$srun_pid"; done
wait "$srun_pid"
code=$?
trap 'stop_requested=1' USR1
rm -f "$run_dir/STOP" # the run may have ended before it read the file

# -- the result: read from status.json, because torchrun exits with 1 for every exit code but 0
status() { sed -n "s/.*\"$1\": *\"\{0,1\}\([^\",}]*\).*/\1/p" "$run_dir/status.json" | head -n 1; }
state=none step=0 reason=
# A run that was finished before is left as it is, with exit code 0.
if [[ $(cat "$run_dir/status.json" 2>/dev/null) != "$status_before" || $code-$(status state) == 0-finished ]]; then
  state=$(status state) step=$(status step) reason=$(status reason)
fi
echo "job $job, restart $starts: state $state, step $step, exit code $code"
fail() {
  echo "$1" >&2
  exit "$((code ? code : 1))"
}
((cancelled)) && fail "the job was cancelled: no new allocation"
# Number of allocations in a row without a new checkpoint.
fruitless=$(cat "$run_dir/.requeue" 2>/dev/null || echo 0)
[[ $(newest_checkpoint) == "$checkpoint_before" ]] && fruitless=$((fruitless + 1)) || fruitless=0
case $state in
  finished)
    rm -f "$run_dir/.requeue"
    exit 0
    ;;
  stopped)
    # A user wrote the STOP file, so the run must not be resumed automatically.
    if ((!stop_requested)) && [[ $reason == STOP* ]]; then exit 0; fi
    ;;
  running) ;; # killed before it could write its state: a node failure, preemption, out of memory
  failed)
    # A restart helps if another rank or a node failed, or a disk was full. It does not help if the same step fails again.
    ((fruitless)) && fail "the run failed without a new checkpoint: no new allocation"
    ;;
  *)
    # A run that trained before may have met a bad node; a run that never trained has an error in its config.
    ((starts)) || fail "the run ended before the first step: no new allocation"
    ;;
esac
# Without this limit a run that makes no progress would be requeued for ever.
((fruitless >= 3)) && fail "no new checkpoint in $fruitless allocations: no new allocation. Increase the time limit."
((requeue)) || fail "no new allocation, because requeue is off. The same command resumes the run."

# -- another allocation
echo "$fruitless" >"$run_dir/.requeue"
# Without traps the TERM signal of the requeue ends this shell at once.
trap - TERM USR1
if scontrol requeue "$job"; then
  sleep 60 # the requeue ends this shell; if it exited before, the job would be complete
fi
# Where requeue is forbidden, submit a new job; in an array, a new array with this element only.
unset SLURM_RESTART_COUNT
export DTRAIN_STARTS=$((starts + 1)) RUN_DIR=$run_dir
next=$(sbatch --parsable --dependency="afterany:$SLURM_JOB_ID" \
  ${SLURM_ARRAY_TASK_ID:+--array="$SLURM_ARRAY_TASK_ID"} "$0" "$@") || fail "submitting a new job failed, too"
next=${next%%;*}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # with several clusters the output is ID;CLUSTER
echo "$next" >"$run_dir/.job"
echo "requeue is refused here: job $next continues the run"
