# Options, --dry-run and gcloud for the scripts of this folder, which source it.
# shellcheck shell=bash
set -euo pipefail

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) \
  || die "bash $BASH_VERSION is too old, 4.4 is the oldest that will do (macOS: brew install bash)"

unset CDPATH # with which cd prints where it goes
TPU_SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
declare -A OPTIONS # name -> value, "yes" for a flag
declare -A GIVEN   # name -> the option as one argument, for watch.sh
ARGS=()            # what follows the options
SAME_TPU=()        # the options by which another script speaks to the same TPU

# Prints the comment at the head of the script.
usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

# parse_options "NAME= FLAG ..." ARGUMENTS: fills OPTIONS and ARGS. Options end at the first
# argument that is none, or at --.
parse_options() {
  local known=" help dry-run $1 " name
  shift
  while (($#)); do
    case $1 in
      --) shift; break ;;
      --*=*)
        name=${1%%=*} name=${name#--}
        [[ $known == *" $name= "* ]] || die "unknown option --$name=; --help lists what there is"
        OPTIONS[$name]=${1#*=}
        [[ -n ${OPTIONS[$name]} ]] || die "--$name: a value is missing"
        GIVEN[$name]=$1 ;;
      -*)
        name=${1#--}
        if [[ $known == *" $name "* ]]; then
          OPTIONS[$name]=yes GIVEN[$name]=$1
        else
          [[ $known == *" $name= "* ]] || die "unknown option $1; --help lists what there is"
          (($# > 1)) && [[ $2 != --* ]] || die "--$name: a value is missing"
          OPTIONS[$name]=$2
          # shellcheck disable=SC2034 # read by watch.sh
          GIVEN[$name]=$1=$2
          shift
        fi ;;
      *) break ;;
    esac
    shift
  done
  ARGS=("$@")
  [[ -z ${OPTIONS[help]-} ]] || { usage; exit 0; }
}

# As parse_options, for scripts that speak to a TPU.
parse_tpu_options() {
  local name variable
  local -A variables=([project]=TPU_PROJECT [zone]=TPU_ZONE [tpu]=TPU_NAME)
  parse_options "project= zone= tpu= $1" "${@:2}"
  for name in project zone tpu; do
    variable=${variables[$name]}
    OPTIONS[$name]=${OPTIONS[$name]-${!variable-}}
    [[ -n ${OPTIONS[$name]} ]] || die "which $name? Give --$name=..., or export $variable=..."
    SAME_TPU+=("--$name=${OPTIONS[$name]}")
  done
  if dry_run; then
    SAME_TPU+=(--dry-run)
  else
    command -v gcloud > /dev/null \
      || die "gcloud is not installed; see https://cloud.google.com/sdk/docs/install"
  fi
}

dry_run() {
  [[ -n ${OPTIONS[dry-run]-} ]]
}

no_arguments() {
  ((${#ARGS[@]} == 0)) || die "unexpected argument ${ARGS[0]}; --help says what there is"
}

# A command for the workers is in ARGS, and keeps what it writes.
require_command() {
  ((${#ARGS[@]})) || die "the command is missing; --help says where it goes"
  [[ ! " ${ARGS[*]}" =~ (workdir|--out|--to|natural_questions\.sh)[=\ ](gs://[^\ ]*) ]] ||
    refuse_bucket "${BASH_REMATCH[2]}"
}

refuse_bucket() {
  [[ $1 != gs://* ]] || die "$1: rag_jax writes files, and would write these to a folder named" \
    "gs: on the worker; name a folder in runs/, kept by a disk or share (setup.sh --mount)"
}

# Writes the arguments as a line for a shell, without its end.
quoted() {
  printf '%q' "$1"
  (($# == 1)) || printf ' %q' "${@:2}"
}

# Runs a command after showing it; with --dry-run only shows it.
run() {
  if dry_run; then
    printf '%s\n' "$(quoted "$@")"
  else
    printf '+ %s\n' "$(quoted "$@")" >&2
    "$@"
  fi
}

# in_zone GROUP VERB ARGUMENTS...: a gcloud command in the TPU's project and zone.
in_zone() {
  run gcloud compute tpus "$@" "--project=${OPTIONS[project]}" "--zone=${OPTIONS[zone]}"
}

# tpus GROUP VERB FLAGS...: a gcloud command about this TPU.
tpus() {
  in_zone "$1" "$2" "${OPTIONS[tpu]}" "${@:3}"
}

# copy FROM... TO FLAGS...: files to or from workers.
copy() {
  in_zone tpu-vm scp "$@"
}

# on_workers WHICH LINE FLAGS...: runs a shell line on worker WHICH, or on all.
on_workers() {
  tpus tpu-vm ssh "--worker=$1" "--command=$2" "${@:3}"
}

# The line that calls worker.sh on a worker.
worker() {
  # shellcheck disable=SC2016 # the worker's $(hostname)
  worker_or 'echo "$(hostname): there is no code yet (tpu_scripts/sync.sh)" >&2; exit 1' "$@"
}

# The line for a worker that may not have the code yet.
worker_if_synced() {
  # shellcheck disable=SC2016 # the worker's $(hostname)
  worker_or 'echo "$(hostname): idle"' "$@"
}

# worker_or LINE ARGUMENTS...: the line that calls worker.sh, and LINE where there is none.
worker_or() {
  printf 'if [ -e rag_jax/src/tpu_scripts ]; then %s; else %s; fi' \
    "$(quoted bash rag_jax/src/tpu_scripts/worker.sh "${@:2}")" "$1"
}

# Hash of the commit to run: --commit, or HEAD where it is all that there is.
commit_hash() {
  local commit=${OPTIONS[commit]-}
  cd "$TPU_SCRIPTS"
  [[ -n $commit || -z $(git status --porcelain) ]] || die "there are uncommitted changes, which" \
    "would not be synced; commit them, or say --commit=HEAD to do without them"
  git rev-parse --verify --quiet "${commit:-HEAD}^{commit}" \
    || die "--commit=${commit:-HEAD}: no such commit in a git clone at $PWD"
}
