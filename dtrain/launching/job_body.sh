# shellcheck shell=bash disable=SC2154

# What every job of a run does: dtrain.launch ends its scripts with it, those in slurm/ source it. They set before:
#   run_dir=DIR         of the run, on a file system that all nodes share
#   python=FILE         the interpreter that has dtrain, on the nodes or in the container
#   processes=N         on each node
#   arguments=(...)     of dtrain.train
#   srun_options=(...)  further options of srun
#   container=(...)     what python is started with
#   requeue=1           whether to ask for another allocation when this one was not enough

set -uo pipefail

# The plain id of an array's last element means the whole array.
job=$SLURM_JOB_ID
[[ -n ${SLURM_ARRAY_TASK_ID:-} ]] && job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# -- signals: first of all, because a USR1 that nobody handles kills this shell
asked=0 cancelled=0
# The run looks for this file about once a second, all ranks agree on a step, save, and end with exit code 0.
trap 'asked=1; echo "time is nearly up: asking the run to stop"; touch "$run_dir/STOP"' USR1
# scancel, or the time limit itself. SLURM tells torchrun too, so there is nothing to pass on; but a job that somebody
# cancelled must not come back to life.
trap 'if over_time; then asked=1; else cancelled=1; fi' TERM
over_time() { [[ $(timeout 10 squeue --noheader --jobs="$job" --format=%r) == TimeLimit ]]; }

# -- the allocation
# How many there were before: of this job, and where requeue is forbidden of the jobs before it.
starts=$((${DTRAIN_STARTS:-0} + ${SLURM_RESTART_COUNT:-0}))
nodes=${SLURM_JOB_NUM_NODES:-1} cpus=${SLURM_CPUS_PER_TASK:-$processes}

# -- the run's directory
on_all_nodes() { if ((nodes == 1)); then "$@"; else srun --ntasks-per-node=1 --export=ALL "$@"; fi; }
if ! on_all_nodes test -d "$run_dir"; then
  echo "error: $run_dir is not there on every node of $SLURM_JOB_NODELIST. run.dir must lie on a file system that all" \
    "nodes share." >&2
  exit 1
fi
echo "$job" >"$run_dir/.job"
# A request that an earlier start had no time to see would stop this one.
((asked)) || rm -f "$run_dir/STOP"
((starts)) || rm -f "$run_dir/.requeue"
newest_checkpoint() {
  local found=("$run_dir"/checkpoints/step-?????????)
  echo "${found[-1]}"
}
status_before=$(cat "$run_dir/status.json" 2>/dev/null)
checkpoint_before=$(newest_checkpoint)

# -- nodes, processes, threads
if ((nodes == 1)); then
  endpoint=localhost:0 # any free port, so that two jobs on a node do not meet
else
  # The same on all nodes, so it cannot be any free one; the job id keeps two jobs apart.
  endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))
fi
# torchrun would set 1, and each process left alone would take all cores of the node.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus / processes > 1 ? cpus / processes : 1))}
# For whoever signals the step and not this shell: torchrun passes these on (where it can: since torch 2.10) and would die
# of the last two.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2
echo "job $job, restart $starts, on $SLURM_JOB_NODELIST: $nodes x $processes processes," \
  "OMP_NUM_THREADS=$OMP_NUM_THREADS, $run_dir"

# -- train
# In the background, because bash runs a trap only when it is not waiting for a foreground command.
#   --ntasks-per-node=1    torchrun, which starts the processes
#   --cpus-per-task        srun does not take it from the #SBATCH line since SLURM 22.05
#   --kill-on-bad-exit=1   a torchrun that died ends the others at once; without it they wait for it
#   --export=ALL           else a site's or user's --export=NONE would reach the ranks as an empty environment
#   --rdzv-id              with the restart count: a new start must not meet what an old one left
#   --max-restarts=0       restarts are SLURM's, without the node that was the reason
srun --ntasks-per-node=1 --cpus-per-task="$cpus" --kill-on-bad-exit=1 --export=ALL "${srun_options[@]}" \
  "${container[@]}" "$python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$processes" \
  --max-restarts=0 --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$SLURM_JOB_ID.$starts" \
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
echo "job $job, restart $starts: state $state, step $step, exit code $code"
fail() {
  echo "$1" >&2
  exit "$((code ? code : 1))"
}
((cancelled)) && fail "cancelled: no new allocation"
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
    ((fruitless)) && fail "it failed without having saved anything new: no new allocation"
    ;;
  *)
    # What began before may have met a bad node; what never began has a mistake in it.
    ((starts)) || fail "it ended before the first step: no new allocation"
    ;;
esac
# Starts that get no further than the one before would go on for ever.
((fruitless >= 3)) && fail "no new checkpoint in $fruitless starts: no new allocation. Is its time too short?"
((requeue)) || fail "no new allocation, as asked for; the same command goes on where it was"

# -- another allocation
echo "$fruitless" >"$run_dir/.requeue"
# Untrapped, so that the TERM which comes with the requeue ends this shell at once.
trap - TERM USR1
if scontrol requeue "$job"; then
  sleep 60 # the requeue ends this shell; an exit before it would end the job
fi
# Some clusters forbid it: then a new job takes over, in an array a new array of this element.
unset SLURM_RESTART_COUNT
export DTRAIN_STARTS=$((starts + 1)) RUN_DIR=$run_dir
next=$(sbatch --parsable --dependency="afterany:$SLURM_JOB_ID" \
  ${SLURM_ARRAY_TASK_ID:+--array="$SLURM_ARRAY_TASK_ID"} "$0" "$@") || fail "and no new job either"
next=${next%%;*}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # ";cluster" follows where there are several
echo "$next" >"$run_dir/.job"
echo "requeue is refused here: job $next goes on"
