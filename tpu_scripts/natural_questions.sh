#!/usr/bin/env bash
# The paper's main experiment, to be run on the workers: Wikipedia in 21,015,324 passages, their
# index, RAG-Token and RAG-Sequence trained on Natural Questions (79,168 questions), and both
# evaluated on its test set as the paper does. Started again it goes on where it was; with status 75
# a signal has interrupted training.
#
#   tpu_scripts/natural_questions.sh [--dry-run] WORKDIR [--config.FIELD=VALUE...]
#
#   WORKDIR             such as runs/nq; the passages go to dpr/ beside it, the questions to tasks/
#   --config.FIELD=...  for rag_jax.train, on top of configs/paper.py:table1/nq/rag_*
#   --dry-run           print the commands, run none
#
# configs/paper.py holds all values.
source "$(dirname "$0")/lib.sh"

parse_options "" "$@"
((${#ARGS[@]})) || die "which workdir? Give WORKDIR, such as runs/nq"
workdir=${ARGS[0]}
refuse_bucket "$workdir"
for field in "${ARGS[@]:1}"; do
  [[ $field == --config.*=* ]] || die "$field: after WORKDIR come --config.FIELD=VALUE alone"
done
dpr=$(dirname "$workdir")/dpr
files=https://dl.fbaipublicfiles.com/dpr

# Of several hosts with one folder one downloads, and the others wait.
run mkdir -p "$dpr"
run flock "$dpr/lock" wget --continue --no-verbose "--directory-prefix=$dpr" \
  "$files/wikipedia_split/psgs_w100.tsv.gz"

# Answers: greedy with 15 passages, and thorough greedy with 50 (appendix A).
for kind in token sequence; do
  run python -m rag_jax.train "--config=configs/paper.py:table1/nq/rag_$kind" "--workdir=$workdir" \
    "--config.data.passages=$dpr/psgs_w100.tsv.gz" \
    "--config.data.data_dir=$(dirname "$workdir")/tasks" \
    --config.mesh.fsdp=4 --config.eval.batch_size=16 "${ARGS[@]:1}"
  run python -m rag_jax.evaluate "--workdir=$workdir" "--run=rag_$kind" --split=test \
    "--config.eval=paper-qa-$kind" --config.eval.batch_size=16
done
