"""vLLM: its servers as receivers, and the plugin engine inside their workers."""
