"""Training of the parser's own models: tokeniser, tagger, constituency parser and dependency parser."""
