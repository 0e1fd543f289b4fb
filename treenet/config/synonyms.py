"""Words of other toolkits (fairseq, OpenNMT, JoeyNMT, Hugging Face) for what a setting does here.

A value is the dotted name of a setting, or a sentence if no single setting does the same.
"""

_EPOCHS = "Training counts updates: set max_steps. `tree-attention train --dry-run` prints the updates of an epoch."

SYNONYMS: dict[str, str] = {
    "lr": "optimizer.learning_rate",
    "peak_lr": "optimizer.learning_rate",
    "warmup": "optimizer.warmup_steps",
    "warmup_updates": "optimizer.warmup_steps",
    "betas": "optimizer.adam_betas",
    "clip_grad_norm": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "optim": "The optimiser is always Adam, or AdamW with optimizer.weight_decay. The section optimizer has its settings.",
    "epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "max_update": "max_steps",
    "train_steps": "max_steps",
    "batch_size": "batch.max_tokens",
    "max_tokens": "batch.max_tokens",
    "per_device_train_batch_size": "batch.tokens_per_device",
    "device": "use_gpu",
    "fp16": "precision",
    "bf16": "precision",
    "hidden_size": "model.d_model",
    "embed_dim": "model.d_model",
    "ffn_dim": "model.d_ff",
    "heads": "model.num_heads",
    "early_stopping": "patience",
    "logging_steps": "log_every",
    "eval_steps": "validate_every",
    "save_steps": "checkpoint_every",
    "save_total_limit": "keep_checkpoints",
    "gradient_checkpointing": "checkpoint_activations",
    "fsdp": "shard_weights",
    "num_beams": "decoding.beam_size",
    "beam": "decoding.beam_size",
    "lenpen": "decoding.length_penalty",
    "do_sample": "decoding.method",
}
