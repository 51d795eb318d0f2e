# shellcheck shell=bash disable=SC2154  # run_dir, python, processes and arguments are set above

set -uo pipefail

# -- signals: first of all, because a USR1 that nobody handles kills this shell
asked=0 cancelled=0
# The run looks for this file about once a second, all ranks agree on a step, save, and end with exit code 0.
trap 'asked=1; echo "time is nearly up: asking the run to stop"; touch "$run_dir/STOP"' USR1
# scancel, or the time limit itself. SLURM tells torchrun too, so there is nothing to pass on; but a job that somebody
# cancelled must not come back to life.
trap 'cancelled=1' TERM

# -- the run's directory
if [[ ! -d $run_dir ]]; then
  echo "error: $run_dir is not there on $SLURMD_NODENAME. run.dir must lie on a file system that all nodes share." >&2
  exit 1
fi
# A request that an earlier start had no time to see would stop this one.
((asked)) || rm -f "$run_dir/STOP"
restarts=${SLURM_RESTART_COUNT:-0}
((restarts)) || rm -f "$run_dir/.requeue"
newest_checkpoint() {
  local found=("$run_dir"/checkpoints/step-?????????)
  echo "${found[-1]}"
}
status_before=$(cat "$run_dir/status.json" 2>/dev/null)
checkpoint_before=$(newest_checkpoint)

# -- nodes, processes, threads
nodes=${SLURM_JOB_NUM_NODES:-1} cpus=${SLURM_CPUS_PER_TASK:-$processes}
if ((nodes == 1)); then
  endpoint=localhost:0 # any free port, so that two jobs on a node do not meet
else
  # The same on all nodes, so it cannot be any free one; the job id keeps two jobs apart.
  endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))
fi
# torchrun would set 1, and each process left alone would take all cores of the node.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus / processes > 1 ? cpus / processes : 1))}
echo "job $SLURM_JOB_ID, restart $restarts, on $SLURM_JOB_NODELIST: $nodes x $processes processes," \
  "OMP_NUM_THREADS=$OMP_NUM_THREADS, $run_dir"

# -- train
# In the background, because bash runs a trap only when it is not waiting for a foreground command.
#   --cpus-per-task        srun does not take it from the #SBATCH line since SLURM 22.05
#   --kill-on-bad-exit=1   a torchrun that died ends the others at once; without it they wait for it
#   --export=ALL           else a site's or user's --export=NONE would reach the ranks as an empty environment
#   --rdzv-id              with the restart count: a new start must not meet what an old one left
#   --max-restarts=0       restarts are SLURM's, without the node that was the reason
srun --kill-on-bad-exit=1 --cpus-per-task="$cpus" --export=ALL \
  "$python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$processes" --max-restarts=0 \
  --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$SLURM_JOB_ID.$restarts" \
  -m dtrain.train "${arguments[@]}" &
srun_pid=$!
# A trap ends `wait` early; the last one gets srun's own exit code.
while kill -0 "$srun_pid" 2>/dev/null; do wait "$srun_pid"; done
wait "$srun_pid"
code=$?
trap 'asked=1' USR1
rm -f "$run_dir/STOP" # where the run ended before it saw the request

# -- what now? status.json tells, exit codes cannot: torchrun makes 1 of all but 0
status() { sed -n "s/.*\"$1\": *\"\{0,1\}\([^\",}]*\).*/\1/p" "$run_dir/status.json" | head -n 1; }
state=none step=0 reason=
if [[ $(cat "$run_dir/status.json" 2>/dev/null) != "$status_before" ]]; then
  state=$(status state) step=$(status step) reason=$(status reason)
fi
echo "job $SLURM_JOB_ID, restart $restarts: state $state, step $step, exit code $code"
fail() {
  echo "$1" >&2
  exit "$((code ? code : 1))"
}
((cancelled)) && fail "cancelled, or over its time limit: not requeued. To go on: sbatch $run_dir/job.sbatch"
fruitless=$(cat "$run_dir/.requeue" 2>/dev/null || echo 0)
[[ $(newest_checkpoint) == "$checkpoint_before" ]] && fruitless=$((fruitless + 1)) || fruitless=0
case $state in
  finished)
    rm -f "$run_dir/.requeue"
    exit 0
    ;;
  stopped)
    # Somebody wrote the STOP file by hand: that is a wish to stop, not to go on later.
    if ((!asked)) && [[ $reason == STOP* ]]; then exit 0; fi
    ;;
  running) ;; # killed before it could say anything: a node that died, preemption, out of memory
  failed)
    # Helps where a peer or a node died, or a disk was full; not where the same step fails again.
    ((fruitless)) && fail "it failed without having saved anything new: not requeued"
    ;;
  *) fail "it ended before the first step: not requeued" ;;
esac

# Starts that get no further than the one before would go on for ever.
((fruitless >= 3)) && fail "no new checkpoint in $fruitless starts: not requeued. Is launch.time too short?"
echo "$fruitless" >"$run_dir/.requeue"
# Untrapped, so that the TERM which comes with the requeue ends this shell at once.
trap - TERM USR1
if scontrol requeue "$SLURM_JOB_ID"; then
  sleep 60 # the requeue ends this shell; an exit before it would end the job
fi
fail "could not requeue. To go on: sbatch $run_dir/job.sbatch"
