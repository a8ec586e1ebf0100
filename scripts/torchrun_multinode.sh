#!/usr/bin/env bash
# The same program on N nodes: run this on every node, with the same arguments and a different NODE_RANK.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 scripts/torchrun_multinode.sh configs/my.yaml train.steps=100
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 scripts/torchrun_multinode.sh configs/my.yaml train.steps=100
#
# All nodes must see the same run.dir and model.path (a shared file system). The world is NNODES x NPROC ranks; data
# parallelism follows from it and from the sizes in the config. torchrun exits with 1 on any failure: the real exit
# code is in runs/<name>/exit.json, and every rank's log in runs/<name>/logs. SIGTERM to this script saves and ends the
# run. The network between the nodes must be private: torchrun, gloo and NCCL let everyone join who can reach their ports.
set -euo pipefail
cd "$(dirname "$0")/.."

: "${NNODES:?set NNODES to the number of nodes}"
: "${NODE_RANK:?set NODE_RANK to the index of this node, 0 to NNODES - 1}"
: "${MASTER_ADDR:?set MASTER_ADDR to the host name of node 0}"
[ $# -ge 1 ] || { echo "usage: NNODES=.. NODE_RANK=.. MASTER_ADDR=.. $0 CONFIG [key=value ...]" >&2; exit 2; }
NPROC="${NPROC:-$(nvidia-smi -L 2>/dev/null | wc -l)}" # ranks per node: one per GPU
[ "$NPROC" -gt 0 ] || NPROC=1
# torchrun would give each rank one core, too few for Adam on the host, offloading and checksums
threads=$(($(nproc) / NPROC))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

# the repository's own environment; in the container of docker/Dockerfile set PYTHON=python
python=${PYTHON:-.venv/bin/python}

# SIGTERM is for the ranks, which save and end; torchrun would kill them 30 s after it
(
  trap '' TERM
  exec "$python" -m torch.distributed.run --signals-to-handle SIGINT,SIGHUP,SIGQUIT \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29400}" \
    -m megarl.cli train "$@"
) &
torchrun=$!
# shellcheck disable=SC2046
trap 'kill -TERM $(cat "/proc/$torchrun/task/$torchrun/children") || true' TERM
while kill -0 "$torchrun" 2>/dev/null; do
  status=0
  wait "$torchrun" || status=$? # that of a trapped signal, if torchrun is still there
done
exit "$status"
