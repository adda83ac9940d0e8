#!/usr/bin/env bash
# Deletes the TPU, running or not, and with it everything on its workers that is not on a mounted
# disk or share.
#
#   tpu_scripts/delete.sh [OPTIONS]
#
#   --project=, --zone=, --tpu=   which TPU (default: TPU_PROJECT, TPU_ZONE, TPU_NAME)
#   --dry-run        print the commands, run none
source "$(dirname "$0")/lib.sh"

parse_tpu_options "" "$@"
no_arguments
tpus queued-resources delete --force --quiet
