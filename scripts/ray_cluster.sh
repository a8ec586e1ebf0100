#!/usr/bin/env bash
# A Ray cluster for configs with launch.topology: split, with a token that keeps everyone else out.
#
#   scripts/ray_cluster.sh head               on one node: starts it, and prints the command that trains
#   scripts/ray_cluster.sh worker HEAD_HOST   on each of the others
#   scripts/ray_cluster.sh stop               on every node: ends the Ray processes of this user
#
# The token is in TOKEN_FILE (default: .ray_token in the repository, readable by you alone), which all nodes must see, as
# they must run.dir and model.path. Ray executes what it is sent, and what it sends is not encrypted: the network between
# the nodes must be private. PORT (6379) is that of the head; NODE_IP the address to listen on, of several.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { echo "usage: $0 head | worker HEAD_HOST | stop" >&2; exit 2; }
ray=${RAY:-.venv/bin/ray}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="${TOKEN_FILE:-$PWD/.ray_token}" RAY_USAGE_STATS_ENABLED=0
port=${PORT:-6379}
node=()
[ -z "${NODE_IP:-}" ] || node=(--node-ip-address "$NODE_IP")

case "${1:-}" in
  head)
    [ -s "$RAY_AUTH_TOKEN_PATH" ] || (umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
    "$ray" start --head --port "$port" --include-dashboard=false --disable-usage-stats "${node[@]}"
    host=${NODE_IP:-$(hostname)}
    echo "on the other nodes: scripts/ray_cluster.sh worker $host"
    echo "then:               RAY_ADDRESS=$host:$port RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH .venv/bin/megarl train CONFIG"
    ;;
  worker)
    [ $# -eq 2 ] || usage
    [ -s "$RAY_AUTH_TOKEN_PATH" ] || { echo "no token in $RAY_AUTH_TOKEN_PATH; start the head first" >&2; exit 2; }
    "$ray" start --address "$2:$port" "${node[@]}" ${BLOCK:+--block} # BLOCK: until the head ends
    ;;
  stop) "$ray" stop ;;
  *) usage ;;
esac
