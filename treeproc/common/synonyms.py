"""Words of fairseq, OpenNMT, JoeyNMT and Hugging Face for settings that have another name here.

Messages about unknown keys use an entry if the command has all settings that the entry names.
"""

import re

# The name of our setting, or a short advice, and their words for it.
ELSEWHERE = {
    # length of training
    "training counts updates, not epochs: set max_steps": "epochs epoch max_epoch max_epochs num_epochs num_train_epochs",
    "max_steps": "max_update max_updates train_steps total_steps num_steps",
    "patience": "patience early_stopping early_stopping_patience",
    "tree-attention scaling --out DIR, or compare-seeds, trains a grid of runs": "grid",
    # batches
    "a batch counts pieces, not sentences: set batch.max_tokens": (
        "batch_size max_sentences train_batch_size per_device_train_batch_size"
    ),
    "batch.budget_counts": "batch_type",
    "batch.max_tokens": "max_tokens",
    "set batch.tokens_per_device: a worker adds the gradients of micro-batches up to batch.max_tokens": (
        "update_freq accum_count batch_multiplier gradient_accumulation_steps"
    ),
    "set batch.max_leaves and batch.max_target_pieces; decoding.max_length_factor limits translations": (
        "max_len max_length max_seq_length"
    ),
    "batch.max_leaves": "max_source_length max_source_positions src_seq_length",
    "batch.max_target_pieces": "max_target_length max_target_positions tgt_seq_length",
    # optimiser
    "optimizer.learning_rate": "lr learning_rate peak_lr",
    "the optimiser is Adam; set optimizer.learning_rate, optimizer.adam_betas and optimizer.weight_decay": "optim",
    "optimizer.warmup_steps": "warmup warmup_steps warmup_updates warmup_ratio learning_rate_warmup",
    "optimizer.decay_steps=N makes the rate fall linearly to 0; else it falls as 1 / sqrt(update)": (
        "lr_scheduler lr_scheduler_type scheduler scheduling decay_method"
    ),
    "optimizer.adam_betas": "betas adam_beta1 adam_beta2",
    "optimizer.adam_eps": "adam_epsilon",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.label_smoothing": "label_smoothing label_smoothing_factor",
    "optimizer.clip_norm": "clip_grad_norm max_grad_norm gradient_clip_val",
    "ema_decay": "ema average_decay",
    # model
    "model.name": "arch model_type encoder_type",
    "model.d_model": "hidden_size hidden_dim embedding_dim embed_dim encoder_embed_dim decoder_embed_dim word_vec_size rnn_size",
    "model.d_ff": "ff_size ffn_dim encoder_ffn_embed_dim decoder_ffn_embed_dim transformer_ff intermediate_size",
    "model.num_heads": "heads n_heads num_attention_heads encoder_attention_heads decoder_attention_heads",
    "set model.num_encoder_layers and model.num_decoder_layers": "layers n_layers num_layers",
    "model.num_encoder_layers": "num_hidden_layers enc_layers encoder_layers",
    "model.num_decoder_layers": "dec_layers decoder_layers",
    "model.dropout": "dropout dropout_rate hidden_dropout_prob",
    "model.attention_dropout": "attention_probs_dropout_prob",
    # machine
    "write use_gpu=true to compute on a GPU": "device cuda use_cuda gpu",
    "write use_gpu=true workers=N for N GPUs": "gpus n_gpu num_gpus gpu_ranks world_size distributed_world_size",
    "write precision=fp16 use_gpu=true": "fp16",
    "write precision=bf16": "bf16",
    "precision": "model_dtype",
    "loader_workers": "num_workers dataloader_num_workers",
    "compile": "torch_compile",
    "checkpoint_activations": "gradient_checkpointing",
    "shard_weights": "fsdp",
    "seed": "random_seed seed",
    # checkpoints, validation, logs
    "checkpoint_every": "save_steps save_interval_updates save_checkpoint_steps",
    "keep_checkpoints": "save_total_limit keep_checkpoint keep_last_epochs keep_best_ckpts",
    "validate_every": "eval_steps valid_steps validation_freq validate_interval_updates",
    "valid_metric": "eval_metric early_stopping_metric metric_for_best_model",
    "write average=best valid_metric=bleu, or valid_metric=chrf": "best_checkpoint_metric load_best_model_at_end",
    "log_every": "logging_steps logging_freq log_interval report_every",
    "loggers": "report_to",
    "init": "finetune_from_model model_name_or_path load_model",
    "run the same command again, with the same --out: it continues": "train_from restore_file resume resume_from_checkpoint",
    "give --out DIR, the folder of the results": "output_dir save_dir save_model model_dir destdir",
    # translation
    "decoding.beam_size": "beam beams num_beams beam_size",
    "decoding.length_penalty": "lenpen alpha beam_alpha length_penalty",
    "decoding.max_length_factor": "max_len_a",
    "decoding.max_length_offset": "max_len_b max_new_tokens max_output_length",
    "write decoding.method=sampling": "do_sample",
    "decoding.top_k": "sampling_topk random_sampling_topk",
    "decoding.top_p": "random_sampling_topp",
    "nbest": "n_best num_return_sequences",
    "input": "src",
    # preprocessing
    "parser.language": "source_lang src_lang lang language",
    "write splits.train.source=FILE splits.train.target=FILE": "source target train train_src train_tgt trainpref train_file",
    "write splits.valid.source=FILE splits.valid.target=FILE": "valid_src valid_tgt validpref validation_file",
    "write splits.test.source=FILE splits.test.target=FILE": "testpref test_file",
    "subwords.vocab_size": "bpe_size num_operations src_vocab_size nwordssrc voc_limit",
    "subwords.joint": "share_vocab joined_dictionary",
    "subwords.lowercase": "lower do_lower_case",
    "filters.max_words": "max_words",
    "filters.max_ratio": "length_ratio",
}
SYNONYMS = {word: meant for meant, words in ELSEWHERE.items() for word in words.split()}

# In an advice, a setting has a dot or an underscore in its name, or `=` after it.
_SETTING = re.compile(r"(?<![\w./-])(?:[a-z]\w*(?:\.[a-z]\w*)+|[a-z]+_\w+|[a-z]\w*(?==))")


def settings_in(advice: str) -> list[str]:
    """Return the dotted names of the settings that a value of `SYNONYMS` names."""
    return _SETTING.findall(advice) if " " in advice else [advice]
