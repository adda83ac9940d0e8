#!/usr/bin/env bash
# Asks Cloud for a TPU, a queued resource with a node of the same name. It is there when status.sh
# says ACTIVE.
#
#   tpu_scripts/create.sh --accelerator=TYPE [OPTIONS] [-- GCLOUD_FLAGS...]
#
#   --accelerator=TYPE   v4-8, v5litepod-8, v5litepod-64, ... as Cloud names it
#   --runtime=VERSION    software of the workers (default: by accelerator)
#   --spot               cheaper; Cloud may take it away at any time (see watch.sh)
#   --disk=NAME          attach this disk of the same zone for reading and writing (one host only)
#   -- GCLOUD_FLAGS...   for queued-resources create, such as --reserved or --network=NAME
#   --project=, --zone=, --tpu=   which TPU (default: TPU_PROJECT, TPU_ZONE, TPU_NAME)
#   --dry-run            print the commands, run none
source "$(dirname "$0")/lib.sh"

parse_tpu_options "accelerator= runtime= spot disk=" "$@"
accelerator=${OPTIONS[accelerator]-}
[[ -n $accelerator ]] || die "which accelerator? Give --accelerator=v4-8, for example"
runtime=${OPTIONS[runtime]-}
if [[ -z $runtime ]]; then
  case $accelerator in
    v[234]-*) runtime=tpu-ubuntu2204-base ;;
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    *) die "--accelerator=$accelerator: known are v2-N, v3-N, v4-N, v5litepod-N (v5e), v5p-N and" \
      "v6e-N; for another one give --runtime too" ;;
  esac
fi

flags=("--node-id=${OPTIONS[tpu]}" "--accelerator-type=$accelerator" "--runtime-version=$runtime")
[[ -z ${OPTIONS[spot]-} ]] || flags+=(--spot)
if [[ -n ${OPTIONS[disk]-} ]]; then
  disk=projects/${OPTIONS[project]}/zones/${OPTIONS[zone]}/disks/${OPTIONS[disk]}
  flags+=("--data-disk=source=$disk,mode=read-write")
fi
tpus queued-resources create "${flags[@]}" "${ARGS[@]}"
