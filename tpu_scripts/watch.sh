#!/usr/bin/env bash
# Keeps a command going on a TPU until it is done: creates the TPU where there is none and again
# after a preemption, syncs the same commit, sets up, and starts the same command, which goes on
# where it was if its --workdir is on a mounted disk or share. Can itself be ended and started
# again at any time. Exits with 0 when the command is done on every worker; the TPU stays.
#
#   tpu_scripts/watch.sh --accelerator=TYPE [OPTIONS] COMMAND...
#
#   --accelerator=, --runtime=, --spot, --disk=   as for create.sh
#   --mount=         as for setup.sh
#   --commit=        as for sync.sh
#   --poll=SECS      between two looks (default: 60)
#   --restarts=N     how often the command may be started again on one and the same TPU (default:
#                    3): a command that keeps failing is not worth the price
#   --project=, --zone=, --tpu=   which TPU (default: TPU_PROJECT, TPU_ZONE, TPU_NAME)
#   --dry-run        print the commands for a TPU that is not there yet, run none
source "$(dirname "$0")/lib.sh"

parse_tpu_options "accelerator= runtime= spot disk= mount= commit= poll= restarts=" "$@"
require_command
poll=${OPTIONS[poll]-60}
restarts=${OPTIONS[restarts]-3}
[[ $poll =~ ^[0-9]+$ ]] || die "--poll=$poll: a number of seconds"
[[ $restarts =~ ^[0-9]+$ ]] || die "--restarts=$restarts: a number"
restarts=$((10#$restarts)) # of 08, too
hash=$(commit_hash)
starts=0 # on this TPU

say() {
  printf '%s %s\n' "$(date +%T)" "$*"
}

# sibling SCRIPT OPTION-NAMES ARGUMENTS...: another script, for this TPU, with those of our options.
sibling() {
  local name options=("${SAME_TPU[@]}")
  for name in $2; do
    [[ -z ${GIVEN[$name]-} ]] || options+=("${GIVEN[$name]}")
  done
  "$TPU_SCRIPTS/$1.sh" "${options[@]}" "${@:3}"
}

create() {
  starts=0
  sibling create "accelerator runtime spot disk"
}

launch() {
  sibling sync "" "--commit=$hash" && sibling setup "mount" && sibling run "" -- "${ARGS[@]}"
}

# Sets ANSWER and ERRORS to what a command prints and complains of.
ask() {
  local file code=0
  file=$(mktemp)
  ANSWER=$("$@" 2> "$file") || code=$?
  ERRORS=$(< "$file")
  rm "$file"
  return "$code"
}

# describe GROUP FIELD: sets ANSWER to a field of the TPU, or MISSING; UNKNOWN if gcloud fails.
describe() {
  if ! ask tpus "$1" describe "--format=value($2)"; then
    [[ $ERRORS == *NOT_FOUND* ]] && ANSWER=MISSING && return
    ANSWER=UNKNOWN
    printf '%s\n' "$ERRORS" >&2
  fi
}

# Sets STATE: ACTIVE, SUSPENDED (its workers are gone), MISSING, FAILED, or another to wait out.
look() {
  describe queued-resources state.state
  STATE=$ANSWER
  if [[ $STATE == ACTIVE ]]; then
    describe tpu-vm state
    case $ANSWER in
      READY) ;;
      PREEMPTED | TERMINATED | STOPPED | MISSING) STATE=SUSPENDED ;;
      *) STATE="ACTIVE, its node $ANSWER" ;;
    esac
  fi
}

# Looks at the workers of an active TPU, and starts the command where it is not running.
tend() {
  if ! ask on_workers all "$(worker_if_synced state)"; then
    printf '%s\n' "$ERRORS" >&2
    say "not every worker answers"
    return
  fi
  say "${ANSWER//$'\n'/, }"
  if ! grep -qv ': done$' <<< "$ANSWER"; then
    say "done; the TPU is still there (tpu_scripts/delete.sh)"
    exit 0
  elif grep -Eq ': (idle|failed [0-9]+|interrupted)$' <<< "$ANSWER"; then
    ((starts++ <= restarts)) || die "it does not stay up: started $((restarts + 1)) times on this" \
      "TPU; see tpu_scripts/status.sh. The TPU is still there (tpu_scripts/delete.sh)"
    # Hosts that have lost a peer may wait for it for ever.
    if [[ $ANSWER != *': running'* ]] || sibling stop ""; then
      launch || say "not started everywhere"
    fi
  fi
}

if dry_run; then
  tpus queued-resources describe "--format=value(state.state)"
  create
  tpus tpu-vm describe "--format=value(state)"
  on_workers all "$(worker_if_synced state)"
  launch
  exit
fi

[[ -n ${OPTIONS[mount]-} ]] || say "without --mount, a preemption takes the workdir with it"
look
[[ $STATE != UNKNOWN ]] || die "gcloud cannot tell the state of the TPU (see above)"
[[ $STATE != MISSING ]] || create # what fails here will not mend itself
while true; do
  look
  say "$STATE"
  case $STATE in
    ACTIVE) tend ;;
    MISSING) create || say "not created" ;;
    SUSPENDED) { sibling delete "" && create; } || say "not created anew" ;;
    FAILED) die "Cloud gave the request up; see gcloud compute tpus queued-resources describe" \
      "${OPTIONS[tpu]}, and delete it (tpu_scripts/delete.sh) before another try" ;;
  esac
  sleep "$poll"
done
