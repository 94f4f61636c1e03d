#!/bin/bash
# A search on Slurm: Ray on the nodes of a job, and dray on the first of them. See docs/kubernetes.md.
#
#   sbatch clusters/slurm.sh
#   scancel --signal=TERM --batch JOB      # trials save, and the job is queued again; `scancel JOB` ends it
#
# When the job is preempted, its time is over, or a node fails, Slurm queues it again, and the search continues. All nodes
# must see the directories below. Fill in the lines marked FILL IN.
#
#SBATCH --job-name=digits
# FILL IN: the nodes, and what a node has. Whole nodes: two Rays on one node can get into each other's way.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --time=1-00:00:00
#SBATCH --requeue
# Two minutes before the time is over; with PreemptParameters=send_user_signal in slurm.conf also before a preemption.
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append

set -euo pipefail

# FILL IN: an environment with dray, a config with its code beside it, and a directory for results. A requeued job has the
# same number, so that the second time there is an experiment in this directory, which continues.
# shellcheck source=/dev/null
source FILL_IN_ENVIRONMENT/bin/activate
config=FILL_IN_CONFIG
results=FILL_IN_RESULTS/$SLURM_JOB_NAME-$SLURM_JOB_ID

# Without a token, anyone who can reach Ray's ports can run code as you.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
# How long Ray waits for trials to save when Slurm sends SIGTERM to its processes.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=60

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
others=$((${#nodes[@]} - 1))
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address)
export RAY_ADDRESS=${address%% *}:6379

# dray hardly uses Ray's object store, which would take 30 % of the memory. /tmp/ray may belong to somebody else.
options=(--block --disable-usage-stats --object-store-memory=104857600)
srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --node-ip-address="${RAY_ADDRESS%:*}" --port=6379 \
    --temp-dir="/tmp/ray-$SLURM_JOB_ID" --include-dashboard=false "${options[@]}" &
ray=$!
until ray health-check 2> /dev/null; do
    kill -0 "$ray" # else it has failed, and so does this
    sleep 1
done
if ((others > 0)); then
    srun --nodes="$others" --ntasks="$others" --exclude="$head" ray start --address="$RAY_ADDRESS" "${options[@]}" &
fi

stopped=
dray experiment create "$config" --path "$results" &
driver=$!
# Once only: a second signal would end the driver before its trials have saved.
trap 'trap "" TERM; stopped=yes; kill -TERM "$driver"' TERM
code=0
wait "$driver" || code=$?
if [[ $stopped ]]; then # it was the signal that has ended the wait
    code=0
    wait "$driver" || code=$?
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
