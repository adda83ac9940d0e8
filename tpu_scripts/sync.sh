#!/usr/bin/env bash
# Puts the files of one commit on every worker, as ~/rag_jax/src, in place of what was there. Its
# folder runs/ is ~/rag_jax/runs, which stays.
#
#   tpu_scripts/sync.sh [OPTIONS]
#
#   --commit=COMMIT   which (default: HEAD, refused while there are uncommitted changes)
#   --project=, --zone=, --tpu=   which TPU (default: TPU_PROJECT, TPU_ZONE, TPU_NAME)
#   --dry-run         print the commands, run none
source "$(dirname "$0")/lib.sh"

parse_tpu_options "commit=" "$@"
no_arguments
hash=$(commit_hash)
# Of this TPU alone: several may be synced at the same time.
archive=${TMPDIR:-/tmp}/rag_jax-${OPTIONS[zone]}-${OPTIONS[tpu]}-$hash.tar.gz
busy='a command is running here; end it first (tpu_scripts/stop.sh)'

run git -C "$TPU_SCRIPTS/.." archive --format=tar.gz "--output=$archive" "$hash"
copy "$archive" "${OPTIONS[tpu]}:rag_jax.tar.gz" --worker=all
on_workers all "mkdir -p rag_jax/runs && cd rag_jax \
&& { flock -n lock true || { echo '$busy' >&2; exit 1; }; } \
&& rm -rf src.new && mkdir src.new && tar -xzf ../rag_jax.tar.gz -C src.new \
&& echo $hash > src.new/COMMIT && ln -s ../runs src.new/runs \
&& rm -rf src && mv src.new src && rm ../rag_jax.tar.gz"
run rm "$archive"
