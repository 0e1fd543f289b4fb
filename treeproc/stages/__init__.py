"""The stages of a data set: text, parsed, vocabulary, encoded. One call does one shard.

Workers are plain classes; `ray_job` runs them in actors or tasks. A shard depends on its inputs and settings alone, never on who
computed it or what else ran.
"""
