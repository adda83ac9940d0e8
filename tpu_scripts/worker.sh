#!/usr/bin/env bash
# What the other scripts do on a worker. It lies in ~/rag_jax, beside
#
#   src/     the code, of the commit in src/COMMIT           venv/   its environment
#   runs/    everything that commands write; src/runs is it, and runs/logs/HOST.log what they print
#   mount    what runs/ is mounted from, if it is
#   lock     held while the command of the last start runs; pid and ended are of that command too
#
#   worker.sh setup [MOUNT] | start COMMAND... | state | status LINES | follow LINES | log |
#             stop PATIENCE
source "$(dirname "$0")/lib.sh"
cd "$TPU_SCRIPTS/../.."
log=runs/logs/$(hostname).log

setup() {
  if [[ -n $1 ]]; then
    if ! mountpoint --quiet runs; then
      mount_runs "$1"
    elif [[ -e mount && $(cat mount) != "$1" ]]; then
      die "runs is mounted from $(cat mount), not $1; unmount it first (sudo umount ~/rag_jax/runs)"
    fi
    printf '%s\n' "$1" > mount
  fi
  if [[ ! -x venv/bin/pip ]]; then
    rm -rf venv
    # Newer images forbid pip to touch the system's Python, --user or not, unless told otherwise.
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --user --quiet uv \
      || die "uv, which brings Python 3.11, could not be installed; does the worker reach PyPI?"
    python3 -m uv venv --quiet --seed --python 3.11 venv \
      || die "no Python 3.11: none is installed, and uv could not download one (from GitHub);" \
        "install it as python3.11 on every worker and set up again"
  fi
  venv/bin/pip install --quiet -e './src[tpu]'
  venv/bin/python -c 'import jax, rag_jax, sys; print(f"Python {sys.version.split()[0]}, "
    f"jax {jax.__version__}, rag_jax {rag_jax.__version__}")'
}

mount_runs() {
  if [[ $1 == *:/* && ! -x /sbin/mount.nfs ]]; then
    sudo apt-get -o DPkg::Lock::Timeout=300 install --yes --quiet nfs-common
  fi
  sudo mount "$1" runs
  [[ -w runs ]] || sudo chown "$(id -u)" runs
}

start() {
  exec 9>> lock
  flock -n 9 || die "a command is running here; end it first (tpu_scripts/stop.sh)"
  [[ ! -e mount ]] || mountpoint --quiet runs || die "runs is no longer mounted, as after a reboot," \
    "and would begin anew; mount it again (tpu_scripts/setup.sh --mount=$(cat mount))"
  mkdir -p runs/logs
  rm -f ended
  echo "== $(date -u +%FT%TZ) commit $(cat src/COMMIT): $(quoted "$@")" >> "$log"
  setsid bash "$TPU_SCRIPTS/worker.sh" supervise "$@" >> "$log" 2>&1 < /dev/null &
  echo $! > pid
}

# Runs the command and says in `ended` how it ended; 75 is the status of rag_jax.train when a signal
# has stopped it, 143 where SIGTERM ended it at once, as one of several processes outside a training
# stage. Where nothing is said, something ended this shell too: a machine that went down, or a SIGTERM
# to the whole session. The lock is inherited: nothing can start while any of them lives.
supervise() {
  local code=0
  (export PATH="$PWD/venv/bin:$PATH" PYTHONUNBUFFERED=1 && cd src && exec "$@") || code=$?
  case $code in
    0) echo "done" ;;
    75 | 143) echo "interrupted" ;;
    *) echo "failed $code" ;;
  esac > ended.new
  mv ended.new ended
}

running() {
  ! flock -n lock true
}

state() {
  if running; then
    echo "$(hostname): running"
  elif [[ -e ended ]]; then
    echo "$(hostname): $(cat ended)"
  elif [[ -e pid ]]; then
    echo "$(hostname): interrupted"
  else
    echo "$(hostname): idle"
  fi
}

status() {
  state
  [[ ! -e $log ]] || tail -n "$1" "$log"
}

follow() {
  tail -n "$1" -F "$log"
}

log() {
  [[ ! -e $log ]] || cat "$log"
}

stop() {
  running || return 0
  kill -TERM -- "-$(cat pid)"
  if ! flock -w "$1" lock true; then
    kill -KILL -- "-$(cat pid)"
    flock -w 60 lock true || die "process group $(cat pid) outlives SIGKILL; recreate the TPU"
  fi
}

case ${1-} in
  setup | start | supervise | state | status | follow | log | stop) "$@" ;;
  *) die "${1-nothing}: not one of its commands" ;;
esac
