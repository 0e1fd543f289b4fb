"""Trees and arcs: spans, brackets, normal forms, control trees, and their scores."""
