"""forerun inside vLLM: plug-ins that count its steps and show them on vLLM's own server."""
