"""Trained models in the formats of other programs: ONNX and CTranslate2 for translation, GPT-2 for language models."""
