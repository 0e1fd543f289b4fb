"""Phrases that a translation must contain: vectorised dynamic beam allocation (Post and Vilar, 2018; Hu et al., 2019).

A phrase is a sequence of pieces. It is met if the hypothesis contains it in one place. The bank of a hypothesis is the number
of pieces of its met phrases, and of the longest beginning of another phrase that it ends with. The places of a beam go to the
banks in turn, the highest bank first. Every hypothesis also proposes the pieces that lead on to phrases, however improbable. So
the highest bank rises with every piece, until all phrases are met. Only then may a hypothesis end.

Shapes: B sentences, C hypotheses of a sentence, R decoded hypotheses, F proposals of a hypothesis, N extensions of a sentence.
P phrases, L pieces of the longest phrase, T pieces so far.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from treeproc.shards.schema import EOS_ID

_NO_PIECE = -1

Phrases = Sequence[Sequence[int]]


class RequiredPhrases:
    """The phrases of a batch of sentences, and which of them each of `beam_width` hypotheses of a sentence has met."""

    on_device = False

    def __init__(self, phrases: Sequence[Phrases], device: torch.device, beam_width: int):
        most = max(len(own) for own in phrases)
        longest = max(len(phrase) for own in phrases for phrase in own)
        pieces = torch.full((len(phrases), most, longest), _NO_PIECE)
        for sentence, own in enumerate(phrases):
            for number, phrase in enumerate(own):
                pieces[sentence, number, : len(phrase)] = torch.tensor(phrase)
        self._pieces = pieces.to(device)  # [B, P, L]
        self._lengths = (self._pieces != _NO_PIECE).sum(2)  # [B, P], 0 where there is no phrase
        self._met = (self._lengths[:, None] == 0).expand(-1, beam_width, -1)  # [B, C, P]

    def apply(self, log_probs: Tensor, hypotheses: Any) -> None:
        """Forbid the end of hypotheses that lack a phrase."""
        log_probs[:, EOS_ID].masked_fill_(hypotheses.decoded(~self._met.all(2)), -torch.inf)

    def propose(
        self, log_probs: Tensor, values: Tensor, chosen: Tensor, grid: Tensor, decoded: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Add the next piece of each phrase to the proposals `chosen` [R, F] of probabilities `values`.

        `grid` [B, C, T] has the pieces so far, and `decoded` takes the decoded rows [R, ...] of a grid [B, C, ...]. Returns both
        as [R, F + P]. The value of a piece that was proposed already is -inf.
        """
        progress = self._matches(grid).int().mul(self._steps()).amax(3).long()  # [B, C, P]
        following = self._pieces[:, None].expand(-1, progress.shape[1], -1, -1).gather(3, progress[..., None])[..., 0]
        following = decoded(following.masked_fill(self._met, _NO_PIECE))  # [R, P]
        again = (following[:, :, None] == chosen[:, None, :]).any(2)
        again |= (following[:, :, None] == following[:, None, :]).tril(-1).any(2)
        found = log_probs.gather(1, following.clamp(min=0)).masked_fill(again | (following == _NO_PIECE), -torch.inf)
        return torch.cat([values, found], dim=1), torch.cat([chosen, following.clamp(min=0)], dim=1)

    def allocate(self, best: Tensor, chosen: Tensor, origin: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Order extensions [B, N], best first, by their rank within their bank, and then by bank, the highest first."""
        met, progress = self._extend(chosen, origin, grid)
        # An end has no progress, but all phrases.
        bank = (met * self._lengths[:, None]).sum(2) + progress.masked_fill(met, 0).amax(2)  # [B, N]
        bank = bank.masked_fill(best.isneginf(), -1)  # dead ones share a bank
        banks, by_bank = bank.sort(dim=1, descending=True, stable=True)
        place = torch.arange(bank.shape[1], device=bank.device).expand_as(bank)
        first = torch.cat([torch.ones_like(banks[:, :1], dtype=torch.bool), banks[:, 1:] != banks[:, :-1]], dim=1)
        rank = (place - place.masked_fill(~first, 0).cummax(1).values).masked_fill(banks < 0, bank.shape[1])
        order = by_bank.gather(1, rank.sort(dim=1, stable=True).indices)
        return best.gather(1, order), chosen.gather(1, order), origin.gather(1, order)

    def follow(self, chosen: Tensor, origin: Tensor, grid: Tensor) -> None:
        """Go on to hypotheses that extend those at `origin` [B, C'] of the grid by `chosen`."""
        self._met, _ = self._extend(chosen, origin, grid)

    def _extend(self, chosen: Tensor, origin: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether extensions [B, N] have met each phrase, and how much of it they end with: both [B, N, P]."""
        place = origin[:, :, None].expand(-1, -1, self._met.shape[2])
        progress = torch.zeros_like(place)
        for count, before in enumerate(self._matches(grid).unbind(3)):  # all at once would take L times the memory
            longer = before.gather(1, place) & (self._pieces[:, None, :, count] == chosen[:, :, None])
            progress = progress.masked_fill(longer, count + 1)
        return self._met.gather(1, place) | (progress == self._lengths[:, None]), progress

    def _matches(self, grid: Tensor) -> Tensor:
        """Return [B, C, P, L]: whether hypotheses end with the first 0, 1, ... L - 1 pieces of phrases."""
        out = []
        for count in range(self._pieces.shape[2]):
            if count > grid.shape[2]:
                out.append(torch.zeros_like(out[0]))
                continue
            ending = grid[:, :, None, grid.shape[2] - count :]
            out.append((ending == self._pieces[:, None, :, :count]).all(3) & (count < self._lengths)[:, None])
        return torch.stack(out, dim=3)

    def _steps(self) -> Tensor:
        return torch.arange(self._pieces.shape[2], dtype=torch.int32, device=self._pieces.device)
