"""vLLM's flags, configuration files and environment variables: each is honoured, accepted with a word, or refused.

A command takes part by `@click.command(cls=VllmCommand, flags=...)`. `python -m rvllm.cli.vllm` prints
docs/vllm-flags.md.
"""
