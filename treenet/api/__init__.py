"""The library: what `import treenet` offers, documented in docs/api.md. Everything in it is made of the rooms below."""
