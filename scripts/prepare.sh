#!/usr/bin/env bash
# Download a model, convert it to checkpoints/NAME/model.pth, and quantize that to model_int8.pth. NAME
# is a hub name, or a path of any checkpoint that generate.py reads.
#   ./scripts/prepare.sh org/name
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: ./scripts/prepare.sh ORG/NAME|PATH" >&2; exit 2; }
here=$(dirname "$0")
python=$here/../.venv/bin/python                # of quickstart.sh, else the active environment
[ -x "$python" ] || python=python
source=$1
if [ ! -e "$source" ]; then
  "$python" "$here/download.py" --repo_id "$source"
  source=checkpoints/$source
fi
converted=$("$python" "$here/convert_hf_checkpoint.py" --checkpoint_dir "$source")
echo "$converted"
"$python" "$here/../quantize.py" --checkpoint_path "$converted" --mode int8
