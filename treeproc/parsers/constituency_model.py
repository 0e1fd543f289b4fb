"""Stanza's in-order shift-reduce parser as it is read: from a model of Stanza, or from a file."""

from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treeproc.parsers.weights import Vocabulary, tensors_of

SHIFT, CLOSE, OPEN = 0, 1, 2
_KINDS = {"Shift": SHIFT, "CloseConstituent": CLOSE, "OpenConstituent": OPEN}
ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "silu": torch.nn.functional.silu}


def can_read(model: nn.Module) -> bool:
    """Return whether a constituency parser of Stanza is one model with a stack of LSTMs, not an ensemble."""
    return type(model).__name__ == "LSTMModel"


@dataclass(frozen=True)
class ConstituencyModel:
    """A constituency parser of Stanza: its tensors by name, its settings, and the lists that it has by heart."""

    tensors: dict[str, Tensor]
    args: Mapping[str, Any]
    transitions: list[tuple[int, tuple[str, ...]]]  # kind and labels; only those of OPEN have labels
    root_labels: Sequence[str]
    opens: Sequence[tuple[str, ...]]
    unary_limit: int
    tags: Sequence[str]
    words: Sequence[str]  # with vectors that the parser learned
    vectors: Vocabulary
    vector_table: Tensor  # [vectors, D]
    stanza: nn.Module | None = None  # None if it comes from a file

    @classmethod
    def of(cls, model: nn.Module) -> "ConstituencyModel":
        """Take a model of Stanza that `is_supported`."""
        tensors = tensors_of(model.state_dict())
        opens = [(kind, tuple(getattr(one, "label", ()))) for one in model.transitions for kind in [_KINDS[type(one).__name__]]]
        return cls(
            tensors, model.args, opens, model.root_labels, model.constituent_opens, model.unary_limit, model.tags,
            model.delta_words, Vocabulary(vars(model.emb_vocab)), tensors["embedding.weight"], model,
        )  # fmt: skip

    @classmethod
    def read(cls, content: Mapping, vectors: Mapping, device: torch.device) -> "ConstituencyModel":
        """Take the content of a file and that of its word vectors. Raises KeyError or ValueError for something else."""
        if content["model_type"] != "LSTM":
            raise ValueError(f"a parser of type {content['model_type']}")
        params = content["params"]
        tensors = tensors_of(params["model"], device)
        transitions = []
        for text in params["transitions"]:
            name, _, labels = text.partition("(")
            transitions.append((_KINDS[name], tuple(literal_eval(labels[:-1])) if labels else ()))
        return cls(
            tensors, params["config"], transitions, params["root_labels"], sorted(params["constituent_opens"]),
            params["unary_limit"], sorted(params["tags"]), sorted(params["words"]), Vocabulary(vectors["vocab"]),
            torch.as_tensor(vectors["emb"]).to(device, torch.float32),
        )  # fmt: skip

    @property
    def is_supported(self) -> bool:
        """Return whether the parser has the kind of all published English models: in-order, LSTM stacks, MAX."""
        args = self.args
        names = {"transition_scheme": "IN_ORDER", "constituency_composition": "MAX"}
        names |= {"transition_stack": "LSTM", "constituent_stack": "LSTM"}
        return (
            all(getattr(args[key], "name", args[key]) == name for key, name in names.items())
            and args["num_lstm_layers"] == 2
            and args["num_tree_lstm_layers"] == 1
            and not args.get("maxout_k")
            and not args.get("reversed")
            and args["nonlinearity"] in ACTIVATIONS
        )

    @property
    def is_plain(self) -> bool:
        """Return whether the parser reads only words and tags, between vectors of the ends of a sentence."""
        args, boundary = self.args, self.args["sentence_boundary_vectors"]
        others = ("bert_model", "charlm_forward_file", "charlm_backward_file", "use_lattn", "use_rattn")
        return (
            not any(args.get(name) for name in others)
            and not args.get("pattn_num_layers")
            and args["tag_embedding_dim"] > 0
            and getattr(boundary, "name", boundary) != "NONE"
        )

    @property
    def reads_xpos(self) -> bool:
        """Return whether the parser reads XPOS; else UPOS."""
        return self.args["retag_package"] is not None and self.args["retag_method"] == "xpos"
