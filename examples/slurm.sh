#!/bin/bash
# Trains on two nodes of eight GPUs under SLURM: sbatch examples/slurm.sh. Untried on a cluster: check it on yours first.
#SBATCH --job-name=deadreckon
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue

# Without SLURM, on each of the two nodes (as untried):
#   torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 \
#       -m deadreckon train flipflop --size small --device cuda --mesh dp=4,cp=4 --out /shared/runs/two-nodes
# If killed, submit it again, on any number of nodes: it resumes from the last checkpoint.
# The folder must be one that all nodes see.
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \
    --rdzv-endpoint "$head:29500" \
    -m deadreckon train "${RECIPE:-flipflop}" --size "${SIZE:-small}" --device cuda --mesh "${MESH:-dp=4,cp=4}" \
    --out "${OUT:-$SLURM_SUBMIT_DIR/runs/slurm}"
