"""BERTScore and COMET: scores of trained models, which need a model in a local folder."""
