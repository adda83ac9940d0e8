#!/usr/bin/env bash
# The paper's main experiment, to be run on the workers: Wikipedia in 21,015,324 passages, their
# index, RAG-Token and RAG-Sequence trained on Natural Questions (79,168 questions), and both
# evaluated on its test set as the paper does. Started again it goes on where it was.
#
#   tpu_scripts/natural_questions.sh [--dry-run] WORKDIR [--config.FIELD=VALUE...]
#
#   WORKDIR             such as runs/nq; the downloads go to dpr/ beside it
#   --config.FIELD=...  for rag_jax.train, after the values below
#   --dry-run           print the commands, run none
#
# The paper publishes no learning rate, batch size or number of steps. These are those of Hugging
# Face's finetune_rag.sh: 100 epochs in batches of 64.
source "$(dirname "$0")/lib.sh"

parse_options "" "$@"
((${#ARGS[@]})) || die "which workdir? Give WORKDIR, such as runs/nq"
workdir=${ARGS[0]}
refuse_bucket "$workdir"
dpr=$(dirname "$workdir")/dpr
files=https://dl.fbaipublicfiles.com/dpr

# Of several hosts with one folder one downloads, and the others wait.
run mkdir -p "$dpr"
run flock "$dpr/lock" wget --continue --no-verbose "--directory-prefix=$dpr" \
  "$files/wikipedia_split/psgs_w100.tsv.gz" \
  "$files/data/retriever/nq-train.qa.csv" \
  "$files/data/retriever/nq-dev.qa.csv" \
  "$files/data/retriever/nq-test.qa.csv"

run python -m rag_jax.train --config=configs/own_data.py "--workdir=$workdir" \
  --config.runs=rag_token,rag_sequence \
  "--config.data.passages=$dpr/psgs_w100.tsv.gz" \
  "--config.data.train=$dpr/nq-train.qa.csv" \
  "--config.data.dev=$dpr/nq-dev.qa.csv" \
  "--config.data.test=$dpr/nq-test.qa.csv" \
  --config.data.chunk_words=0 \
  --config.data.max_question_length=64 \
  --config.data.max_passage_length=256 \
  --config.data.max_source_length=256 \
  --config.data.max_target_length=32 \
  --config.model.retriever=bert-base \
  --config.model.retriever.dtype=bfloat16 \
  --config.model.retriever.scan_layers=true \
  --config.model.retriever.remat=full \
  --config.model.query_encoder.pretrained=facebook/dpr-question_encoder-single-nq-base \
  --config.model.document_encoder.pretrained=facebook/dpr-ctx_encoder-single-nq-base \
  --config.model.generator=bart-large \
  --config.model.generator.pretrained=facebook/bart-large \
  --config.model.generator.dtype=bfloat16 \
  --config.model.generator.scan_layers=true \
  --config.model.generator.remat=full \
  --config.retrieval.k=5 \
  --config.retrieval.embed_batch_size=1024 \
  --config.train.steps=123700 \
  --config.train.batch_size=64 \
  --config.train.label_smoothing=0.1 \
  --config.train.query_encoder_rate=1 \
  --config.train.eval_every=5000 \
  --config.train.save_every=500 \
  --config.train.optimizer.learning_rate=3e-5 \
  --config.train.optimizer.schedule=polynomial \
  --config.train.optimizer.warmup_steps=500 \
  --config.train.optimizer.weight_decay=0.001 \
  --config.train.optimizer.clip_norm=0.1 \
  --config.train.optimizer.b2=0.999 \
  "${ARGS[@]:1}"

# The report comes last. Of a SIGTERM to another host this script hears nothing, while training
# has saved and ended on all of them.
dry_run || [[ -e $workdir/report.json ]] || die "training was interrupted; start again to go on"

# Greedy with 15 passages, and thorough greedy with 50 (appendix A).
run python -m rag_jax.evaluate "--workdir=$workdir" --run=rag_token --split=test \
  --config.eval=paper-qa-token
run python -m rag_jax.evaluate "--workdir=$workdir" --run=rag_sequence --split=test \
  --config.eval=paper-qa-sequence
