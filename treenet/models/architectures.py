"""The registry of architectures: encoders by name, and the models that they make.

The file of an encoder registers it. `treenet.models.registry` imports all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from treenet.config import ModelConfig
from treenet.models.decoders.base import Decoder
from treenet.models.encoders.base import Encoder, PieceEmbedding
from treeproc.common.arguments import check_choice

Use = Literal["translation", "classification", "masked_lm", "causal_lm"]


@dataclass(frozen=True)
class Architecture:
    """An encoder, the decoder for translation, and the other uses that were tested with this encoder."""

    encoder: type[Encoder]
    decoder: Callable[[ModelConfig, PieceEmbedding], Decoder] | None = None
    uses: tuple[Use, ...] = ()

    def serves(self, use: Use) -> bool:
        """Return whether there are models of this use."""
        check_choice("use", use, Use)
        return self.decoder is not None if use == "translation" else use in self.uses


ARCHITECTURES: dict[str, Architecture] = {}


def register(name: str, architecture: Architecture) -> None:
    """Register an architecture under a value of `model.name`. Raises ValueError if the name is taken."""
    if name in ARCHITECTURES:
        raise ValueError(f"two architectures have the name {name}")
    ARCHITECTURES[name] = architecture
