#!/usr/bin/env bash
# Starts a command on every worker at once, in ~/rag_jax/src. It does not need the connection any
# more; each worker writes what it prints to ~/rag_jax/runs/logs/HOST.log.
#
#   tpu_scripts/run.sh [OPTIONS] COMMAND...
#   tpu_scripts/run.sh python -m rag_jax.train --workdir=runs/mine
#
#   --project=, --zone=, --tpu=   which TPU (default: TPU_PROJECT, TPU_ZONE, TPU_NAME)
#   --dry-run        print the commands, run none
source "$(dirname "$0")/lib.sh"

parse_tpu_options "" "$@"
require_command
on_workers all "$(worker start "${ARGS[@]}")" \
  || die "not every worker started it; tpu_scripts/stop.sh ends it where it runs"
