"""Settings of models that were set but have no effect, because the model or its use does not read them."""

from typing import Any

from treenet.config.models import ModelConfig, RelationConfig

_TREE2SEQ, _TREE_LSTMS = ("tree2seq", "child_sum_tree2seq"), ("tree_lstm", "child_sum_tree_lstm")


def unread_settings(model: ModelConfig, *, translates: bool) -> list[str]:
    """Return the sections and settings, as dotted keys, that were set, but that a model for translation or not ignores."""
    unread = [key for key, ignored in _ignored(model, translates).items() if ignored and _is_set(model, *key.split("."))]
    foreign = model.foreign_sections()
    return model.unread_sections() + [key for key in unread if key.partition(".")[0] not in foreign]


def _is_set(model: ModelConfig, *names: str) -> bool:
    value: Any = model
    default: Any = ModelConfig()
    for name in names:
        value, default = getattr(value, name, None), getattr(default, name, None)
    return bool(value != default)


def _ignored(model: ModelConfig, translates: bool) -> dict[str, bool]:
    """Return, for all settings that only some models read, whether this one ignores them, if it has their section.

    `num_heads` and `relations.decoder` count as read where d_model or relations.sequence is refused without them.
    """
    tree, kinds = model.tree, [(name, kind) for name, kind in model.relations if isinstance(kind, RelationConfig)]
    is_lstm = model.name in ("bilstm", *_TREE2SEQ, *_TREE_LSTMS)
    no_leaf_layers = model.name in _TREE2SEQ and not model.recurrent.leaf_lstm
    without_tables = tree.accumulate_on == "scores" or not tree.hierarchical_embeddings
    no_heads = model.name == "pretrained" or (is_lstm and not (translates and model.recurrent.attend))
    needs_heads = model.d_model % (2 * ModelConfig.model_fields["num_heads"].default) != 0
    return {
        "num_heads": (no_heads or model.name == "convs2s") and not needs_heads,
        "d_ff": is_lstm or model.name in ("convs2s", "pretrained"),
        "attention_dropout": no_heads,
        "num_encoder_layers": model.name in (*_TREE_LSTMS, "pretrained") or no_leaf_layers,
        "num_decoder_layers": not translates,
        "tree.hierarchical_embeddings": tree.accumulate_on == "scores",
        "tree.vertical_rows": without_tables,
        "tree.horizontal_rows": without_tables,
        "hybrid.chunk_size": model.hybrid.cell != "on_lstm",
        "phrases.chunk_size": model.phrases.interaction != "on_lstm",
        **{f"relations.{name}.{key}": not kind.clip for name, kind in kinds for key in ("values", "same")},
        "relations.decoder": not translates and bool(model.relations.sequence.clip),
        "recurrent.directions": model.name != "bilstm",
        "recurrent.leaf_lstm": model.name == "bilstm",
        "recurrent.start": not translates,
        "recurrent.attend": not translates,
        "tree_reg.layer": not model.tree_reg.weight,
        "tree_reg.heads": not model.tree_reg.weight,
    }
