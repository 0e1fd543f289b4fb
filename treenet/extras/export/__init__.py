"""Trained translation models in the formats of other programs: ONNX, CTranslate2."""
