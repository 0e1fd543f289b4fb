"""Training of this project's own models: tokeniser, tagger, constituency parser and dependency parser."""
