"""A pretrained encoder of the package transformers, as the inputs of a model's leaves.

It reads a line with the tokenizer's own pieces around it, [CLS] and [SEP] of BERT. Its settings and the numbers of these pieces
are facts of a run, so a run needs the folder of the encoder only when it begins. A text with more pieces than the encoder has
positions is read in windows.

Shapes: B batch, L leaves, W = L + the pieces around a text, H width of the pretrained states, D model. Of long texts: N windows.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from treenet.data.batch import TreeBatch
from treenet.layers.core import Dropout, build_linear, mix
from treenet.models.pretrained_folder import CHOOSE, OF_THE_FILE, weight_files
from treeproc.common.errors import UserError, first_line, one_line, require
from treeproc.shards.schema import FIRST_PIECE, PAD_ID, UNK_ID

ENCODER = "encoder.embedding.pretrained."  # begins the names of its parameters in a model
# Settings of config.json that change no state.
_OF_NO_STATE = (*OF_THE_FILE, "architectures", "dtype", "torch_dtype")
_OF_CODE = ("model_type", "auto_map", "attn_implementation", "experts_implementation")
_TRIED = 512  # pieces of the longest text that a new encoder reads to try it
_TOLERANCE = 1e-4  # of states that should be equal, relative to the greatest
_FLOATING = ("F64", "F32", "F16", "BF16")  # types that safetensors names, of weights without a scale


class PretrainedLeaves(nn.Module):
    """The states of a pretrained encoder at the leaves, instead of a table of pieces; mapped to D if its width is another.

    If no parameter of the encoder is trained, it runs without dropout and without gradients.
    """

    has_order = True
    numbers: Tensor  # [V] of the tokenizer
    before: Tensor
    after: Tensor

    def __init__(self, facts: Mapping, d_model: int):
        super().__init__()
        self.pretrained = _build_encoder(facts["config"])
        self.width: int = self.pretrained.config.hidden_size
        self.project = None if self.width == d_model else build_linear(self.width, d_model)
        self.scale = d_model**0.5
        tokenizer = facts["tokenizer"]
        pad = self.pretrained.config.pad_token_id
        self._pad: int = 0 if pad is None else pad
        unknown = self._pad if tokenizer["unknown"] is None else tokenizer["unknown"]
        numbers = torch.arange(FIRST_PIECE + tokenizer["pieces"]) - FIRST_PIECE
        numbers[:FIRST_PIECE] = self._pad
        numbers[UNK_ID] = unknown
        for name, values in (("numbers", numbers), ("before", tokenizer["before"]), ("after", tokenizer["after"])):
            self.register_buffer(name, torch.as_tensor(values, dtype=torch.int64), persistent=False)
        self.most_leaves = _most_positions(self.pretrained, len(tokenizer["before"]) + len(tokenizer["after"]))

    @property
    def weight(self) -> Tensor:
        """Return the table of pieces of the pretrained encoder."""
        return self.pretrained.get_input_embeddings().weight

    @property
    def is_trained(self) -> bool:
        """Return whether a parameter of the pretrained encoder is trained."""
        return any(parameter.requires_grad for parameter in self.pretrained.parameters())

    def layers(self) -> list[nn.Module]:
        """Return the layers that transformers marks as such. Raises UserError if there are none."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        if not (found := [module for module in self.pretrained.modules() if isinstance(module, GradientCheckpointingLayer)]):
            kind = self.pretrained.config.model_type
            raise UserError(f"checkpoint_activations must be false: transformers cannot compute the layers of {kind} again")
        return found

    def of_leaves(self, batch: TreeBatch) -> Tensor:
        """Return the states of leaves [B, L, D]."""
        return self.encode(batch)[0]

    def vectors(self, pieces: Tensor) -> Tensor:
        """Return the vectors of pieces [..., H] below the first layer of the pretrained encoder."""
        return F.embedding(self.numbers[pieces], self.weight)

    def encode(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        """Return the states of leaves [B, L, D], and that of the first position, [CLS] of BERT [B, D].

        A batch with `leaf_states` has them computed already.
        """
        states, first = (
            (batch.leaf_states, 1) if batch.leaf_states is not None else self.read(batch.leaf_pieces, batch.leaf_pad_mask)
        )
        if self.project is not None:
            states = self.project(states)
        return states[:, first : first + batch.leaf_pieces.shape[1]], states[:, 0]

    def read(self, pieces: Tensor, pad_mask: Tensor) -> tuple[Tensor, int]:
        """Return the states of the first position, and from which place on those of pieces [B, L]: [B, S, H]."""
        if self.most_leaves is None or pieces.shape[1] <= self.most_leaves:
            return self._run(pieces, pad_mask), len(self.before)
        windows = Windows.of((~pad_mask).sum(1).cpu().numpy(), self.most_leaves)
        rows, starts = (torch.from_numpy(column).to(pieces.device) for column in (windows.rows, windows.starts))
        places = starts[:, None] + torch.arange(self.most_leaves, device=pieces.device)
        outside, places = places >= pieces.shape[1], places.clamp(max=pieces.shape[1] - 1)
        with self._keys_of(rows, starts):
            states = self._run(pieces[rows[:, None], places], pad_mask[rows[:, None], places] | outside)
        window, offset = (torch.from_numpy(part).to(pieces.device) for part in windows.places(pieces.shape[1]))
        return torch.cat([states[window[:, :1], 0], states[window, len(self.before) + offset]], 1), 1

    def _run(self, pieces: Tensor, pad_mask: Tensor) -> Tensor:
        """Return the states [B, W, H] of texts that the pretrained encoder can read at once."""
        numbers, mask = self._inputs(pieces, pad_mask)
        trained = self.is_trained
        if self.pretrained.training != (self.training and trained):
            self.pretrained.train(self.training and trained)
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            return self.pretrained(input_ids=numbers, attention_mask=mask).last_hidden_state

    @contextmanager
    def _keys_of(self, rows: Tensor, starts: Tensor) -> Iterator[None]:
        """Let dropout have a key for each window [N], from the key of its text and its first leaf."""
        shared = next((module.shared for module in self.pretrained.modules() if isinstance(module, _KeyedDropout)), None)
        if not self.training or shared is None or shared.keys is None:  # a validation has those of the last training batch
            yield
            return
        keys = shared.keys
        shared.keys = mix(keys[rows] + starts.to(torch.int32)).where(starts > 0, keys[rows])
        try:
            yield
        finally:
            shared.keys = keys

    def _inputs(self, pieces: Tensor, pad_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokenizer's numbers [B, W] of pieces and those around them, and the mask [B, W] int64, 1 = real."""
        rows, leaves = pieces.shape
        before, after = len(self.before), len(self.after)
        numbers = pad_mask.new_full((rows, before + leaves + after), self._pad, dtype=torch.int64)
        numbers[:, :before] = self.before
        numbers[:, before : before + leaves] = self.numbers[pieces.masked_fill(pad_mask, PAD_ID)]
        ends = before + (~pad_mask).sum(1, keepdim=True)
        places = torch.arange(before + leaves + after, device=numbers.device)
        numbers = numbers.scatter(1, ends + places[:after], self.after.expand(rows, -1))
        return numbers, (places < ends + after).to(torch.int64)


@dataclass(frozen=True)
class Windows:
    """Windows over texts, the windows of a text one after the other. Each begins half of `most` leaves after the one before.

    The last window of a text ends with the text. A text of at most `most` leaves has one window.
    """

    rows: np.ndarray  # [N] text of each window
    starts: np.ndarray  # [N] its first leaf
    most: int

    @classmethod
    def of(cls, lengths: np.ndarray, most: int) -> "Windows":
        """Return the windows over texts of these lengths [B]."""
        starts = [[*range(0, last, max(1, most // 2)), last] for last in np.maximum(0, lengths - most).tolist()]
        rows = np.repeat(np.arange(len(starts)), [len(of_text) for of_text in starts])
        return cls(rows, np.concatenate(starts).astype(np.int64), most)

    def places(self, leaves: int) -> tuple[np.ndarray, np.ndarray]:
        """Return window and place in it of each leaf [B, L].

        It is the window whose middle is nearest, so that the shorter of the two sides of the leaf is as long as it can be. Of
        two such windows it is the first. Places that are padding have some window.
        """
        first = np.flatnonzero(np.diff(self.rows, prepend=-1))
        window = np.repeat(first[:, None], leaves, axis=1)
        for row, starts in enumerate(np.split(self.starts, first[1:])):
            borders = starts[:-1] + starts[1:] + self.most - 1  # twice the leaf that is as near to both middles
            window[row] += np.searchsorted(borders, 2 * np.arange(leaves))
        return window, np.minimum(np.arange(leaves) - self.starts[window], self.most - 1)


def hash_encoder(described: Mapping, weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 of settings and weights of a pretrained encoder: what its states depend on.

    The weights are those of `stored_weights`.
    """
    settings = {name: value for name, value in described.items() if name not in _OF_NO_STATE}
    found = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, value in sorted(weights.items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()


def load_pretrained(leaves: PretrainedLeaves, folder: Path) -> None:
    """Load the weights of a folder, of safetensors alone and without the network.

    Raises UserError if some are missing, damaged or not finite, or of another type or shape.
    """
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its table of weights that do not fit
    try:
        types = _types_of_weights(folder)
        model, loaded = AutoModel.from_pretrained(
            folder, config=leaves.pretrained.config, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except MemoryError:
        raise
    except Exception as error:  # transformers and safetensors raise any kind on damaged files
        reason = first_line(error)
        raise UserError(f"model.pretrained.folder: cannot read the weights of {folder}: {reason[:200]}") from None
    finally:
        logging.set_verbosity(verbosity)
    if other := next((name for name, kind in types.items() if kind not in _FLOATING and not name.endswith("_ids")), None):
        raise UserError(
            f"model.pretrained.folder: {folder} has weights of type {types[other]}: {other}; choose an encoder in full or half "
            "precision"
        )
    if unlike := sorted(loaded["mismatched_keys"]):
        name, shape, described = unlike[0]
        raise UserError(
            f"model.pretrained.folder: {folder} has weights {name} of shape {tuple(shape)}, and its config.json describes "
            f"{tuple(described)}; copy both from the encoder again"
        )
    wanted, found = leaves.pretrained.state_dict(), model.state_dict()
    if missing := sorted(name for name in wanted if name not in found or name in loaded["missing_keys"]):
        raise UserError(f"model.pretrained.folder: {folder} has no weights {missing[0]} ({len(missing)} missing)")
    if broken := sorted(name for name in wanted if not found[name].isfinite().all()):
        raise UserError(f"model.pretrained.folder: {folder} has weights that are not finite: {broken[0]}; copy it again")
    leaves.pretrained.load_state_dict({name: found[name] for name in wanted})


def try_encoder(leaves: PretrainedLeaves, folder: Path) -> None:
    """Raise UserError if an encoder, loaded from a folder, gives no state of a whole text for each piece."""
    if reason := _what_fails(leaves):
        kind = leaves.pretrained.config.model_type
        raise UserError(
            f"model.pretrained.folder: {folder} holds a model of type {kind}, which gives no state of a text for each piece: "
            f"{reason}; {CHOOSE}"
        )


@torch.no_grad()
def _what_fails(leaves: PretrainedLeaves) -> str:
    """Return why an encoder gives no state of a whole text, and of nothing else, for each piece; empty if it does.

    It reads two short texts by themselves, beside one that has as many pieces as it can read, and with other pieces after the
    first.
    """
    longest, training = min(leaves.most_leaves or _TRIED, _TRIED), leaves.training
    lengths = [longest, min(longest, 5), min(longest, 6)]  # of models that pool pairs, one length has no padding in a pair
    device = leaves.numbers.device
    pieces = FIRST_PIECE + (torch.arange(longest, device=device) * 7 % (len(leaves.numbers) - FIRST_PIECE)).expand(3, -1)
    pad_mask = torch.arange(longest, device=device) >= torch.tensor(lengths, device=device)[:, None]
    leaves.eval()
    try:
        states, first = leaves.read(pieces, pad_mask)
        wanted = (3, longest + first + len(leaves.after), leaves.width)
        if tuple(states.shape) != wanted:
            return f"its states have the shape {tuple(states.shape)} where {wanted} was expected"
        for row, length in enumerate(lengths[1:], 1):
            short, no_padding = pieces[:1, :length], pad_mask[:1, :length]
            alone, _ = leaves.read(short, no_padding)
            size = _TOLERANCE * alone.abs().max()
            if not (states[row, : first + length] - alone[0, : first + length]).abs().max() < size:  # also NaN
                return "the states of a text change with the padding after it"
        repeated, _ = leaves.read(short[:, :1].expand_as(short), no_padding)
        decodes = length > 1 and (repeated - alone)[0, : first + 1].abs().max() < size
        return "the state of a piece does not change with the pieces after it" if decodes else ""
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:  # of models with other arguments
        return one_line(f"{type(error).__name__}: {error}", 200)
    finally:
        leaves.train(training)


def _types_of_weights(folder: Path) -> dict[str, str]:
    """Return the type of each tensor in the files of weights, as safetensors names it."""
    types: dict[str, str] = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            types |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return types


def _build_encoder(described: Mapping) -> Any:
    """Build the encoder without its weights, and draw nothing from the generator that the rest of the model uses."""
    require("transformers", "model.pretrained")
    from transformers import AutoConfig, AutoModel

    # Implementations of layers that a file names would be downloaded and run.
    values = {name: value for name, value in described.items() if name not in _OF_CODE and not name.startswith("_")}
    try:
        with torch.random.fork_rng(devices=[]):
            config = AutoConfig.for_model(described["model_type"], **values)
            if getattr(config, "attention_type", "") == "block_sparse":  # BigBird takes the other at its first short text
                config.attention_type = "original_full"
            model = AutoModel.from_config(config, trust_remote_code=False).float()
    except MemoryError:
        raise
    except Exception as error:  # transformers raises any kind on settings that fit no model
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"config.json of the pretrained encoder describes no model ({reason}); copy it again") from None
    if not hasattr(model.config, "hidden_size"):
        raise UserError(f"config.json of the pretrained encoder: a {described['model_type']} has no hidden_size; {CHOOSE}")
    if getattr(model, "pooler", None) is not None:
        model.pooler = nn.Identity()  # instead of a layer that no model here reads
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, _KeyedDropout(child.p))
    return model


class _KeyedDropout(Dropout):
    """Dropout of states by key; that of attention weights [B, heads, W, W] draws from PyTorch's generator."""

    def forward(self, x: Tensor, num_leaves: int | None = None) -> Tensor:
        return super().forward(x, num_leaves) if x.dim() == 3 else F.dropout(x, self.p, self.training)


def _most_positions(model: nn.Module, around: int) -> int | None:
    """Return the most leaves of an example by the table of positions; None for encoders without such a table."""
    for name, module in model.named_modules():
        table = getattr(module, "weight", None)  # some families have their own class of tables
        if name.endswith(("position_embeddings", "embed_positions")) and isinstance(table, Tensor) and table.dim() == 2:
            padding = getattr(module, "padding_idx", None)
            rows = len(table) - (0 if padding is None else padding + 1)
            # A table may have rows that its model never reads.
            return min(rows, getattr(model.config, "max_position_embeddings", rows)) - around
    return None
