#!/usr/bin/env bash
# Installs rag_jax on every worker, from the code that sync.sh put there, into a virtual environment
# with Python 3.11 (the images' own Python may be 3.10; uv, from PyPI, finds or downloads 3.11).
#
#   tpu_scripts/setup.sh [OPTIONS]
#
#   --mount=SOURCE   mount this on ~/rag_jax/runs, so that what commands write there outlives the
#                    TPU: LABEL=NAME, a device, or SERVER:/SHARE (NFS, needed for several hosts)
#   --project=, --zone=, --tpu=   which TPU (default: TPU_PROJECT, TPU_ZONE, TPU_NAME)
#   --dry-run        print the commands, run none
source "$(dirname "$0")/lib.sh"

parse_tpu_options "mount=" "$@"
no_arguments
on_workers all "$(worker setup "${OPTIONS[mount]-}")"
