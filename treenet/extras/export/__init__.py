"""Trained translation models in the formats of other programs: a folder that holds all it needs, ONNX, CTranslate2."""
