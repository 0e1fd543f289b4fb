"""The library: what `import treenet` offers. Everything in it is made of the rooms below."""
