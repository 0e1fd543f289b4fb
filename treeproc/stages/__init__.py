"""The preprocessing job: its settings, its stages (text, parsed, vocabulary, encoded), and what runs them, here or on Ray.

Workers are plain classes that do one shard in one call; `ray_job` runs them in actors or tasks. A shard depends on its inputs and
settings alone, never on who computed it or what else ran.
"""
