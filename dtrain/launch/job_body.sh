# shellcheck shell=bash disable=SC2154

# The body of every batch script. The scripts that dtrain launch writes contain this code, those in slurm/ source this file.
# They set these variables before:
#   run_dir=DIR         the run directory, on a file system that all nodes share
#   python=FILE         the Python interpreter that has dtrain, on the nodes or in the container
#   processes=N         processes on each node
#   arguments=(...)     arguments of dtrain train
#   srun_options=(...)  more options of srun
#   container=(...)     command that starts python in a container; empty without one
#   requeue=1           1: ask for another allocation if the run is not finished; 0: do not

set -uo pipefail

# SLURM_JOB_ID of the last array element also names the whole array, so elements are named ARRAY_ELEMENT.
job=$SLURM_JOB_ID
[[ -n ${SLURM_ARRAY_TASK_ID:-} ]] && job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# -- signals: set up first, because an unhandled USR1 kills this shell
# A handler sets a flag and starts no process, and no command of this file has two command substitutions: bash 5.2 loses a
# signal during the second one. Whether SLURM has ended the allocation is asked, so nothing depends on a TERM that comes late.
stop_requested=0 terminated=
# The run looks for this file about once a second. Then all ranks agree on a step, save, and exit with code 0. The file of a
# user is empty, and stays so.
trap 'stop_requested=1; echo "the time limit is near: asking the run to stop"
  [[ -e $run_dir/STOP ]] || echo "time limit" >"$run_dir/STOP"' USR1
# From scancel, the time limit or a requeue. SLURM sends it to torchrun, too, so it is not forwarded here.
on_term='terminated=", after SIGTERM"'
# shellcheck disable=SC2064
trap "$on_term" TERM

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

# -- one job for each run: the file .job names it. Other jobs of the run, whatever started them, end here, and a job that is
# not named there when it ends asks for no allocation.
owner() {
  local id='' directory=''
  { read -r id && read -r directory; } 2>/dev/null <"$run_dir/.job"
  # The second line names the run: a copy of the directory has the file of the original.
  [[ -z $directory || ! -d $directory || $directory -ef $run_dir ]] && echo "$id"
}
hand_over() {
  printf '%s\n' "$1" "$(realpath "$run_dir")" >"$run_dir/.job.$job" && mv -f "$run_dir/.job.$job" "$run_dir/.job"
}
other=$(owner)
# Elements of one array that share a run directory run one after the other.
if [[ -n $other && ${other%%_*} != "${job%%_*}" ]]; then
  if ((starts)); then
    echo "the run belongs to job $other now: nothing to do for job $job, restart $starts"
    exit 0
  fi
  # The line of this job shows that squeue has answered; it does not print jobs that have ended.
  for attempt in {1..20}; do
    queue=$(timeout 60 squeue --noheader --jobs="$job,$other" --format="%i %T")
    [[ $queue == *"$job "* ]] && break
    ((attempt < 20)) && sleep 15
  done
  if [[ $queue != *"$job "* ]]; then
    echo "error: SLURM did not tell whether job $other still trains this run. Submit this job again." >&2
    exit 1
  fi
  if queue=$(grep -m 1 -v -e "^$job " -e " COMPLETING$" <<<"$queue"); then
    echo "error: the run already has job $queue. Wait until it ends, or cancel it: scancel $other" >&2
    exit 1
  fi
fi
if ! hand_over "$job"; then
  echo "error: $run_dir/.job cannot be written" >&2
  exit 1
fi
# A STOP file of a time limit that the last allocation did not read must not stop this one. That of a user stops the job,
# but not one that the user submits later.
if ((starts)) && [[ -e $run_dir/STOP && ! -s $run_dir/STOP ]]; then
  rm -f "$run_dir/STOP"
  echo "stopped by a STOP file before the start"
  exit 0
fi
((stop_requested)) || rm -f "$run_dir/STOP"
((starts)) || rm -f "$run_dir/.requeue"
newest_checkpoint() {
  local found=("$run_dir"/checkpoints/step-?????????)
  echo "${found[-1]}"
}
status_before=$(cat "$run_dir/status.json" 2>/dev/null)
checkpoint_before=$(newest_checkpoint)
if [[ -n $terminated ]]; then
  echo "job $job, restart $starts: ended before the run started$terminated"
  exit 143
fi

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
# The run may have ended before it read the file.
stopped_by_user=0
[[ -e $run_dir/STOP && ! -s $run_dir/STOP ]] && stopped_by_user=1
rm -f "$run_dir/STOP"

# -- the result: read from status.json, because torchrun exits with 1 for every exit code but 0
status() { sed -n "s/.*\"$1\": *\"\{0,1\}\([^\",}]*\).*/\1/p" "$run_dir/status.json" 2>/dev/null | head -n 1; }
state=none step=0 reason=
# A run that was finished before is left as it is, with exit code 0.
status_now=$(cat "$run_dir/status.json" 2>/dev/null)
now=$(status state)
if [[ $status_now != "$status_before" || $code-$now == 0-finished ]]; then
  state=$now
  step=$(status step)
  reason=$(status reason)
fi
echo "job $job, restart $starts: state $state, step $step, exit code $code$terminated"
fail() {
  echo "$1" >&2
  exit "$((code ? code : 1))"
}
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
    if ((stopped_by_user)) || { ((!stop_requested)) && [[ $reason == STOP* ]]; }; then exit 0; fi
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

# -- another allocation: only while SLURM runs this one, or ends it at its time limit. Otherwise a user has cancelled the
# job, or a node has failed, and SLURM has requeued it.
other=$(owner)
[[ $other == "$job" ]] || fail "the run belongs to job $other now: no new allocation for job $job"
echo "$fruitless" >"$run_dir/.requeue"
# Fails if SLURM does not answer, or has forgotten the job.
look() {
  read -r job_state restarts job_reason \
    <<<"$(timeout 60 squeue --noheader --jobs="$job" --Format=State:20,RestartCnt:10,Reason:30)" && [[ -n $job_state ]]
}
refused=0
for _ in {1..20}; do
  if ! look; then
    refused=0 # it may have been a failure of the connection
    sleep 15
    continue
  fi
  ((restarts == ${SLURM_RESTART_COUNT:-0})) || job_state=REQUEUED
  case $job_state-$job_reason in
    # SLURM itself checks under its lock that the job still runs, so a job that is cancelled meanwhile stays cancelled. A
    # successor depends on the success of this job, so it is cancelled with it.
    RUNNING-* | SIGNALING-* | SUSPENDED-*) only=(Incomplete) after=afterok ;;
    # SLURM does not cancel a job that it ends itself, nor count it as a success.
    COMPLETING-TimeLimit) only=() after=afterany ;;
    COMPLETING-NodeDown) fail "a node failed, and SLURM may not requeue this job. The same command resumes the run." ;;
    *) fail "SLURM has cancelled this allocation, or requeued the job: no new allocation from here" ;;
  esac
  if ((!refused)); then
    trap - TERM # without a handler the TERM signal of the requeue ends this shell at once
    if scontrol requeue "${only[@]}" "$job"; then
      sleep 600 # the end of this shell must not come before that of the allocation
      exit 1
    fi
    # shellcheck disable=SC2064
    trap "$on_term" TERM
    refused=1
    continue # SLURM may have requeued or cancelled the job meanwhile
  fi
  # Where requeue is forbidden, submit a new job; in an array, a new array with this element only.
  next=$(
    unset SLURM_RESTART_COUNT
    export DTRAIN_STARTS=$((starts + 1)) RUN_DIR=$run_dir
    sbatch --parsable --dependency="$after:$job" --kill-on-invalid-dep=yes \
      ${SLURM_ARRAY_TASK_ID:+--array="$SLURM_ARRAY_TASK_ID"} "$0" "$@"
  ) || fail "submitting a new job failed, too"
  next=${next%%;*}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # with several clusters the output is ID;CLUSTER
  hand_over "$next" || fail "$run_dir/.job cannot be written, so job $next will not continue the run"
  echo "requeue is refused here: job $next continues the run"
  exit 0
done
fail "SLURM did not answer: no new allocation. The same command resumes the run."
