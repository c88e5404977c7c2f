#!/bin/bash
# Train under Slurm, on any number of nodes; goes on by itself after a time limit, a preemption or a node failure.
#
#   sbatch --nodes=4 --gpus-per-node=8 scripts/slurm_train.sh experiment=adlm-owt-262b out=runs/owt
#
# Partition, account, time and the like are options of sbatch. `out` must be given: it is where a requeued job goes on.
#SBATCH --job-name=adlm-train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail

case " $* " in
    *" out="*) ;;
    *) echo "slurm_train.sh: give out=FOLDER, so that a requeued job finds its checkpoints" >&2; exit 2 ;;
esac

# USR1 comes to this shell 300 s before the time limit. TERM makes training save and end; then the job queues again.
requeue=0
trap 'requeue=1; kill -TERM "$step" 2>/dev/null || true' USR1

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head:${MASTER_PORT:-29500}" \
    -m adlm train "$@" &
step=$!

# A trapped signal ends `wait` early: wait again until the step itself has ended.
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do
    status=0
    wait "$step" || status=$?
done

if [ "$requeue" = 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"
