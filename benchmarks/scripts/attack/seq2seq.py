# -*- coding: utf-8 -*-
"""
Translation with a recurrent encoder-decoder and attention. Toy languages: the target is the source,
word by word through a dictionary, with pairs of words swapped.
"""
import argparse
import io
import math
import os
import random
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim

SOS_token, EOS_token, PAD_token, UNK_token = 0, 1, 2, 3
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Lang:
    def __init__(self, name):
        self.name = name
        self.word2index = {}
        self.index2word = {SOS_token: "SOS", EOS_token: "EOS", PAD_token: "PAD", UNK_token: "UNK"}

    def add_sentence(self, sentence):
        for word in sentence.split(' '):
            if word not in self.word2index:
                n = len(self.index2word)
                self.word2index[word] = n
                self.index2word[n] = word

    def encode(self, sentence):
        return [self.word2index.get(w, UNK_token) for w in sentence.split(' ')] + [EOS_token]

    def __len__(self):
        return len(self.index2word)


def prepare(root, count=1500):
    path = os.path.join(root, 'pairs.txt')
    if not os.path.exists(path):
        os.makedirs(root, exist_ok=True)
        rng = random.Random(3)
        syllables = ['ka', 'to', 'mi', 'ru', 'se', 'no', 'li', 'pa', 'du', 'go']
        words = [''.join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(400)]
        meaning = {w: ''.join(rng.choices(syllables, k=rng.randint(1, 4))) for w in words}
        with io.open(path, 'w', encoding='utf-8') as f:
            for _ in range(count):
                src = [rng.choice(words) for _ in range(rng.randint(3, 28))]
                tgt = [meaning[w] for w in src]
                for i in range(0, len(tgt) - 1, 2):
                    tgt[i], tgt[i + 1] = tgt[i + 1], tgt[i]
                f.write(' '.join(src) + '\t' + ' '.join(tgt) + '\n')
    lines = io.open(path, encoding='utf-8').read().strip().split('\n')
    pairs = [line.split('\t') for line in lines]
    a, b = Lang('src'), Lang('tgt')
    for s, t in pairs:
        a.add_sentence(s)
        b.add_sentence(t)
    return a, b, pairs


def pad(seqs):
    out = torch.full((len(seqs), max(map(len, seqs))), PAD_token, dtype=torch.long)
    for i, s in enumerate(seqs):
        out[i, :len(s)] = torch.tensor(s)
    return out


class EncoderRNN(nn.Module):
    def __init__(self, vocab, hidden, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden, padding_idx=PAD_token)
        self.gru = nn.GRU(hidden, hidden, num_layers=2, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.gru(self.dropout(self.embedding(x)))


class BahdanauAttention(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 1)

    def forward(self, query, keys, mask):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2)
        scores.data.masked_fill_(mask, -1e9)
        weights = F.softmax(scores, dim=-1).unsqueeze(1)
        return torch.bmm(weights, keys), weights


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden, vocab, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.attention = BahdanauAttention(hidden)
        self.gru = nn.GRU(2 * hidden, hidden, num_layers=2, batch_first=True, dropout=dropout)
        self.out = nn.Linear(hidden, vocab)
        self.dropout = nn.Dropout(dropout)

    def step(self, token, hidden, keys, mask):
        query = hidden[-1].unsqueeze(1)
        context, weights = self.attention(query, keys, mask)
        output, hidden = self.gru(torch.cat((self.dropout(self.embedding(token)), context), dim=2), hidden)
        return self.out(output), hidden, weights

    def forward(self, keys, hidden, mask, target=None, teacher_forcing_ratio=0.5, max_length=32, sample=False):
        batch = keys.size(0)
        token = torch.full((batch, 1), SOS_token, dtype=torch.long, device=keys.device)
        finished = torch.zeros(batch, dtype=torch.bool, device=keys.device)
        outputs = []
        for i in range(max_length if target is None else target.size(1)):
            logits, hidden, _ = self.step(token, hidden, keys, mask)
            outputs.append(logits)
            if target is not None and random.random() < teacher_forcing_ratio:
                token = target[:, i].unsqueeze(1)
            elif sample:
                token = torch.multinomial(logits.squeeze(1).softmax(-1), 1)
            else:
                token = logits.argmax(-1).detach()
            if target is None:
                finished |= token.squeeze(1) == EOS_token
                if finished.all():
                    break
        return torch.cat(outputs, dim=1)


def as_minutes(s):
    return '%dm %ds' % (s // 60, s % 60)


def train_epoch(pairs, encoder, decoder, opts, criterion, args, langs):
    random.shuffle(pairs)
    total, n = 0., 0
    start = time.time()
    for i in range(0, len(pairs), args.batch_size):
        if n == args.iters_per_epoch:
            break
        chunk = pairs[i:i + args.batch_size]
        src = pad([langs[0].encode(s) for s, _ in chunk]).to(device)
        tgt = pad([langs[1].encode(t) for _, t in chunk]).to(device)
        for opt in opts:
            opt.zero_grad()
        keys, hidden = encoder(src)
        logits = decoder(keys, hidden, src == PAD_token, tgt, args.teacher_forcing)
        loss = criterion(logits.flatten(0, 1), tgt.flatten())
        loss.backward()
        for opt in opts:
            nn.utils.clip_grad_norm_(opt.param_groups[0]['params'], 1.0)
            opt.step()
        total += loss.item()
        n += 1
        if n % args.print_every == 0:
            print('%s (%d) lengths %d/%d loss %.4f ppl %.1f' % (
                as_minutes(time.time() - start), n, src.size(1), tgt.size(1), total / n, math.exp(total / n)))
    return total / n


def translate(encoder, decoder, sentence, langs, sample=False):
    with torch.no_grad():
        src = torch.tensor([langs[0].encode(sentence)], device=device)
        keys, hidden = encoder(src)
        logits = decoder(keys, hidden, src == PAD_token, sample=sample)
        words = []
        for idx in logits.argmax(-1).squeeze(0):
            if idx.item() == EOS_token:
                break
            words.append(langs[1].index2word[idx.item()])
        return words


def main():
    p = argparse.ArgumentParser()
    p.add_argument('--data', default='data/pairs_rnn')
    p.add_argument('--save', default='out/seq2seq')
    p.add_argument('--hidden_size', type=int, default=192)
    p.add_argument('--batch_size', type=int, default=32)
    p.add_argument('--epochs', type=int, default=2)
    p.add_argument('--iters_per_epoch', type=int, default=8)
    p.add_argument('--print_every', type=int, default=4)
    p.add_argument('--teacher_forcing', type=float, default=0.5)
    p.add_argument('--lr', type=float, default=1e-3)
    args = p.parse_args()

    random.seed(0)
    torch.manual_seed(0)
    src_lang, tgt_lang, pairs = prepare(args.data)
    langs = (src_lang, tgt_lang)
    held_out, pairs = pairs[:50], pairs[50:]
    encoder = EncoderRNN(len(src_lang), args.hidden_size).to(device)
    decoder = AttnDecoderRNN(args.hidden_size, len(tgt_lang)).to(device)
    opts = [optim.Adam(m.parameters(), lr=args.lr) for m in (encoder, decoder)]
    criterion = nn.CrossEntropyLoss(ignore_index=PAD_token)
    os.makedirs(args.save, exist_ok=True)
    for epoch in range(args.epochs):
        encoder.train(), decoder.train()
        train_epoch(pairs, encoder, decoder, opts, criterion, args, langs)
        encoder.eval(), decoder.eval()
        for sentence, wanted in random.sample(held_out, 3):
            print('>', sentence)
            print('=', wanted)
            print('<', ' '.join(translate(encoder, decoder, sentence, langs, sample=epoch % 2 == 1)))
        torch.save((encoder.state_dict(), decoder.state_dict()), os.path.join(args.save, 'epoch%d.pt' % epoch))


if __name__ == '__main__':
    main()
