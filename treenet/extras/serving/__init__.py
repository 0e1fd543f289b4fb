"""A server of translations: sentences in; trees, translations, scores and attention out."""
