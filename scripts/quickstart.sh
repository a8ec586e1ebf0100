#!/usr/bin/env bash
# The whole quickstart: creates the environment, teaches a small model some two-digit addition (SFT), then improves it
# with reinforcement learning: Megatron-Core trains on two processes, vLLM samples.
#   scripts/quickstart.sh [--cpu]        about ten minutes on two cores; the results are in runs/quickstart
set -euo pipefail
cd "$(dirname "$0")/.."

begin=$SECONDS
scripts/install.sh "$@"
megarl=.venv/bin/megarl
install_s=$((SECONDS - begin))

step() { # step TEXT COMMAND...: prints what runs, and on failure where to look
  echo; echo "[quickstart $((SECONDS - begin))s] $1"
  shift
  "$@" || {
    code=$?
    [ "$code" = 130 ] || echo "[quickstart] failed with exit code $code; see the message above and runs/*/logs" >&2
    exit "$code"
  }
}

# two processes, on two GPUs if there are two; one process on a single GPU
one=()
case " $* " in *" --cpu "*) ;; *) [ "$(nvidia-smi -L 2>/dev/null | wc -l)" != 1 ] || one=(launch.processes=1 parallel.tensor=1) ;; esac

rm -rf runs/quickstart runs/quickstart-sft runs/quickstart-sft-eval
step "accuracy of the untrained model" "$megarl" eval configs/quickstart_sft.yaml "${one[@]}"
sft_begin=$SECONDS
step "SFT: examples, until sampling is right about 40% of the time" "$megarl" train configs/quickstart_sft.yaml "${one[@]}"
rl_begin=$SECONDS
step "GRPO: rewards only" "$megarl" train configs/quickstart.yaml "${one[@]}"
rl_s=$((SECONDS - rl_begin))

.venv/bin/python scripts/quickstart_summary.py --install "$install_s" --sft "$((rl_begin - sft_begin))" --rl "$rl_s"
echo "[quickstart] $((SECONDS - begin)) seconds in all. Curves: runs/quickstart/report.png; with samples: report.html"
