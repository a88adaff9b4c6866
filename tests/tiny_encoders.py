"""Tiny random encoders as Hugging Face directories: without a head, and with one that scores."""

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


def _save(model: Any, path: Path, pair: str = BERT_PAIR) -> Path:
    """Save a model with random weights, and a tokenizer with the marks of BERT."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        is_gain = "norm.weight" in name.lower()
        weight.data = torch.randn_like(weight) * 0.1 + float(is_gain)
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


ENCODERS: dict[str, Callable[[Path], Path]] = {
    "bert": tiny_bert,
    "distilbert": tiny_distilbert,
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


CLASSIFIERS: dict[str, Callable[[Path], Path]] = {
    "bert": _bert_ranker,
    "distilbert": _distilbert_classifier,
    "roberta": _roberta_classifier,
    "xlm-roberta": _xlm_roberta_ranker,
}
