#!/usr/bin/env bash
# Says what state the TPU is in and, once it is ACTIVE, of every worker whether its command is
# running, done, failed or interrupted, with the end of its log.
#
#   tpu_scripts/status.sh [OPTIONS]
#
#   --lines=N        lines of the log (default: 5)
#   --worker=N       of this worker alone
#   --follow         go on showing the log of one worker (default: 0) until Ctrl-C
#   --project=, --zone=, --tpu=   which TPU (default: TPU_PROJECT, TPU_ZONE, TPU_NAME)
#   --dry-run        print the commands, run none
source "$(dirname "$0")/lib.sh"

parse_tpu_options "lines= worker= follow" "$@"
no_arguments
lines=${OPTIONS[lines]-5}
[[ $lines =~ ^[0-9]+$ ]] || die "--lines=$lines: a number of lines"
if [[ -n ${OPTIONS[follow]-} ]]; then
  on_workers "${OPTIONS[worker]-0}" "$(worker follow "$lines")"
else
  state=$(tpus queued-resources describe "--format=value(state.state)")
  printf '%s\n' "$state"
  if dry_run || [[ $state == ACTIVE ]]; then
    on_workers "${OPTIONS[worker]-all}" "$(worker_if_synced status "$lines")"
  fi
fi
