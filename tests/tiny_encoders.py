"""Tiny random encoders as Hugging Face directories: without a head, and with one that scores."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from tests.tiny_models import SENTENCES, VOCAB_SIZE

CONTEXT_LENGTH = 96
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Of pairs: the second text is of the second type, or every token of the only one.
BERT_PAIR, ROBERTA_PAIR = "[CLS] $A [SEP] $B:1 [SEP]:1", "[CLS] $A [SEP] [SEP] $B [SEP]"


def _save(model: Any, path: Path, pair: str = BERT_PAIR, mean_gain: float = 1.0) -> Path:
    """Save a model with random weights, and a tokenizer with the marks of BERT.

    `mean_gain` is the mean of norms' weights: 0 if the model adds 1 to them.
    """
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        is_gain = "norm.weight" in name.lower()
        deviation = 1.0 if "attention_bias" in name else 0.1
        weight.data = torch.randn_like(weight) * deviation + mean_gain * is_gain
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def tiny_bert(path: Path, **options: Any) -> Path:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 3, "intermediate_size": 80,
        "max_position_embeddings": CONTEXT_LENGTH,
    }  # fmt: skip
    return _save(BertModel(BertConfig(**fields | options)), path)


def tiny_roberta(path: Path, **options: Any) -> Path:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 3, "intermediate_size": 80, "type_vocab_size": 1,
        "max_position_embeddings": CONTEXT_LENGTH + 2, "pad_token_id": 1,
    }  # fmt: skip
    return _save(RobertaModel(RobertaConfig(**fields | options)), path)


def tiny_xlm_roberta(path: Path) -> Path:
    config = XLMRobertaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=80, type_vocab_size=1, max_position_embeddings=CONTEXT_LENGTH + 2,
    )  # fmt: skip
    return _save(XLMRobertaModel(config), path)


def tiny_distilbert(path: Path) -> Path:
    config = DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=48, n_layers=2, n_heads=3, hidden_dim=80,
        max_position_embeddings=CONTEXT_LENGTH,
    )  # fmt: skip
    return _save(DistilBertModel(config), path)


def tiny_nomic_bert(path: Path) -> Path:
    config = NomicBertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=80, max_position_embeddings=CONTEXT_LENGTH,
    )  # fmt: skip
    return _save(NomicBertModel(config), path)


def _mpnet_config(**options: Any) -> MPNetConfig:
    """Return the odd fields of sentence-transformers/all-mpnet-base-v2's config.json."""
    return MPNetConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=80, max_position_embeddings=CONTEXT_LENGTH + 2, layer_norm_eps=1e-5,
        relative_attention_num_buckets=32, **options,
    )  # fmt: skip


def tiny_mpnet(path: Path) -> Path:
    return _save(MPNetModel(_mpnet_config()), path, ROBERTA_PAIR)


MODERNBERT_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 3,
    "intermediate_size": 72, "max_position_embeddings": CONTEXT_LENGTH, "pad_token_id": 0,
    "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3,
    "local_attention": 20, "attention_bias": False, "mlp_bias": False, "norm_bias": False,
    "norm_eps": 1e-5, "hidden_activation": "gelu", "decoder_bias": True,
    "classifier_activation": "gelu", "classifier_bias": False, "classifier_pooling": "mean",
}  # fmt: skip
# As in answerdotai/ModernBERT-base and Alibaba-NLP/gte-reranker-modernbert-base.
MODERNBERT_FIRST_NAMES = {
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
    "position_embedding_type": "absolute", "layer_norm_eps": 1e-5, "gradient_checkpointing": False,
    "sparse_prediction": False, "sparse_pred_ignore_index": -100, "reference_compile": False,
    "repad_logits_with_grad": False, "deterministic_flash_attn": False,
}  # fmt: skip


def _as_first_published(path: Path) -> Path:
    """Give the config.json of a ModernBERT the names of the first published one."""
    config = json.loads((path / "config.json").read_text())
    for name in ("layer_types", "rope_parameters"):
        config.pop(name)
    (path / "config.json").write_text(json.dumps(config | MODERNBERT_FIRST_NAMES))
    return path


def tiny_modernbert(path: Path, **options: Any) -> Path:
    model = ModernBertModel(ModernBertConfig(**MODERNBERT_FIELDS | options))
    return _as_first_published(_save(model, path))


def tiny_embedding_gemma(path: Path, **options: Any) -> Path:
    """Save a model with the fields of google/embeddinggemma-300m's config.json."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20,
        "intermediate_size": 72, "max_position_embeddings": CONTEXT_LENGTH, "sliding_window": 16,
        "query_pre_attn_scalar": 24, "use_bidirectional_attention": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention",
                        "sliding_attention"],
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    return _save(Gemma3TextModel(Gemma3TextConfig(**fields | options)), path, mean_gain=0.0)


ENCODERS: dict[str, Callable[[Path], Path]] = {
    "bert": tiny_bert,
    "distilbert": tiny_distilbert,
    "gemma3_text": tiny_embedding_gemma,
    "modernbert": tiny_modernbert,
    "mpnet": tiny_mpnet,
    "nomic_bert": tiny_nomic_bert,
    "roberta": tiny_roberta,
    "xlm-roberta": tiny_xlm_roberta,
}


def _bert_ranker(path: Path) -> Path:
    """Save a model with the fields of cross-encoder/ms-marco-MiniLM-L6-v2's config.json."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 3, "intermediate_size": 80,
        "max_position_embeddings": CONTEXT_LENGTH, "num_labels": 1,
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
    }  # fmt: skip
    return _save(BertForSequenceClassification(BertConfig(**fields)), path)


def _xlm_roberta_ranker(path: Path) -> Path:
    """Save a model with the fields of BAAI/bge-reranker-v2-m3's config.json."""
    config = XLMRobertaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=80, type_vocab_size=1, max_position_embeddings=CONTEXT_LENGTH + 2,
        id2label={0: "LABEL_0"}, label2id={"LABEL_0": 0},
    )  # fmt: skip
    return _save(XLMRobertaForSequenceClassification(config), path, ROBERTA_PAIR)


def _roberta_classifier(path: Path) -> Path:
    """Save a model with the labels of cardiffnlp/twitter-roberta-base-sentiment-latest."""
    labels = {0: "negative", 1: "neutral", 2: "positive"}
    config = RobertaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=80, type_vocab_size=1, max_position_embeddings=CONTEXT_LENGTH + 2,
        pad_token_id=1, id2label=labels, label2id={name: number for number, name in labels.items()},
    )  # fmt: skip
    return _save(RobertaForSequenceClassification(config), path, ROBERTA_PAIR)


def _distilbert_classifier(path: Path) -> Path:
    """Save a model with the labels of distilbert-base-uncased-finetuned-sst-2-english."""
    config = DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=48, n_layers=2, n_heads=3, hidden_dim=80,
        max_position_embeddings=CONTEXT_LENGTH, id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
    )  # fmt: skip
    return _save(DistilBertForSequenceClassification(config), path)


def _modernbert_ranker(path: Path) -> Path:
    config = ModernBertConfig(**MODERNBERT_FIELDS, id2label={0: "LABEL_0"}, label2id={"LABEL_0": 0})
    return _as_first_published(_save(ModernBertForSequenceClassification(config), path))


def _mpnet_classifier(path: Path) -> Path:
    config = _mpnet_config(id2label={0: "no", 1: "maybe", 2: "yes"})
    return _save(MPNetForSequenceClassification(config), path, ROBERTA_PAIR)


CLASSIFIERS: dict[str, Callable[[Path], Path]] = {
    "bert": _bert_ranker,
    "distilbert": _distilbert_classifier,
    "modernbert": _modernbert_ranker,
    "mpnet": _mpnet_classifier,
    "roberta": _roberta_classifier,
    "xlm-roberta": _xlm_roberta_ranker,
}
