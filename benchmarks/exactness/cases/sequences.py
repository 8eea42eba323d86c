"""Recurrent nets, transformers, embeddings and experts."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import (
    NUM_TOKENS,
    Modules,
    cross_entropy,
    labelled,
    make_job,
    padded_tokens,
    tokens,
)
from memfit import Total

theme = Theme("blind")


def series(size):
    return torch.randn(size, 5, 12), labelled(size)[1]


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(12, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


@theme.case()
def lstm():
    """An LSTM classifier of whole sequences."""
    return make_job(lambda: Recurrent(nn.LSTM), series, cross_entropy, 8)


@theme.case()
def gru():
    """A GRU classifier of whole sequences."""
    return make_job(lambda: Recurrent(nn.GRU), series, cross_entropy, 8)


@theme.case()
def packed_lstm():
    """Padded sequences are packed before the LSTM."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(NUM_TOKENS, 6, padding_idx=0)
            self.rnn, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, ids, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            _, (hidden, _) = self.rnn(packed)
            return self.head(hidden[-1])

    def loss(model, batch):
        ids, lengths = batch
        return F.cross_entropy(model(ids, lengths), ids[:, 0] % 4)

    return make_job(Packed, padded_tokens, loss, 8)


class PaddedEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, ids):
        pad = ids == 0
        z = self.encoder(self.embed(ids), src_key_padding_mask=pad)
        z = z.masked_fill(pad.unsqueeze(-1), 0.0)
        return self.head(z.sum(1) / (~pad).sum(1, keepdim=True))


@theme.loss(PaddedEncoder, padded_tokens, 8, blocks="encoder.layers")
def transformer_encoder_with_padding(model, batch):
    """Attention with each sample's own padding mask, mean pooling over its real tokens."""
    return F.cross_entropy(model(batch[0]), batch[1] % 4)


class Decoder(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.position = nn.Embedding(NUM_TOKENS, 8), nn.Embedding(7, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(8, NUM_TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        length = ids.shape[1]
        causal = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        x = self.embed(ids) + self.position(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=causal)
        return self.head(x)


def next_token(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.reshape(-1, NUM_TOKENS), ids[:, 1:].reshape(-1))


@theme.case(blocks="layers")
def causal_language_model():
    """A decoder with tied embeddings; all sequences are of one length."""
    return make_job(Decoder, tokens, next_token, 8)


@theme.case(blocks="layers", draws="per-sample")
def causal_language_model_with_dropout():
    """The same with dropout in attention and in the perceptrons."""
    return make_job(lambda: Decoder(0.1), tokens, next_token, 8)


@theme.loss(Decoder, padded_tokens, 8, blocks="layers", adds="no")
def causal_language_model_ignoring_padding(model, ids, _):
    """The next-token mean over the batch's real tokens, as most trainers have it."""
    logits = model(ids[:, :-1]).transpose(1, 2)
    return F.cross_entropy(logits, ids[:, 1:], ignore_index=0)


@theme.loss(Decoder, padded_tokens, 8, blocks="layers")
def causal_language_model_as_a_total(model, ids, _):
    """The same sum over real tokens, with their number."""
    logits = model(ids[:, :-1]).transpose(1, 2)
    total = F.cross_entropy(logits, ids[:, 1:], ignore_index=0, reduction="sum")
    return Total(total, (ids[:, 1:] != 0).sum())


@theme.case()
def embedding_with_padding_index():
    """``padding_idx`` and a sum over tokens."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(NUM_TOKENS, 8, padding_idx=0), nn.Linear(8, 4)

        def forward(self, ids):
            return self.head(self.embed(ids).sum(1))

    return make_job(Bag, padded_tokens, lambda m, b: F.cross_entropy(m(b[0]), b[1] % 4))


class EmbeddingBagModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(NUM_TOKENS, 8, mode="mean"), nn.Linear(8, 4)

    def forward(self, ids, offsets=None):
        return self.head(self.bag(ids, offsets))


@theme.loss(EmbeddingBagModel, tokens)
def embedding_bag(model, ids):
    """EmbeddingBag with as many tokens in each bag."""
    return F.cross_entropy(model(ids), ids[:, 0] % 4)


def bags_with_offsets(size):
    return torch.randint(0, NUM_TOKENS, (3 * size,)), 3 * torch.arange(size), labelled(size)[1]


@theme.loss(EmbeddingBagModel, bags_with_offsets, adds="no")
def embedding_bag_with_offsets(model, ids, offsets, y):
    """EmbeddingBag over one long list of tokens; offsets count from the batch's start."""
    return F.cross_entropy(model(ids, offsets), y)


class Experts(nn.Module):
    def __init__(self, capacity=None, balance=0.0):
        super().__init__()
        self.embed, self.gate = nn.Embedding(NUM_TOKENS, 8), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, NUM_TOKENS)
        self.capacity, self.balance = capacity, balance

    def forward(self, ids):
        x = self.embed(ids)
        probabilities = self.gate(x).softmax(-1)
        top, index = probabilities.topk(2, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        chosen = torch.zeros_like(probabilities).scatter(-1, index, top)
        if self.capacity is not None:
            taken = (chosen > 0).flatten(0, 1).cumsum(0).view_as(chosen)
            chosen = chosen * (taken <= self.capacity * ids.numel() / 4)
        out = sum(chosen[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        used = F.one_hot(index[..., 0], 4).to(x.dtype).mean((0, 1))
        auxiliary = 4 * (used * probabilities.mean((0, 1))).sum()
        return self.head(torch.tanh(out) + x), auxiliary


def expert_loss(model, ids):
    logits, auxiliary = model(ids)
    value = F.cross_entropy(logits.reshape(-1, NUM_TOKENS), ids.roll(-1, 1).reshape(-1))
    return value + model.balance * auxiliary if model.balance else value


@theme.case()
def experts_by_topk_per_token():
    """Mixture of experts: each token goes to its two best experts."""
    return make_job(Experts, tokens, expert_loss)


@theme.case(adds="no")
def experts_with_a_capacity():
    """Mixture of experts: an expert takes so many tokens of the batch, then no more."""
    return make_job(lambda: Experts(capacity=1.2), tokens, expert_loss)


@theme.case(adds="no")
def experts_with_a_balance_term():
    """Mixture of experts with Switch's load balancing over the batch, times one thousandth."""
    return make_job(lambda: Experts(balance=1e-3), tokens, expert_loss)


def _gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=NUM_TOKENS, n_positions=8, n_embd=8, n_layer=2, n_head=2, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


@theme.case(blocks="transformer.h")
def gpt2_with_labels():
    """Transformers' GPT-2 computes its own loss, from labels without -100."""
    return make_job(_gpt2, tokens, lambda m, ids: m(input_ids=ids, labels=ids).loss, 8)


@theme.loss(_gpt2, padded_tokens, 8, blocks="transformer.h", adds="no")
def gpt2_with_ignored_labels(model, ids, _):
    """The same with padding labelled -100."""
    labels = ids.masked_fill(ids == 0, -100)
    return model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss


def bert():
    config = transformers.BertConfig(
        vocab_size=NUM_TOKENS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, num_labels=4,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).train()


@theme.loss(bert, padded_tokens, 8, draws="per-sample", effects=True, blocks="bert.encoder.layer")
def bert_for_classification(model, ids, lengths):
    """Transformers' BERT with its dropout; the first forward notes the kind of problem."""
    mask = (ids != 0).long()
    return model(input_ids=ids, attention_mask=mask, labels=lengths % 4).loss


@theme.case(effects=True)
def vit_for_classification():
    """Transformers' ViT."""

    def model():
        config = transformers.ViTConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            image_size=8, patch_size=4, num_labels=4, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)

    def batch(size):
        return torch.randn(size, 3, 8, 8), labelled(size)[1]

    def loss(model, batch):
        return model(pixel_values=batch[0], labels=batch[1]).loss

    return make_job(model, batch, loss, 8)


def t5():
    config = transformers.T5Config(
        vocab_size=NUM_TOKENS, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_decoder_layers=1,
        num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@theme.loss(t5, padded_tokens, 8, adds="no")
def t5_with_ignored_labels(model, ids, _):
    """Transformers' T5 with labels of differing length."""
    labels = ids.masked_fill(ids == 0, -100)
    return model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss


def student_and_teacher():
    student = nn.Linear(12, 4)
    teacher = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    return Modules(student=student, teacher=teacher.requires_grad_(False).eval())


@theme.loss(student_and_teacher, labelled)
def distillation_with_a_frozen_teacher(model, x, y):
    """A frozen teacher in evaluation; KL divergence with ``batchmean``."""
    student = model.student(x)
    with torch.no_grad():
        teacher = model.teacher(x)
    soft = F.kl_div((student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")
    return 0.5 * F.cross_entropy(student, y) + 0.5 * 4 * soft
