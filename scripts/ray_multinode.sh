#!/usr/bin/env bash
# A config with launch.topology: split on N nodes: run this on every node, with the same arguments and a different
# NODE_RANK, as torchrun_multinode.sh. Node 0 starts Ray's head and `megarl train`; the others join, and end with it.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 scripts/ray_multinode.sh configs/my.yaml train.steps=100
set -euo pipefail
cd "$(dirname "$0")/.."

: "${NODE_RANK:?set NODE_RANK to the index of this node}"
: "${MASTER_ADDR:?set MASTER_ADDR to the host name of node 0}"
[ $# -ge 1 ] || { echo "usage: NODE_RANK=.. MASTER_ADDR=.. $0 CONFIG [key=value ...]" >&2; exit 2; }
export PORT="${MASTER_PORT:-6379}" TOKEN_FILE="${TOKEN_FILE:-$PWD/.ray_token_${SLURM_JOB_ID:-${MASTER_PORT:-6379}}}"

if [ "$NODE_RANK" -ne 0 ]; then
  for _ in $(seq 60); do # until the head listens
    sleep 5
    if [ -s "$TOKEN_FILE" ] && BLOCK=1 scripts/ray_cluster.sh worker "$MASTER_ADDR"; then exit 0; fi
  done
  echo "Ray's head on $MASTER_ADDR:$PORT was not there after 300 s" >&2
  exit 1
fi
scripts/ray_cluster.sh head
trap 'scripts/ray_cluster.sh stop; rm -f "$TOKEN_FILE"' EXIT
RAY_ADDRESS="$MASTER_ADDR:$PORT" RAY_AUTH_TOKEN_PATH="$TOKEN_FILE" "${PYTHON:-.venv/bin/python}" -m megarl.cli train "$@" &
run=$!
trap 'kill -TERM "$run" || true' TERM # saves, and ends the run
while kill -0 "$run" 2>/dev/null; do
  status=0
  wait "$run" || status=$?
done
exit "$status"
