"""The chooser of sampling: translations drawn piece by piece.

The model's distribution over the pieces that may follow changes in this order. The logits are divided by the temperature. Only
the `top_k` most probable pieces stay. Of these, only the fewest most probable ones stay that have the share `top_p` (nucleus
sampling, Holtzman et al., 2020). Of equal pieces, the lowest ids stay.

Sample number n of a line depends on (seed, example id, n) alone: not on other lines, their order, the padding, or the number of
samples. Its log-probability is the model's own, as in beam search. It does not depend on temperature, `top_k` or `top_p`.

Shapes: B sentences, R live samples, V vocabulary, F pieces that stay, T pieces so far.
The noise of a draw is a function of keys, so a draw depends on nothing else. The largest of `log p + noise` over the pieces is a
draw from p (Gumbel, 1954). Unlike a walk along the cumulative probabilities, the draw hardly ever changes with the last digits of
p.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.layers.core import mix
from treenet.translation.hypotheses import Hypothesis, Lengths, TakesAllAtOnce, best_pieces
from treeproc.shards.rows import hash_ids
from treeproc.shards.schema import BOS_ID, EOS_ID

_LOWEST, _HIGHEST = 2.0**-32, 1 - 2.0**-24  # of uniform numbers in float32


def draw_keys(seed: int, examples: Sequence[int] | np.ndarray, numbers: Sequence[int] | np.ndarray, step: int) -> Tensor:
    """Return keys [R, 2] int32, by the seed, the id of the example, the number of the sample, and the number of pieces so far."""
    keys = hash_ids(np.array([seed]))
    for part in (examples, numbers, [step]):
        keys = hash_ids(keys ^ hash_ids(np.asarray(part)))
    return torch.from_numpy(np.ascontiguousarray(keys).view(np.int32).reshape(-1, 2))


def gumbel_noise(keys: Tensor, pieces: Tensor) -> Tensor:
    """Return noise [R, V] float32 for `pieces` [V] or [R, V] by keys [R, 2]."""
    bits = mix(mix(mix(pieces.int()) ^ keys[:, :1]) ^ keys[:, 1:])
    # 31 bits, so that small numbers keep their digits.
    uniform = ((bits & 0x7FFFFFFF).float() * 2.0**-31 + _LOWEST).clamp_(max=_HIGHEST)
    return -(-torch.log1p(-uniform)).log()


_NUCLEUS_WIDTHS = (64, 1024)  # pieces that are sorted before all are


class Samples(TakesAllAtOnce):
    """Samples with these `numbers` of each of `examples` [B]. Before the first step, those of a sentence are one hypothesis."""

    def __init__(self, lengths: Lengths, decoding: DecodingConfig, examples: Tensor, numbers: Sequence[int]):
        count, device = len(examples), lengths.most.device
        self.step = 0
        self.tokens = torch.full((count,), BOS_ID, device=device)
        self.pieces = torch.zeros(count, 0, dtype=torch.long, device=device)  # [R, T]
        self.sentences = torch.arange(count, device=device)
        self._decoding, self._penalties = decoding, lengths.penalties.tolist()
        self._per_sentence = len(numbers)
        self._examples = examples.repeat_interleave(len(numbers)).cpu()
        self._numbers = torch.tensor([*numbers] * count)
        self._live = torch.arange(count * len(numbers), device=device)  # [R] samples that have not ended, by sentence
        self._log_prob = torch.zeros(len(self._live), dtype=torch.float64, device=device)
        self._ended: dict[int, Hypothesis] = {}

    def choose(self, proposals: Sequence[Tensor]) -> Tensor:
        """Draw the next piece of each sample by the log-probabilities of the only part.

        Returns the rows in [R] of those that go on. One that cannot end is left out.
        """
        [log_probs] = proposals
        rows = torch.arange(len(self._live), device=log_probs.device)
        if self.step == 0:
            rows = rows // self._per_sentence
            log_probs, self.pieces = log_probs[rows], self.pieces[rows]
        places, seed = self._live.cpu(), self._decoding.seed
        keys = draw_keys(seed, self._examples[places].numpy(), self._numbers[places].numpy(), self.step)
        chosen = choose_pieces(log_probs, keys.to(log_probs.device), self._decoding)
        log_prob = self._log_prob + log_probs.gather(1, chosen[:, None])[:, 0]

        going, ends = (log_prob.isfinite() & end for end in (chosen != EOS_ID, chosen == EOS_ID))
        ended = zip(self._live[ends].tolist(), log_prob[ends].tolist(), self.pieces[ends].tolist(), strict=True)
        for sample, total, ids in ended:
            self._ended[sample] = Hypothesis(tuple(ids), total / self._penalties[self.step], total)
        self._live, self._log_prob, self.tokens = self._live[going], log_prob[going], chosen[going]
        self.pieces = torch.cat([self.pieces[going], self.tokens[:, None]], dim=1)
        self.sentences = self._live // self._per_sentence
        self.step += 1
        return rows[going]

    def has_ended(self, num_steps: int) -> bool:
        """Return whether all samples have ended."""
        return not len(self._live)

    def found(self) -> list[list[Hypothesis]]:
        """Return the samples of every sentence, in the order of their numbers."""
        count, numbers = self._per_sentence, range(0, len(self._examples), self._per_sentence)
        return [[self._ended[one] for one in range(first, first + count) if one in self._ended] for first in numbers]


def choose_pieces(log_probs: Tensor, keys: Tensor, decoding: DecodingConfig) -> Tensor:
    """Draw one piece [R] for each row of log-probabilities [R, V], with keys [R, 2] of its noise."""
    scaled, pieces = log_probs / decoding.temperature, torch.arange(log_probs.shape[1], device=log_probs.device)
    if decoding.top_k or decoding.top_p < 1:
        scaled, pieces = _nucleus(scaled, decoding.top_k or log_probs.shape[1], decoding.top_p)
    place = (scaled + gumbel_noise(keys, pieces)).argmax(1)
    return place if pieces.ndim == 1 else pieces.gather(1, place[:, None])[:, 0]


def _nucleus(scaled: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return log-weights and pieces, both [R, F], best first, that `top_k` and then `top_p` leave; -inf for others."""
    most = min(top_k, scaled.shape[1])
    if top_p == 1:
        return best_pieces(scaled, most)
    if most == scaled.shape[1]:
        log_mass = scaled.double().logsumexp(1, keepdim=True)
    else:
        log_mass = best_pieces(scaled, most)[0].double().logsumexp(1, keepdim=True)
    for width in (*(width for width in _NUCLEUS_WIDTHS if width < most), most):
        values, pieces = best_pieces(scaled, width)
        share = (values.double() - log_mass).exp()
        before = share.cumsum(1) - share
        if width == most or bool((before[:, -1] + share[:, -1] >= top_p).all()):
            break
    return values.masked_fill(before >= top_p, -torch.inf), pieces
