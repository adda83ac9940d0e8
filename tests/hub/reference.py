"""Small random models of transformers and what they compute: the parity oracle (needs torch).

Every case is a record of flat arrays: "inputs/*", "outputs/*" and "gradients/*" (the latter by
tensor name, of the scalar that `parity.scalar` describes).
"""

import dataclasses
from typing import Any

import numpy as np
import torch
import transformers

START, END, PAD = 2, 2, 1
QUESTIONS, PASSAGES, SOURCE, TARGET, LENGTH = 3, 2, 7, 5, 6
ANSWER = 9  # longest generated answer, in tokens
BARE = ("Bert", "Roberta", "XLMRoberta", "ModernBert")
BERT_SIZE = {
    "vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 10}
BART_SIZE = {
    "vocab_size": 27, "d_model": 8, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12, "max_position_embeddings": 12, "forced_eos_token_id": None}


CAUSAL_SIZE = {
    "vocab_size": 27, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 12,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": END, "pad_token_id": PAD}


T5_SIZE = {
    "vocab_size": 27, "d_model": 8, "d_kv": 3, "num_heads": 2, "d_ff": 12, "num_layers": 2,
    "num_decoder_layers": 2, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9, "decoder_start_token_id": START, "eos_token_id": END,
    "pad_token_id": PAD}


@dataclasses.dataclass(frozen=True)
class Case:
    """A class of transformers with its configuration; `bert`, `bart`, `causal` and `t5` change
    the sizes."""

    model: str
    bert: dict[str, Any] = dataclasses.field(default_factory=dict)
    bart: dict[str, Any] = dataclasses.field(default_factory=dict)
    causal: dict[str, Any] = dataclasses.field(default_factory=dict)
    t5: dict[str, Any] = dataclasses.field(default_factory=dict)


def rope(kind: str = "default", theta: float = 100.0, **fields: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **fields}


_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
CAUSAL = {
    "llama": Case("LlamaForCausalLM", causal={"rope_parameters": rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8)}),
    "mistral": Case("MistralForCausalLM", causal={"sliding_window": 3, "rope_parameters": rope()}),
    "qwen2": Case("Qwen2ForCausalLM", causal={
        "head_dim": None, "hidden_size": 16, "tie_word_embeddings": True,
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16)}),
    "qwen3": Case("Qwen3ForCausalLM", causal={"rope_parameters": rope("linear", factor=2.0)}),
    "olmo2": Case("Olmo2ForCausalLM", causal={"head_dim": None, "rope_parameters": rope()}),
    "gemma2": Case("Gemma2ForCausalLM", causal={
        "sliding_window": 3, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0, "rope_parameters": rope()}),
    "gemma3": Case("Gemma3ForCausalLM", causal={
        "num_hidden_layers": 3, "sliding_window": 3, "query_pre_attn_scalar": 5,
        "layer_types": [_LOCAL, _LOCAL, _GLOBAL], "rope_parameters": {
            _GLOBAL: rope("linear", factor=2.0), _LOCAL: rope(theta=10.0)}}),
}


UNTIED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
CASES = {
    "bert": Case("BertModel"),
    "bert_mlm": Case("BertForMaskedLM", {"hidden_act": "relu"}),
    "roberta": Case("RobertaModel", {"max_position_embeddings": 12}),
    "xlm_roberta": Case("XLMRobertaModel", {"type_vocab_size": 1}),
    "modernbert": Case("ModernBertModel", {
        "num_hidden_layers": 3, "global_attn_every_n_layers": 2, "local_attention": 4,
        "global_rope_theta": 90.0, "local_rope_theta": 40.0,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id",
                         "sep_token_id"), 0)}),
    "dpr_question": Case("DPRQuestionEncoder", {"projection_dim": 5}),
    "dpr_context": Case("DPRContextEncoder", {"num_hidden_layers": 1}),
    "bart": Case("BartModel", {}, {"activation_function": "relu", "scale_embedding": True}),
    "bart_generation": Case("BartForConditionalGeneration", {},
                            {"encoder_layers": 2, "decoder_layers": 1}),
    "rag": Case("RagModel"),
    "rag_token": Case("RagTokenForGeneration", {"projection_dim": 5, "num_hidden_layers": 1}),
    "rag_sequence": Case("RagSequenceForGeneration", {"num_hidden_layers": 1},
                         {"scale_embedding": True, "encoder_layers": 2, "decoder_layers": 1}),
    **CAUSAL,
    "rerankers/bert": Case("BertForSequenceClassification", {"num_labels": 1}),
    "rerankers/xlm_roberta": Case("XLMRobertaForSequenceClassification", {
        "num_labels": 1, "type_vocab_size": 1, "num_hidden_layers": 1}),
    "t5/plain": Case("T5ForConditionalGeneration"),
    "t5/gated": Case("T5ForConditionalGeneration", t5={
        **UNTIED, "d_ff": 5, "num_layers": 1, "num_decoder_layers": 1}),
}


def build(case: Case, seed: int = 0, scale: float = 0.3) -> Any:
    """The model with every parameter and buffer away from its default, in evaluation mode."""
    bert, bart = {**BERT_SIZE, **case.bert}, {**BART_SIZE, **case.bart}
    if case.model.startswith(BARE):
        name = case.model.partition("Model")[0].partition("For")[0]
        config = getattr(transformers, f"{name}Config")(**bert)
    elif case.model.startswith("DPR"):
        config = transformers.DPRConfig(**bert)
    elif case.model.startswith("Bart"):
        config = transformers.BartConfig(**bart)
    elif "T5" in case.model:
        name = case.model.replace("ForConditionalGeneration", "Config")
        config = getattr(transformers, name)(**{**T5_SIZE, **case.t5})
    elif case.model.endswith("ForCausalLM"):
        name = case.model.removesuffix("ForCausalLM").replace("Gemma3", "Gemma3Text")
        sizes = {k: v for k, v in {**CAUSAL_SIZE, **case.causal}.items() if v is not None}
        config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation="eager")
    else:
        config = transformers.RagConfig.from_question_encoder_generator_configs(
            transformers.DPRConfig(**bert), transformers.BartConfig(**bart), n_docs=PASSAGES)
    model = getattr(transformers, case.model)(config).eval()
    if case.t5 and "tie_word_embeddings" in case.t5:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if "rotary" in name or name.endswith("embed_scale"):
                continue  # what follows from the configuration
            if value.dtype == torch.float32:
                noise = torch.from_numpy(scale * rng.normal(size=value.shape)).float()
                one = "norm" in name.lower() and not case.model.startswith("Gemma")
                value.copy_(noise + (one and name.endswith("weight")))
            if name.endswith("final_logits_bias"):
                value[:, END] += 2.0  # answers end
    return model


def make_inputs(case: Case, seed: int = 1) -> dict[str, np.ndarray]:
    """Random rows with padding; the pad token is at padded places only."""
    rng = np.random.default_rng(seed)
    bert, bart = {**BERT_SIZE, **case.bert}, {**BART_SIZE, **case.bart}
    embedding = bert.get("projection_dim") or bert["hidden_size"]

    def rows(vocab: int, pad: int, *shape: int, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
        lengths = rng.integers(least, shape[-1] + 1, shape[:-1])
        lengths.reshape(-1)[0] = shape[-1]
        mask = np.arange(shape[-1]) < lengths[..., None]
        return np.where(mask, rng.integers(3, vocab, shape), pad), mask

    question_ids, question_mask = rows(bert["vocab_size"], 0, QUESTIONS, LENGTH)
    source_ids, source_mask = rows(bart["vocab_size"], PAD, QUESTIONS, PASSAGES, SOURCE)
    target_ids, target_mask = rows(bart["vocab_size"], PAD, QUESTIONS, TARGET, least=2)
    return {
        "question_ids": question_ids, "question_mask": question_mask,
        "token_types": rng.integers(0, 2, (QUESTIONS, LENGTH)) % bert.get("type_vocab_size", 2),
        "source_ids": source_ids, "source_mask": source_mask,
        "target_ids": target_ids, "target_mask": target_mask,
        "doc_embeddings": rng.normal(size=(QUESTIONS, PASSAGES, embedding)).astype(np.float32),
        "cotangent": rng.normal(size=(64,)).astype(np.float32),
    }


def _encoder(model: Any, case: Case, x: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {"input_ids": x["question_ids"], "attention_mask": x["question_mask"],
              "token_type_ids": x["token_types"]}
    if case.model.startswith("DPR"):
        return model(**inputs).pooler_output
    if case.model.startswith("Modern"):
        del inputs["token_type_ids"]
    if case.model.endswith("ForSequenceClassification"):
        return model(**inputs).logits[:, 0]
    body = getattr(model, "bert", getattr(model, "roberta", model))
    states = body(**inputs).last_hidden_state
    return states * x["question_mask"][:, :, None]  # padded places mean nothing


def _labels(targets: torch.Tensor) -> torch.Tensor:
    """What RAG's loss, which shifts to the left, needs to see our decoder inputs and targets."""
    return torch.cat([torch.full_like(targets[:, :1], START), targets], 1)


def _bart(model: Any, x: dict[str, torch.Tensor], conditional: bool) -> dict[str, torch.Tensor]:
    result = model(
        input_ids=x["source_ids"].flatten(0, 1), attention_mask=x["source_mask"].flatten(0, 1),
        decoder_input_ids=_labels(x["target_ids"]).repeat_interleave(PASSAGES, 0)[:, :-1])
    outputs = {"encoded": result.encoder_last_hidden_state}
    if "T5" in type(model).__name__:  # Fusion-in-Decoder
        outputs["fused"] = model(
            encoder_outputs=(outputs["encoded"].reshape(QUESTIONS, PASSAGES * SOURCE, -1),),
            attention_mask=x["source_mask"].flatten(1),
            decoder_input_ids=_labels(x["target_ids"])[:, :-1]).logits
    outputs["logits" if conditional else "states"] = result[0]
    return outputs


def causal(model: Any, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each target after each prompt and the start token, a row at a time without padding."""
    states, logits = [], []
    targets = _labels(x["target_ids"]).repeat_interleave(PASSAGES, 0)[:, :-1]
    for ids, mask, target in zip(x["source_ids"].flatten(0, 1), x["source_mask"].flatten(0, 1),
                                 targets, strict=True):
        result = model(torch.cat([ids[mask], target])[None], output_hidden_states=True)
        states.append(result.hidden_states[-1][0, -TARGET:])
        logits.append(result.logits[0, -TARGET:])
    return {"states": torch.stack(states), "logits": torch.stack(logits)}


def _continued(model: Any, x: dict[str, torch.Tensor], beams: int) -> torch.Tensor:
    """The answers to each question's first prompt (or source), which all end."""
    rows, encodes = [], model.config.is_encoder_decoder
    for ids, mask in zip(x["source_ids"][:, 0], x["source_mask"][:, 0], strict=True):
        prompt = ids[mask][None] if encodes else (
            torch.cat([ids[mask], torch.tensor([START])])[None])
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), num_beams=beams, do_sample=False,
            length_penalty=0.0, max_new_tokens=ANSWER, forced_eos_token_id=END, use_cache=True,
            **({"early_stopping": "never"} if beams > 1 else {}))[
                0, 1 if encodes else prompt.shape[1] :]
        rows.append(torch.nn.functional.pad(tokens, (0, ANSWER - len(tokens)), value=PAD))
    return torch.stack(rows)


def _rag(model: Any, case: Case, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    rag = getattr(model, "rag", model)
    query = rag.question_encoder(x["question_ids"], attention_mask=x["question_mask"])[0]
    doc_scores = torch.einsum("be,bke->bk", query, x["doc_embeddings"])
    given = {"context_input_ids": x["source_ids"].flatten(0, 1),
             "context_attention_mask": x["source_mask"].flatten(0, 1),
             "doc_scores": doc_scores, "n_docs": PASSAGES}
    if case.model == "RagModel":
        return {"embedding": query, "doc_scores": doc_scores,
                "logits": model(input_ids=x["question_ids"], **given,
                                decoder_input_ids=_labels(x["target_ids"])[:, :-1]).logits}
    result = model(**given, labels=_labels(x["target_ids"]))
    single = torch.full_like(x["target_ids"], PAD)
    single[:, 0] = x["target_ids"][:, 0]
    with torch.no_grad():
        one_token = model(**given, labels=_labels(single)).loss
    return {"embedding": query, "doc_scores": doc_scores, "logits": result.logits,
            "loss": result.loss, "one_token_loss": one_token}


def _answers(model: Any, x: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor],
             beams: int) -> torch.Tensor:
    """RAG-Token's answers by the plain beam search of the paper, without the start token."""
    model.generation_config.forced_eos_token_id = None
    tokens = model.generate(
        context_input_ids=x["source_ids"].flatten(0, 1),
        context_attention_mask=x["source_mask"].flatten(0, 1).long(),
        doc_scores=outputs["doc_scores"].detach(), n_docs=PASSAGES, num_beams=beams,
        do_sample=False, length_penalty=0.0, max_length=ANSWER + 1, use_cache=True,
        **({"early_stopping": "never"} if beams > 1 else {}))[:, 1:]
    padded = torch.full((tokens.shape[0], ANSWER), PAD)
    padded[:, : tokens.shape[1]] = tokens
    assert beams == 1 or (padded == END).any(1).all(), "cut answers are ranked otherwise there"
    return padded


def record(model: Any, case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs and gradients of one model on one batch."""
    x = {k: torch.from_numpy(v) for k, v in inputs.items()}
    if case.model.startswith((*BARE, "DPR")):
        outputs = {"output": _encoder(model, case, x)}
    elif case.model.startswith("Bart") or "T5" in case.model:
        outputs = _bart(model, x, case.model != "BartModel")
    elif case.model.endswith("ForCausalLM"):
        outputs = causal(model, x)
    else:
        outputs = _rag(model, case, x)
    main = outputs.get("loss", list(outputs.values())[-1])
    weights = x["cotangent"].repeat(main.numel() // 64 + 1)[: main.numel()].reshape(main.shape)
    if "loss" not in outputs and len(outputs) > 1:
        weights = weights * x["target_mask"].repeat_interleave(PASSAGES, 0)[:, :, None]
    (main.sum() if "loss" in outputs else (main * weights).sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if case.model == "RagTokenForGeneration":
        outputs.update(greedy=_answers(model, x, outputs, 1), beam=_answers(model, x, outputs, 4))
    if case.model.endswith("ForCausalLM") or "T5" in case.model:
        outputs.update(greedy=_continued(model, x, 1), beam=_continued(model, x, 4))
    return {**{f"inputs/{k}": v for k, v in inputs.items()},
            **{f"outputs/{k}": v.detach().numpy() for k, v in outputs.items()},
            **{f"gradients/{k}": v.numpy() for k, v in gradients.items()}}
