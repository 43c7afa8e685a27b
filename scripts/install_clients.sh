#!/usr/bin/env bash
# Create .venv-clients, with the clients that tests/test_clients.py runs against serve.py:
#   bash scripts/install_clients.sh
# Python's clients are those of requirements-clients.txt (550 MB, a minute). Where npm is installed, node's
# are in .venv-clients/node (100 MB, ten seconds). Nothing is done where both are installed already.
set -euo pipefail
cd "$(dirname "$0")/.."

node_clients=(openai@7.59.0 ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92
  @ai-sdk/anthropic@4.0.105 @anthropic-ai/sdk@1.14.0 zod@4.6.7)
directory=.venv-clients
node=$directory/node

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

python=$(command -v python3 || command -v python) || die "no python3: install Python 3.10 or newer"
if [ ! -x $directory/bin/python ]; then
  say "Creating $directory"
  "$python" -m venv $directory || { rm -rf $directory; die "no venv module: apt-get install python3-venv"; }
fi
if ! cmp -s requirements-clients.txt $directory/installed; then
  say "Installing requirements-clients.txt into $directory"
  $directory/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-clients.txt 2> $directory/log \
    || die "installation failed: $(grep -i error $directory/log | tail -n 1)"
  cp requirements-clients.txt $directory/installed
fi

command -v npm > /dev/null || { say "npm not found: node's clients are left out"; exit 0; }
mkdir -p $node
if ! printf '%s\n' "${node_clients[@]}" | cmp -s - $node/installed; then
  say "Installing ${node_clients[*]} into $node"
  npm install --prefix $node --no-audit --no-fund --loglevel=error "${node_clients[@]}" > $node/log 2>&1 \
    || die "npm: $(grep -i err $node/log | head -n 1)"
  printf '%s\n' "${node_clients[@]}" > $node/installed
fi
