"""The preprocessing job: its settings, its stages in order, its workers, and its report."""
