#!/usr/bin/env bash
# Creates the environment (scripts/install.sh --dev) and runs the tests that need no GPU. Arguments go to pytest:
#   scripts/test.sh -k layout        scripts/test.sh -m "long and not exhaustive"
# Without arguments two processes share the work, file by file: many tests wait, or have one thread.
set -euo pipefail
cd "$(dirname "$0")/.."

unset PYTHONDONTWRITEBYTECODE # half of the time of a test that starts ranks would be compiling imports again
scripts/install.sh --dev --cpu
marks="not gpu and not long" workers=()
if [ $# -eq 0 ]; then workers=(-n 2 --dist loadfile --no-loadscope-reorder); fi
case " $* " in *" -m "*) marks="" ;; esac
echo "[test] pytest ${marks:+-m \"$marks\" }${workers[*]}$*"
if ! .venv/bin/python -m pytest ${marks:+-m "$marks"} "${workers[@]}" "$@"; then
  echo "[test] failed. To run one test: scripts/test.sh PATH::NAME; if the environment is stale: rm -rf .venv" >&2
  exit 1
fi
