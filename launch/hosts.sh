#!/bin/bash
# Several hosts without a scheduler: run the same command on every host, in the folder of the scripts.
#
#     bash launch/hosts.sh 2 HOST1 train_DDP.py --batch-size 512                     # exactly two hosts
#     MAX_RESTARTS=3 bash launch/hosts.sh 1:2 HOST1 train_elastic.py --resume auto   # one or two: one may leave or join
#
# HOST1 is one of the hosts, by the name that `hostname` prints there; the processes meet on its port 29400 (PORT). Each
# host runs one process per accelerator (PROCESSES_PER_HOST) and needs the code, the data and, to resume, the output
# folder.
# If a host is in several networks, set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the interface to use.
# If a host has several CPU sockets, NUMA_BINDING=node binds each process to the cores near its GPU; this needs numactl.
set -euo pipefail

nodes=$1 host=$2
shift 2
processes=${PROCESSES_PER_HOST:-$(python -c 'import torch; print(max(1, torch.accelerator.device_count()))')}

# see launch/torchrun.sbatch; without this variable, no host can join a run
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# expandable_segments: less memory is lost to fragmentation
# PYTHONFAULTHANDLER: if NCCL's watchdog ends a process, Python prints what each thread was executing
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}" PYTHONFAULTHANDLER=1

# last_call_timeout: once the minimum number of hosts has joined, wait 3 s for more (default: 30)
exec python -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$processes" --rdzv-id="${RUN_ID:-1}" \
    --rdzv-backend=c10d --rdzv-endpoint="$host:${PORT:-29400}" --rdzv-conf=last_call_timeout=3 \
    ${NUMA_BINDING:+"--numa-binding=$NUMA_BINDING"} --max-restarts="${MAX_RESTARTS:-0}" "$@"
