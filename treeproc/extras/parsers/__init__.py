"""Parsers that need further packages (spaCy, benepar, SuPar) or a server (CoreNLP)."""
