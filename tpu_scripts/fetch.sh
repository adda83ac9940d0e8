#!/usr/bin/env bash
# Copies results from worker 0, and the log of every worker.
#
#   tpu_scripts/fetch.sh [OPTIONS] PATH...
#   tpu_scripts/fetch.sh runs/mine/report.json runs/mine/rag_token
#
#   PATH...          files or folders, named as in the commands that wrote them
#   --to=DIR         where to (default: runs/TPU): runs/A/B becomes DIR/A/B, the logs DIR/logs
#   --project=, --zone=, --tpu=   which TPU (default: TPU_PROJECT, TPU_ZONE, TPU_NAME)
#   --dry-run        print the commands, run none
source "$(dirname "$0")/lib.sh"

parse_tpu_options "to=" "$@"
((${#ARGS[@]})) || die "which files? Give PATH..., for example runs/mine/report.json"
for path in "${ARGS[@]}"; do
  [[ $path != -* ]] || die "$path: options go before PATH"
  [[ $path != /* ]] || die "$path: name it from the folder of the commands, as in runs/mine/rag_token"
done
to=${OPTIONS[to]-runs/${OPTIONS[tpu]}}

run mkdir -p "$to/logs"
on_workers all "$(worker log)" "--output-directory=$to/logs"
for path in "${ARGS[@]}"; do
  folder=$to/$(dirname "${path#runs/}") # two runs have files of the same names
  run mkdir -p "$folder"
  copy "${OPTIONS[tpu]}:rag_jax/src/$path" "$folder" --recurse --worker=0
done
