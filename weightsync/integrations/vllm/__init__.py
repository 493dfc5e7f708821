"""vLLM: its servers as receivers, and the engine that their workers load as a plugin."""
