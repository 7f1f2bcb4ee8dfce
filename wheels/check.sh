#!/usr/bin/env bash
# Install dist's wheel into an empty environment, as on a machine without a compiler, and use it.
#   wheels/check.sh PYTHON ENVIRONMENT
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
rm -rf "$2"
"$1" -m venv "$2"
python=$(cd "$2/bin" && pwd)/python
# Nothing that would have to be compiled is accepted, and no compiler can be found.
export PATH=$(dirname "$python") CC=no-compiler CXX=no-compiler
"$python" -m pip install --quiet --only-binary :all: --constraint "$root/constraints.txt" \
	"$root"/dist/*.whl
cd "$2"
"$python" "$root/wheels/check.py"
