#!/usr/bin/env bash
# Ends the command on every worker by SIGTERM, on which rag_jax.train saves, and after a while by
# SIGKILL. End watch.sh first: it would start the command again.
#
#   tpu_scripts/stop.sh [OPTIONS]
#
#   --patience=SECS  from SIGTERM to SIGKILL (default: 300)
#   --project=, --zone=, --tpu=   which TPU (default: TPU_PROJECT, TPU_ZONE, TPU_NAME)
#   --dry-run        print the commands, run none
source "$(dirname "$0")/lib.sh"

parse_tpu_options "patience=" "$@"
no_arguments
patience=${OPTIONS[patience]-300}
[[ $patience =~ ^[0-9]+$ ]] || die "--patience=$patience: a number of seconds"
on_workers all "$(worker stop "$patience")"
