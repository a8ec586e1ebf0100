#!/usr/bin/env bash
# Builds, serves or checks the documentation (docs/, mkdocs.yml). Needs scripts/install.sh; installs the extra `docs`.
#
#   scripts/docs.sh [--build | --serve | --check]
#     --build   into site/, the default; open site/index.html, no network needed
#     --serve   at http://127.0.0.1:8000, built again after each change
#     --check   builds, and checks that the links, keys, commands, metrics, exit codes and paths that pages name exist
set -euo pipefail
cd "$(dirname "$0")/.."

python=${MEGARL_DOCS_PYTHON:-.venv/bin/python}
[ -x "$python" ] || { echo "docs.sh: no $python; run scripts/install.sh first" >&2; exit 2; }
if ! "$python" -c "import mkdocs, material, mkdocstrings, griffe_pydantic" 2>/dev/null; then
  echo "docs.sh: installing the extra docs"
  if [ -x .venv/bin/uv ]; then pip=(.venv/bin/uv pip install --quiet --python "$python"); else pip=("$python" -m pip install --quiet); fi
  "$python" scripts/docs/requirements.py | "${pip[@]}" -r /dev/stdin
fi
# the theme's authors announce their successor of MkDocs at each build
export NO_MKDOCS_2_WARNING=1 PYTHONPATH=$PWD

case "${1:---build}" in
  --build) "$python" -m mkdocs build ;;
  --serve) "$python" -m mkdocs serve ;;
  --check) "$python" -m mkdocs build --quiet && "$python" -m scripts.docs.check ;;
  *) echo "docs.sh: unknown option $1; use --build, --serve or --check" >&2; exit 2 ;;
esac
