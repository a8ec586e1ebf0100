#!/usr/bin/env bash
# The first hour on a GPU, as a ladder of checks: scripts/gpu_check.sh [1 | 8] [--only STEP ...] [--out DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m benchmarks.gpu_check "$@"
